"""What each process of test_windows.py runs: a window of two micro-batches, in which the loss scale moves.

The first micro-batch is not reduced. Before the second, another model of the session overflows, trains, or the second
has a loss scale of its own. The update is compared with that of one process in fp64 that sees the batches of all ranks.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import engine_cases
import torch
import torch.distributed as dist
from engine_cases import LR
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import xamp


def ddp(model: Any) -> Any:
    return DistributedDataParallel(model)


def fsdp1(model: Any) -> Any:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def fsdp2(model: Any) -> Any:
    return fully_shard(model, mesh=engine_cases.mesh(dist.get_world_size()))


def hsdp(model: Any) -> Any:
    return fully_shard(model, mesh=engine_cases.mesh(dist.get_world_size(), 1, names=("across", "within")))


ENGINES: tuple[Callable[[Any], Any], ...] = (ddp, fsdp1, fsdp2, hsdp)
LEVELS = ("O1", "O2")
WINDOWS = ("alone", "the other overflows", "the other steps", "two scales")


@contextlib.contextmanager
def postponed(engine: Callable[[Any], Any], model: Any) -> Iterator[None]:
    if engine in (ddp, fsdp1):
        with model.no_sync():
            yield
        return
    switch = model.set_requires_all_reduce if engine is hsdp else model.set_requires_gradient_sync
    switch(False)
    yield
    switch(True)


def backward(model: Any, optimizer: Any, micro: int, factor: float, loss_id: int = 0) -> None:
    x, target = engine_cases.batch(0, micro, dist.get_rank())
    with xamp.scale_loss(engine_cases.loss_of(model(x), target) * factor, optimizer, loss_id=loss_id) as scaled:
        scaled.backward()


def train(engine: Callable[[Any], Any], level: str, window: str) -> float:
    """How far the update is off, as a share of the largest one."""
    models = [engine_cases.net(), engine_cases.net()]
    late = engine is ddp
    outer = models if late else [engine(model) for model in models]
    optimizers = [torch.optim.SGD(model.parameters(), lr=LR) for model in outer]
    xamp.initialize(outer, optimizers, level, init_scale=1024.0, num_losses=2, verbosity=0)
    if late:
        outer = [engine(model) for model in models]
    (model, other), (optimizer, its_own) = outer, optimizers
    loss_id = 0
    if window == "two scales":  # one overflow halves that of the second loss
        backward(model, optimizer, 0, float("inf"), loss_id=1)
        optimizer.step()
        optimizer.zero_grad()
        loss_id = 1
    start = engine_cases.whole(model)
    with postponed(engine, model):
        backward(model, optimizer, 0, 0.5)
        if window == "the other steps":
            step_other(other, its_own, 1.0)
    if window == "the other overflows":
        step_other(other, its_own, float("inf"))
    backward(model, optimizer, 1, 0.5, loss_id)
    optimizer.step()
    end = engine_cases.whole(model)
    wanted = reference()
    largest = max(float(update.abs().max()) for update in wanted.values())
    return max(float((end[name] - start[name] - update).abs().max()) for name, update in wanted.items()) / largest


def step_other(model: Any, optimizer: Any, factor: float) -> None:
    backward(model, optimizer, 5, factor)
    xamp.clip_grad_norm_(optimizer, 1.0)
    optimizer.step()
    optimizer.zero_grad()


def reference() -> dict[str, torch.Tensor]:
    """By name, the update of one process in fp64."""
    model = engine_cases.net().double()
    seen = [engine_cases.batch(0, micro, rank) for micro in range(2) for rank in range(dist.get_world_size())]
    losses = [engine_cases.loss_of(model(x.double()), target.double()) for x, target in seen]
    torch.stack(losses).mean().backward()
    return {name: -LR * p.grad for name, p in model.named_parameters()}


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    found = {
        f"{engine.__name__}, {window}, {level}": train(engine, level, window)
        for engine in ENGINES
        for window in WINDOWS
        for level in LEVELS
    }
    (Path(sys.argv[1]) / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # see ddp_worker.py
