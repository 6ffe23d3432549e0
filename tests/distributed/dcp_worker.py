"""What the processes of test_dcp.py run: DDP training that saves by torch.distributed.checkpoint, and goes on.

``save`` writes a checkpoint after four steps, ``load`` starts from it; both then take four more. How each stood there
and at its end goes into one JSON file a rank. What is saved and loaded, and how, is on the page docs/checkpoints.md.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import docs_blocks
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import xamp

STEPS, OVERFLOW_AT = 4, (2, 5)


def train(ddp: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        loss = (ddp(x) - 1.0).square().mean()
        with xamp.scale_loss(loss * float("inf") if step in OVERFLOW_AT else loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()


def digest(tensors: list[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(t.detach().float().numpy().tobytes() for t in tensors)).hexdigest()


def standing(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    stats = xamp.session(optimizer).stats
    return {
        "weights": digest(list(model.parameters())),
        "masters": digest(list(xamp.master_params(optimizer))),
        "moments": digest([s[key] for s in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq", "step")]),
        "scalers": xamp.state_dict(optimizer)["scalers"],
        "stats": [stats.applied, stats.skipped],
    }


def main(mode: str, level: str, folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank if mode == "save" else 10 + rank)
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.GroupNorm(2, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-4)
    xamp.initialize(model, optimizer, level, init_scale=1024.0, growth_interval=2, verbosity=0)
    names = {"model": model, "optimizer": optimizer, "folder": str(folder / "checkpoint"), "torch": torch, "xamp": xamp}
    docs_blocks.run("checkpoints.md", names, "class Whole")
    if mode == "load":
        docs_blocks.run("checkpoints.md", names, "dcp.load(parts")
    ddp = DistributedDataParallel(model)
    if mode == "save":
        train(ddp, optimizer, range(STEPS))
        docs_blocks.run("checkpoints.md", names, "dcp.save")
    found = {"there": standing(model, optimizer)}
    train(ddp, optimizer, range(STEPS, 2 * STEPS))
    found["end"] = standing(model, optimizer)
    (folder / f"{mode}{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # see ddp_worker.py


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
