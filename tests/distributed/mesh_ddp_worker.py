"""What each process of test_mesh_ddp.py runs: tensor parallelism under DistributedDataParallel with a ``device_mesh``.

DDP takes the DTensors apart, so that the parameters look whole and are parts. Four steps: one rank's part of a gradient
overflows in the second, and the norm is clipped in the third. The reference is one process in fp64 that sees the
batches of all ranks. Writes one JSON file a rank.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import xamp

LR, MAX_NORM, STEPS, OVERFLOWS, CLIPS = 0.1, 0.05, 4, 1, 2
Result = dict[str, Any]


def make() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8), nn.LayerNorm(8), nn.Linear(8, 4))


def parallel(mesh: DeviceMesh) -> Any:
    return parallelize_module(make(), mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})


def batch(step: int, row: int) -> torch.Tensor:
    """Ranks of one row of the mesh share the work on a batch."""
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + row))


def part(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found.detach()


def whole(model: nn.Module) -> list[list[float]]:
    """The weights. After a forward DDP leaves DTensors that are no parameters in the places of those that were."""
    modules = [module for module in model.modules() if isinstance(module, (nn.Linear, nn.LayerNorm))]
    found: list[Any] = [getattr(module, name) for module in modules for name in ("weight", "bias")]
    return [(t.full_tensor() if hasattr(t, "full_tensor") else t).detach().flatten().tolist() for t in found]


def by_hand(mesh: DeviceMesh, skips: bool) -> Result:
    model, norm = make().double(), 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in [step for step in range(STEPS) if not (skips and step == OVERFLOWS)]:
        optimizer.zero_grad()
        rows = [model(batch(step, row).double()).square().mean() for row in range(mesh["data"].size())]
        torch.stack(rows).mean().backward()
        if step == CLIPS:
            norm = float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
        optimizer.step()
    return {"weights": whole(model), "norm": norm}


def spoil(optimizer: Any) -> None:
    """Put an inf into this rank's part of a divided gradient, which no other rank of its row has."""
    part(optimizer.param_groups[0]["params"][0].grad).flatten()[0] = float("inf")


def trained(net: Any, optimizer: Any, mesh: DeviceMesh, skips: bool) -> Result:
    outcomes, scales, norm = [], [], 0.0
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = net(batch(step, mesh["data"].get_local_rank())).float().square().mean()
        with xamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
            if skips and step == OVERFLOWS and dist.get_rank() == 1:
                spoil(optimizer)
        if step == CLIPS:
            norm = float(xamp.clip_grad_norm_(optimizer, MAX_NORM))
        optimizer.step()
        outcomes.append(xamp.session(optimizer).last_step.name)  # type: ignore[union-attr]
        scales.append(xamp.loss_scale(optimizer))
    return {"outcomes": outcomes, "scales": scales, "norm": norm}


def wrapped(mesh: DeviceMesh) -> tuple[Any, Any]:
    net = DistributedDataParallel(parallel(mesh), device_mesh=mesh["data"])
    return net, torch.optim.SGD(net.parameters(), lr=LR)


def wrapped_first(mesh: DeviceMesh, level: str, skips: bool) -> Result:
    net, optimizer = wrapped(mesh)
    xamp.initialize(net, optimizer, level, init_scale=1024.0, verbosity=0)
    found = trained(net, optimizer, mesh, skips)
    return {**found, "weights": whole(net)}


def by_scaler(mesh: DeviceMesh) -> Result:
    net, optimizer = wrapped(mesh)
    scaler: Any = xamp.GradScaler(init_scale=1024.0)
    scales, norm = [], 0.0
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(net(batch(step, mesh["data"].get_local_rank())).square().mean()).backward()
        if step == OVERFLOWS and dist.get_rank() == 1:
            spoil(optimizer)
        if step == CLIPS:
            scaler.unscale_(optimizer)
            norm = float(xamp.clip_grad_norm_(optimizer, MAX_NORM))
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return {"scales": scales, "norm": norm, "weights": whole(net)}


def wrapped_afterwards(mesh: DeviceMesh, level: str) -> str:
    """What is said where DDP takes the parameters away that the optimizer steps."""
    model = parallel(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    xamp.initialize(model, optimizer, level, init_scale=1024.0, verbosity=0)
    net = DistributedDataParallel(model, device_mesh=mesh["data"])
    try:
        trained(net, optimizer, mesh, skips=False)
    except xamp.StateError as error:
        return str(error)
    return ""


def cast(mesh: DeviceMesh, level: str) -> Result:
    """What is said at a level that casts parameters; and what the remedy trains."""
    net, optimizer = wrapped(mesh)
    try:
        xamp.initialize(net, optimizer, level, verbosity=0)
        error = ""
    except xamp.StateError as refused:
        error = str(refused)
    sharded: Any = parallel(mesh)
    fully_shard(sharded, mesh=mesh["data"])
    optimizer = torch.optim.SGD(sharded.parameters(), lr=LR)
    xamp.initialize(sharded, optimizer, level, init_scale=1024.0, verbosity=0)
    found = trained(sharded, optimizer, mesh, skips=level == "O2")
    masters: list[Any] = list(xamp.master_params(optimizer))
    return {**found, "error": error, "weights": [p.full_tensor().detach().flatten().tolist() for p in masters]}


def main(folder: Path) -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=600))
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
    found: Result = {"by hand": by_hand(mesh, skips=False), "by hand, skipped": by_hand(mesh, skips=True)}
    for level in ("O0", "O1", "O4"):
        found[level] = wrapped_first(mesh, level, skips=level == "O1")
    found["scaler"] = by_scaler(mesh)
    for level in ("O2", "O5"):
        found[level] = cast(mesh, level)
    found["afterwards"] = {level: wrapped_afterwards(mesh, level) for level in ("O0", "O1", "O2", "O4", "O5")}
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # see ddp_worker.py


if __name__ == "__main__":
    main(Path(sys.argv[1]))
