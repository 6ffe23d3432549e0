"""What each process of test_sequence_parallel.py runs: each rank has a part of every sequence.

Keys and values are gathered, and their gradients scattered, inside of the attention. So the overflow of one rank is in
the gradients of all, whatever reduces them afterwards. Each rank's loss is the mean over its part.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import xamp

LEVELS = ("O1", "O2", "O4", "O5")
COMPILED = {"ddp": ("O1", "O5"), "fsdp2": ("O1",), "by hand": ("O5",)}
"""By engine: under DDP a level that casts operators and one that casts the model, elsewhere one of them."""
COMPILERS = {"ddp": "aot_eager", "fsdp2": "eager", "by hand": "eager"}
"""By engine. aot_eager makes a graph of the backward too, with the scatters in it, and takes three times as long."""
STEPS, SPOILT, LR, MOMENTUM, MAX_NORM, LENGTH, WIDTH = 5, 2, 0.1, 0.9, 0.5, 8, 8


class Attention(nn.Module):
    """Keys and values of the whole sequence, from ``gather``; queries of this rank's part."""

    def __init__(self, gather: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.both, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gather = gather

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        keys, values = self.gather(self.both(normed)).chunk(2, -1)
        result: torch.Tensor = self.out(functional.scaled_dot_product_attention(self.query(normed), keys, values))
        return x + result


def everybody(x: torch.Tensor) -> torch.Tensor:
    group: Any = dist.group.WORLD
    gathered: torch.Tensor = all_gather_tensor_autograd(x.contiguous(), 1, group)
    return gathered


def net(gather: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(Attention(gather), Attention(gather), nn.Linear(WIDTH, 4))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2, LENGTH, WIDTH, generator=generator), torch.randn(2, LENGTH, 4, generator=generator)


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def reduce_by_hand(optimizer: torch.optim.Optimizer) -> None:
    for param in xamp.master_params(optimizer):
        assert param.grad is not None
        dist.all_reduce(param.grad)
        param.grad /= dist.get_world_size()


def train(engine: str, level: str, compiles: bool) -> dict[str, Any]:
    """Train, and tell how the steps went and how far the weights are from those of one process in fp64."""
    torch._dynamo.reset()
    model = net(everybody)
    if engine == "fsdp2":
        for block in model:
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    xamp.initialize(model, optimizer, level, loss_scale="dynamic", init_scale=1024.0, verbosity=0)
    outer: Any = DistributedDataParallel(model) if engine == "ddp" else model
    if compiles:
        outer = torch.compile(outer, backend=COMPILERS[engine])
    part = LENGTH // dist.get_world_size()
    mine = slice(dist.get_rank() * part, (dist.get_rank() + 1) * part)
    outcomes = []
    for step in range(STEPS):
        x, target = batch(step)
        loss = loss_of(outer(x[:, mine]), target[:, mine])
        if step == SPOILT and dist.get_rank() == 1:
            loss = loss * float("inf")
        with xamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        if engine == "by hand":
            reduce_by_hand(optimizer)
        xamp.clip_grad_norm_(optimizer, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        outcomes.append(xamp.session(optimizer).last_step.name)  # type: ignore[union-attr]
    state = {name: getattr(value, "full_tensor", lambda v=value: v)() for name, value in model.state_dict().items()}
    return {"outcomes": outcomes, "scale": xamp.loss_scale(optimizer), "off": off(state)}


def off(found: dict[str, torch.Tensor]) -> float:
    """How far weights are from those of one process in fp64, as a share of the largest move."""
    model = net(lambda x: x).double()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    for step in range(STEPS):
        if step != SPOILT:
            x, target = batch(step)
            optimizer.zero_grad()
            loss_of(model(x.double()), target.double()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
    wanted = model.state_dict()
    moved = max(float((wanted[name] - start[name]).abs().max()) for name in wanted)
    return max(float((found[name] - wanted[name]).abs().max()) for name in wanted) / moved


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=600))
    found = {
        f"{engine}{', compiled' if compiles else ''} {level}": train(engine, level, compiles)
        for engine in COMPILERS
        for compiles, levels in ((False, LEVELS), (True, COMPILED[engine]))
        for level in levels
    }
    (Path(sys.argv[1]) / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # see ddp_worker.py
