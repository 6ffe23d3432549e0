"""What each process of test_grad_scaler_ranks.py runs: GradScaler, however the ranks share a model or do not.

Rank 1 alone overflows, at the second of four steps. Where ranks decide together both skip it.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from saturating_chip import SATURATING
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import xamp
from xamp.registry import registry

STEPS, AT = 4, 1


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def local(tensor: Any) -> torch.Tensor:
    """This rank's part of a tensor."""
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def train(
    scaler: Any, model: nn.Module, params: list[Any], rank: int, overflow: Callable[[Any], None]
) -> dict[str, Any]:
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    scales, moved = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        before = [local(p).detach().clone() for p in params]
        loss = model(x).square().mean()
        scaler.scale(loss * float("inf") if overflow is in_loss and step == AT and rank == 1 else loss).backward()
        if step == AT and rank == 1:
            overflow(local(params[0].grad))
        scaler.unscale_(optimizer)
        if step != AT:
            nn.utils.clip_grad_norm_(params, 0.5)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        moved.append(any(not torch.equal(local(p).detach(), old) for p, old in zip(params, before, strict=True)))
    weights = b"".join(local(p).detach().numpy().tobytes() for p in params)
    return {"scales": scales, "moved": moved, "weights": hashlib.sha256(weights).hexdigest()}


def in_loss(grad: torch.Tensor) -> None:
    """The overflow is in the loss already."""


def in_gradient(grad: torch.Tensor) -> None:
    grad.view(-1)[0] = float("inf")


def scaler_of(kind: str) -> Any:
    options: dict[str, Any] = {"init_scale": 1024.0, "growth_interval": 2}
    return xamp.GradScaler(**options) if kind == "xamp" else torch.amp.GradScaler("cpu", **options)


def ddp(kind: str, rank: int) -> dict[str, Any]:
    model = make()
    return train(scaler_of(kind), DistributedDataParallel(model), list(model.parameters()), rank, in_loss)


def fsdp(kind: str, rank: int) -> dict[str, Any]:
    """The overflow is in one rank's shard alone."""
    model = make()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return train(scaler_of(kind), model, list(model.parameters()), rank, in_gradient)


def alone(kind: str, rank: int) -> dict[str, Any]:
    """Rank 0 trains once more than rank 1: a collective call would never end, or meet the next one."""
    found = {}
    for _ in range(2 - rank):
        model = make()
        found = train(scaler_of(kind), model, list(model.parameters()), rank, in_gradient)
    return found


def chip(rank: int, group: Any, wrapped: bool) -> dict[str, Any]:
    """On chips that saturate the other ranks are not told by the gradients."""
    before, registry.REGISTRY = registry.REGISTRY, registry.Registry((SATURATING,), group=None)
    model = make()
    backend = registry.resolve("auto", "cpu")
    scaler = scaler_of("xamp")
    scaler.process_group = group
    wrapper = DistributedDataParallel(model) if wrapped else model
    found = train(scaler, wrapper, list(model.parameters()), rank, backend.make_overflow_)
    registry.REGISTRY = before
    return found


DIFFERENT: dict[str, dict[str, Any]] = {
    "nothing": {},
    "init_scale": {"init_scale": 64.0},
    "growth_interval": {"growth_interval": 7},
    "backoff_factor": {"backoff_factor": 0.25},
    "enabled": {"enabled": False},
}


def different(rank: int, name: str, wrapped: bool) -> dict[str, Any]:
    """Rank 1 has another setting; what each rank is told, and at which step. Without a wrapper nothing is shared."""
    model = make()
    wrapper = DistributedDataParallel(model) if wrapped else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = xamp.GradScaler(**{"init_scale": 1024.0, **(DIFFERENT[name] if rank else {})})
    found: dict[str, Any] = {"error": "", "step": 3}
    for step in range(3):
        scaler.scale(wrapper(torch.ones(2, 8)).square().mean()).backward()
        if found["error"]:
            continue
        try:
            scaler.step(optimizer)
            scaler.update()
        except xamp.PolicyError as error:
            found = {"error": str(error), "step": step}
    return found


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    groups = [dist.new_group([0]), dist.new_group([1])]
    found = {f"{run.__name__} {kind}": run(kind, rank) for run in (ddp, fsdp, alone) for kind in ("xamp", "torch")}
    found["chip"] = chip(rank, None, True)
    found["chip alone"] = chip(rank, groups[rank], False)
    dist.barrier()
    for name in DIFFERENT:
        found[f"different {name}"] = different(rank, name, wrapped=True)
        found[f"different {name}, alone"] = different(rank, name, wrapped=False)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # see ddp_worker.py


if __name__ == "__main__":
    main(Path(sys.argv[1]))
