"""What each of the processes of test_ddp.py runs: a few steps of DDP training at one level, checked against a twin.

Writes one JSON file a rank. The reference is one process that runs every rank's shard through a copy of the model at
that level, and averages the scaled gradients in the gradients' own dtype, as DistributedDataParallel does.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import xamp

STEPS, MICRO, OVERFLOW_AT = 6, 2, 3


class Net(nn.Module):
    """A little of everything that has no state over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3)
        self.norm = nn.GroupNorm(2, 6)
        self.head = nn.Linear(6 * 36, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.head(torch.relu(self.norm(self.conv(x))).flatten(1))
        return hidden


def batch(step: int, micro: int, rank: int, explode: bool) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    x = torch.randn(8, 1, 8, 8, generator=generator)
    y = torch.randint(0, 10, (8,), generator=generator)
    return (x * 1e30 if explode and step == OVERFLOW_AT and rank == 1 else x), y


def loss_of(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x), y) / MICRO


def expected_gradients(model: nn.Module, step: int, world: int, scale: float, explode: bool) -> list[torch.Tensor]:
    """Unscaled fp32 gradients of the reference."""
    sums: list[torch.Tensor] = []
    for rank in range(world):
        twin = copy.deepcopy(model)
        twin.zero_grad()
        for micro in range(MICRO):
            (loss_of(twin, *batch(step, micro, rank, explode)) * scale).backward()
        parts = [p.grad / world for p in twin.parameters() if p.grad is not None]
        sums = [a + b for a, b in zip(sums, parts, strict=True)] if sums else parts
    return [g.float() / scale for g in sums]


def digest(tensors: list[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(t.detach().float().numpy().tobytes() for t in tensors)).hexdigest()


def main(level: str, explode: bool, folder: Path) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # ranks start apart: DDP shares rank 0's weights, and masters must follow
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = xamp.initialize(model, optimizer, level=level, init_scale=1024.0, growth_interval=4, verbosity=0)
    ddp = DistributedDataParallel(model)
    worst, outcomes, scales = 0.0, [], []
    for step in range(STEPS):
        scale = xamp.loss_scale(optimizer)
        expected = expected_gradients(model, step, world, scale, explode)
        optimizer.zero_grad()
        for micro in range(MICRO):
            last = micro == MICRO - 1
            ddp.require_backward_grad_sync = last
            with xamp.scale_loss(loss_of(ddp, *batch(step, micro, rank, explode)), optimizer) as scaled:
                scaled.backward()
            if not last and level != "O4":  # O4 scales and checks nothing, so it has nothing to refuse
                try:
                    xamp.clip_grad_norm_(optimizer, 1.0)
                except xamp.StateError:
                    pass
                else:
                    raise AssertionError("clipping before the reduction must be refused")
        got = torch.cat([p.grad.flatten() for p in xamp.master_params(optimizer) if p.grad is not None])
        want = torch.cat([g.flatten() for g in expected])
        if bool(want.isfinite().all()):
            worst = max(worst, float((got - want).norm() / want.norm()))
        xamp.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
        outcomes.append(xamp.session(optimizer).last_step.name)  # type: ignore[union-attr]
        scales.append(xamp.loss_scale(optimizer))
    result = {
        "rank": rank,
        "worst": worst,
        "outcomes": outcomes,
        "scales": scales,
        "weights": digest(list(model.parameters())),
        "masters": digest(list(xamp.master_params(optimizer))),
    }
    (folder / f"{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    os._exit(0)  # gloo's threads abort one process in five on its way out, without xamp too (torch 2.13.0, CPU build)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "explode", Path(sys.argv[3]))
