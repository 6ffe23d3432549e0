"""What each process of test_windows.py runs: windows of two micro-batches, in which the loss scale moves.

``engines``: the first micro-batch is not reduced. Before the second, another model of the session overflows, trains, or
the second has a loss scale of its own. The update is compared with that of one process in fp64 that sees the batches of
all ranks.

``compiled``: windows of DDP around compiled models: a graph does not see whether a forward runs in ``no_sync``.
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
from torch import nn
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


def fsdp2_unfinished(model: Any) -> Any:
    """The first micro-batch is reduced, but FSDP does not wait for that."""
    return fsdp2(model)


ENGINES: tuple[Callable[[Any], Any], ...] = (ddp, fsdp1, fsdp2, fsdp2_unfinished, hsdp)
LEVELS = ("O1", "O2", "O5")
MASTERS = LEVELS[1:]
WINDOWS = ("alone", "the other overflows", "the other steps", "two scales", "frozen", "bare", "bare, 1000", "cleared")
"""With "frozen" the other steps too, and FSDP's first parameter has no gradient; "bare" is a first micro-batch without
``scale_loss``, also where the second has a static scale that is no power of two, and before "cleared" there was
another, whose gradients ``zero_grad`` clears before they are reduced."""


@contextlib.contextmanager
def postponed(engine: Callable[[Any], Any], model: Any) -> Iterator[None]:
    if engine in (ddp, fsdp1):
        with model.no_sync():
            yield
        return
    switches: dict[Any, Callable[[bool], None]] = {
        hsdp: model.set_requires_all_reduce,
        fsdp2_unfinished: model.set_is_last_backward,
    }
    switch: Callable[[bool], None] = switches.get(engine, model.set_requires_gradient_sync)
    switch(False)
    yield
    switch(True)


def backward(model: Any, optimizer: Any, micro: int, factor: float, loss_id: int = 0, bare: bool = False) -> None:
    x, target = engine_cases.batch(0, micro, dist.get_rank())
    if bare:
        (engine_cases.loss_of(model(x), target) * factor).backward()
        return
    with xamp.scale_loss(engine_cases.loss_of(model(x), target) * factor, optimizer, loss_id=loss_id) as scaled:
        scaled.backward()


def train(engine: Callable[[Any], Any], level: str, window: str) -> float:
    """How far the update is off, as a share of the largest one."""
    models = [engine_cases.net(), engine_cases.net()]
    models[0][0].weight.requires_grad_(window != "frozen")
    late = engine is ddp
    outer = models if late else [engine(model) for model in models]
    optimizers = [torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR) for model in outer]
    scale: dict[str, Any] = {"loss_scale": "dynamic", "init_scale": 1024.0}
    if window == "bare, 1000":
        scale = {"loss_scale": 1000.0}
    xamp.initialize(outer, optimizers, level, num_losses=2, verbosity=0, **scale)
    if late:
        outer = [engine(model) for model in models]
    (model, other), (optimizer, its_own) = outer, optimizers
    loss_id = 0
    if window == "two scales":  # one overflow halves that of the second loss
        backward(model, optimizer, 0, float("inf"), loss_id=1)
        optimizer.step()
        optimizer.zero_grad()
        loss_id = 1
    if window == "cleared":
        with postponed(engine, model):
            backward(model, optimizer, 7, 1.0)
        optimizer.zero_grad()
    start = engine_cases.whole(model)
    with postponed(engine, model):
        backward(model, optimizer, 0, 0.5, bare=window.startswith("bare"))
        if window in ("the other steps", "frozen"):
            step_other(other, its_own, 1.0)
    if window == "the other overflows":
        step_other(other, its_own, float("inf"))
    backward(model, optimizer, 1, 0.5, loss_id)
    optimizer.step()
    end = engine_cases.whole(model)
    wanted = reference(frozen=window == "frozen")
    largest = max(float(update.abs().max()) for update in wanted.values())
    return max(float((end[name] - start[name] - update).abs().max()) for name, update in wanted.items()) / largest


def step_other(model: Any, optimizer: Any, factor: float) -> None:
    backward(model, optimizer, 5, factor)
    xamp.clip_grad_norm_(optimizer, 1.0)
    optimizer.step()
    optimizer.zero_grad()


HOW = ("eager", "model", "ddp", "part", "model, run before", "ddp, run before", "part, run before")
"""What is compiled under DDP, and whether a forward ran eagerly before."""


def session(level: str) -> tuple[Any, torch.optim.Optimizer]:
    model = engine_cases.net()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    xamp.initialize(model, optimizer, level, loss_scale="dynamic", init_scale=1024.0, growth_interval=3, verbosity=0)
    return model, optimizer


def compiled(model: Any, optimizer: torch.optim.Optimizer, how: str) -> tuple[list[float], list[float]]:
    """The loss scale after each of eight steps, and the weights at the end.

    Rank 0 overflows in the first micro-batch of the third. ``no_sync`` is around that forward alone: DDP decides there.
    """
    torch._dynamo.reset()
    inner: Any = DistributedDataParallel(nn.Sequential(model) if how.startswith("part") else model)
    if "before" in how:
        inner(engine_cases.batch(0, 0, 0)[0])
    if not how.startswith(("eager", "ddp")):  # with "part", the model is inlined in another module's graph
        inner.module.compile(backend="eager", fullgraph=True)
    outer = torch.compile(inner, backend="eager") if how.startswith("ddp") else inner
    scales = []
    for step in range(8):
        optimizer.zero_grad()
        for micro in range(2):
            x, target = engine_cases.batch(step, micro, dist.get_rank())
            with inner.no_sync() if micro == 0 else contextlib.nullcontext():
                loss = engine_cases.loss_of(outer(x), target) * 0.5
            spoilt = step == 2 and micro == 0 and dist.get_rank() == 0
            with xamp.scale_loss(loss * float("inf") if spoilt else loss, optimizer) as scaled:
                scaled.backward()
        optimizer.step()
        scales.append(xamp.loss_scale(optimizer))
    return scales, [float(value) for p in model.parameters() for value in p.detach().flatten()]


def reference(frozen: bool) -> dict[str, torch.Tensor]:
    """By name, the update of one process in fp64."""
    model = engine_cases.net().double()
    model[0].weight.requires_grad_(not frozen)
    seen = [engine_cases.batch(0, micro, rank) for micro in range(2) for rank in range(dist.get_world_size())]
    losses = [engine_cases.loss_of(model(x.double()), target.double()) for x, target in seen]
    torch.stack(losses).mean().backward()
    return {name: -LR * p.grad for name, p in model.named_parameters() if p.grad is not None}


def windows_of_engines() -> dict[str, float]:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=600))
    # Each at O1, and at one of the two levels with masters: in turn, so that each engine and each window meet both.
    cases = [
        (engine, window, level)
        for row, engine in enumerate(ENGINES)
        for column, window in enumerate(WINDOWS)
        for level in ("O1", MASTERS[(row + column) % 2])
    ]
    return {f"{engine.__name__}, {window}, {level}": train(engine, level, window) for engine, window, level in cases}


def windows_of_compiled() -> dict[str, tuple[list[float], list[float]]]:
    cases = {(level, how): row + column for row, level in enumerate(LEVELS) for column, how in enumerate(HOW)}
    # Every other session is made before the process group. So all pairs of level, of what is compiled, and of early or
    # late occur. A case compiles for half a second.
    early = {case: session(case[0]) for case, place in cases.items() if place % 2}
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=600))
    return {", ".join(case): compiled(*(early.get(case) or session(case[0])), case[1]) for case in cases}


if __name__ == "__main__":
    found = {"engines": windows_of_engines, "compiled": windows_of_compiled}[sys.argv[1]]()
    (Path(sys.argv[2]) / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # see ddp_worker.py
