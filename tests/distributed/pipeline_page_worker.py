"""What each process of test_pipeline_page.py runs: the block on pipelines of docs/guides/distributed.md."""

from __future__ import annotations

import datetime
import json
import os
import sys
from pathlib import Path
from typing import Any

import docs_blocks
import torch
import torch.distributed as dist
from torch import nn

import xamp

STEPS, SPOILT = 4, 2


def net() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(6, 8), nn.Sequential(nn.Tanh(), nn.Linear(8, 3))]


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = [
        (0.3 * torch.randn(4, 6, generator=generator), 0.3 * torch.randn(4, 3, generator=generator))
        for _ in range(STEPS)
    ]
    made[SPOILT][1].fill_(float("inf"))  # which the last stage alone sees
    return made


def reference() -> list[nn.Module]:
    """One process in fp64, which leaves the spoilt batch out."""
    parts = [part.double() for part in net()]
    model = nn.Sequential(*parts)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches()[:SPOILT] + batches()[SPOILT + 1 :]:
        optimizer.zero_grad()
        losses = [
            nn.functional.mse_loss(model(a), b) for a, b in zip(x.double().chunk(2), y.double().chunk(2), strict=True)
        ]
        torch.stack(losses).mean().backward()
        optimizer.step()
    return parts


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=600))
    rank = dist.get_rank()
    part = net()[rank]
    names: dict[str, Any] = {
        "xamp": xamp,
        "torch": torch,
        "part": part,
        "rank": rank,
        "world_size": dist.get_world_size(),
        "device": torch.device("cpu"),
        "criterion": nn.functional.mse_loss,
        "loader": batches(),
        "optimizer": torch.optim.SGD(part.parameters(), lr=0.1),
    }
    docs_blocks.run("guides/distributed.md", names, "PipelineStage")
    stats = xamp.session(names["optimizer"]).stats
    wanted = reference()[rank].state_dict()
    start = net()[rank].state_dict()
    off = max(float((value - wanted[name]).abs().max()) for name, value in part.state_dict().items())
    moved = max(float((value - wanted[name]).abs().max()) for name, value in start.items())
    found = {"applied": stats.applied, "skipped": stats.skipped, "scale": xamp.loss_scale(part), "off": off / moved}
    (Path(sys.argv[1]) / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # see ddp_worker.py
