"""What each process of test_join.py runs: torch's Join, under which rank 1 has one batch more, and overflows in it."""

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
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import xamp

CASES: dict[str, dict[str, Any]] = {
    "O1": {"level": "O1", "init_scale": 1024.0},
    "O2": {"level": "O2", "init_scale": 1024.0},
    "O5": {"level": "O5"},
    "O1 static": {"level": "O1", "loss_scale": 1024.0},
    "O0": {"level": "O0"},
    "O4": {"level": "O4"},
    "O1 static, ZeRO": {"level": "O1", "loss_scale": 1024.0},
    "O4, ZeRO": {"level": "O4"},
}


def train(name: str) -> dict[str, Any]:
    rank = dist.get_rank()
    where = dist.new_group(list(range(dist.get_world_size())), timeout=datetime.timedelta(seconds=240))
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    zero, params = name.endswith("ZeRO"), model.parameters()
    shared: dict[str, Any] = {"lr": 0.1, "process_group": where}
    made: Any = ZeroRedundancyOptimizer(params, torch.optim.SGD, **shared) if zero else torch.optim.SGD(params, lr=0.1)
    optimizer: torch.optim.Optimizer = made
    xamp.initialize(model, optimizer, verbosity=0, **CASES[name])
    ddp = DistributedDataParallel(model, process_group=where)
    before = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
    outcomes: list[str] = []
    error = ""
    try:
        with Join([ddp, made] if zero else [ddp]):
            for step in range(2 + rank):
                optimizer.zero_grad()
                loss = ddp(torch.full((4, 6), step + rank + 1.0)).square().mean()
                spoilt = step == 2 and name == "O1 static"
                with xamp.scale_loss(loss * float("inf") if spoilt else loss, optimizer) as scaled:
                    scaled.backward()
                optimizer.step()
                outcomes.append(xamp.session(optimizer).last_step.name)  # type: ignore[union-attr]
    except xamp.StateError as caught:
        error = str(caught)
    params = optimizer.param_groups[0]["params"]
    return {
        "error": error,
        "outcomes": outcomes,
        "scale": xamp.loss_scale(optimizer),
        "moved": any(not torch.equal(a, b) for a, b in zip(before, params, strict=True)),
        "weights": [p.detach().flatten().tolist() for p in params],
    }


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=600))
    found = {}
    for case in CASES:
        found[case] = train(case)
        dist.barrier()
    (Path(sys.argv[1]) / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # see ddp_worker.py
