"""What each rank of test_one_pass_ranks.py runs: two models under DDP, of which one steps in one pass.

Two steps have two micro-batches, of which the first is reduced in one of them only. In one step rank 1 alone overflows.
Three are clipped.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import interpreting
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import xamp

STEPS, OVERFLOW, CLIPPED = 9, 3, (4, 6, 7)
MICROS, REDUCED_TWICE = {2: 2, 6: 2}, 6

MAKE: dict[str, Any] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, eps=1e-4),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
}


def run(fused: str, level: str, form: str, view: bool, rank: int) -> dict[str, Any]:
    """Train, and tell what each step did and what the weights are."""
    torch.manual_seed(rank)  # ranks start apart: DDP shares rank 0's weights
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3))
    optimizer = MAKE[form](model.parameters())
    options: Any = {"init_scale": 2.0**10, "growth_interval": 3, "loss_scale": "dynamic", "keep_fp32": [nn.LayerNorm]}
    xamp.initialize(model, optimizer, level, fused=fused, verbosity=0, **options)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=view)
    told: dict[str, list[Any]] = {"outcomes": [], "scales": [], "held": [], "norms": []}
    for number in range(STEPS):
        optimizer.zero_grad()
        micros = MICROS.get(number, 1)
        for micro in range(micros):
            draw = torch.Generator().manual_seed(100 * number + 10 * micro + rank)
            x, y = torch.randn(8, 6, generator=draw), torch.randn(8, 3, generator=draw)
            with contextlib.nullcontext() if micro == micros - 1 or number == REDUCED_TWICE else ddp.no_sync():
                loss = nn.functional.mse_loss(ddp(x), y) / micros
                loss = loss * float("inf") if number == OVERFLOW and rank == 1 else loss
                with xamp.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
        state: Any = optimizer._xamp.state
        told["held"].append(state.gradients.held is not None)
        if number in CLIPPED:
            told["norms"].append(float(xamp.clip_grad_norm_(optimizer, 0.1)))
        optimizer.step()
        told["outcomes"].append(xamp.session(optimizer).last_step.name)  # type: ignore[union-attr]
        told["scales"].append(xamp.loss_scale(optimizer))
    told["masters"] = [p.detach().tolist() for p in xamp.master_params(optimizer)]
    told["weights"] = [p.detach().float().tolist() for p in model.parameters()]
    stats = xamp.session(optimizer).stats
    return {**told, "counts": [stats.applied, stats.skipped]}


def main(level: str, form: str, view: bool, folder: Path) -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    interpreting.install()
    importlib.import_module("xamp.onepass.kernels")  # before anything else imports Triton
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found = {fused: run(fused, level, form, view, rank) for fused in ("one-pass", "auto")}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # as in ddp_worker.py


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3] == "view", Path(sys.argv[4]))
