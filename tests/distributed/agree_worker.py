"""What each process of test_ddp.py runs where nobody makes the gradients of the ranks equal.

Rank 1 alone overflows at the second step; every rank must skip it and back off. Under FSDP2 a first micro-batch is run
without reduction, so that the check has to wait for the second.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import xamp


def main(wrapper: str, level: str, folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    if wrapper == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = xamp.initialize(model, optimizer, level=level, init_scale=1024.0, verbosity=0)
    outcomes, scales = [], []
    for step in range(3):
        optimizer.zero_grad()
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        if wrapper == "fsdp2":
            model.set_requires_gradient_sync(False)
            with xamp.scale_loss(model(x).square().mean(), optimizer) as scaled:
                scaled.backward()
            model.set_requires_gradient_sync(True)
        loss = model(x).square().mean()
        with xamp.scale_loss(loss * float("inf") if step == 1 and rank == 1 else loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        outcomes.append(xamp.session(optimizer).last_step.name)  # type: ignore[union-attr]
        scales.append(xamp.loss_scale(optimizer))
    finite = all(bool(p.detach().isfinite().all()) for p in local(model))
    (folder / f"{rank}.json").write_text(
        json.dumps({"rank": rank, "outcomes": outcomes, "scales": scales, "finite": finite})
    )
    dist.barrier()
    os._exit(0)  # see ddp_worker.py


def local(model: nn.Module) -> list[torch.Tensor]:
    """This rank's part of the parameters."""
    return [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
