"""The training run that tests/faults/test_kill.py kills: it resumes where its checkpoint says, and writes how it ended.

The files are written and read by the recipe of docs/checkpoints.md, as it stands there.
"""

from __future__ import annotations

import builtins
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import docs_blocks
import faults
import torch
from lanes import Lane
from torch import nn

import xamp
from xamp.testing.lane import open_lane

Run = tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]


def build(spec: faults.Spec, lane: Lane) -> Run:
    model: Any = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16, bias=False), nn.ReLU(), nn.Linear(16, 4)
    ).to(lane.device)
    model[0].bias.requires_grad_(False)
    optimizer: torch.optim.Optimizer
    if spec["optimizer"] == "adam":
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scale = {"init_scale": 2.0**12, "growth_interval": spec["growth_interval"]}
    xamp.initialize(model, optimizer, spec["level"], fused=spec["fused"], verbosity=0, **scale)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)


def one_step(run: Run, step: int, spec: faults.Spec, lane: Lane) -> None:
    model, optimizer, scheduler = run
    optimizer.zero_grad()
    for micro in range(spec["accumulate"]):
        generator = torch.Generator().manual_seed(100 * step + micro)
        x, y = torch.randn(16, 8, generator=generator), torch.randint(0, 4, (16,), generator=generator)
        loss = nn.functional.cross_entropy(model(x.to(lane.device)), y.to(lane.device))
        with xamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            if step in spec["overflows"] and micro == 0:
                lane.overflow_(grads[-1])
    optimizer.step()
    scheduler.step()


def state_of(run: Run, step: int) -> dict[str, Any]:
    model, optimizer, scheduler = run
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "xamp": xamp.state_dict(optimizer),
        "scheduler": scheduler.state_dict(),
        "step": step,
    }


def resume(run: Run, state: dict[str, Any], order: Sequence[str]) -> int:
    """Load a checkpoint, its parts in ``order``; gives the step at which it was written."""
    model, optimizer, scheduler = run
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "xamp": xamp.session(optimizer)}
    for part in order:
        parts[part].load_state_dict(state[part])
    scheduler.load_state_dict(state["scheduler"])
    return int(state["step"])


def final(run: Run, step: int) -> dict[str, Any]:
    """Everything that two runs must have alike at their ends."""
    model, optimizer, _ = run
    stats = xamp.session(optimizer).stats
    return {
        **state_of(run, step),
        "parameters": [p.detach() for p in model.parameters()],
        "buffers": list(model.buffers()),
        "masters": [p.detach() for p in xamp.master_params(optimizer)],
        "scale": xamp.loss_scale(optimizer),
        "stats": [stats.applied, stats.skipped],
    }


def work(spec: faults.Spec) -> None:
    """Train from the checkpoint in the folder to the end, with a checkpoint every few steps."""
    torch.set_num_threads(1)
    lane = open_lane(spec["device"])
    folder = Path(spec["folder"])
    path = folder / faults.CHECKPOINT
    files = docs_blocks.recipe()
    saved = files["load_checkpoint"](path) if path.exists() else None
    torch.manual_seed(spec["seed"] if saved else 0)  # a life that resumes starts with other weights: none may be left
    run = build(spec, lane)
    start = resume(run, saved, spec["order"]) if saved else 0
    if spec.get("die"):
        files = dying(files, **spec["die"])
    for step in range(start, spec["steps"]):
        one_step(run, step, spec, lane)
        if (step + 1) % spec["every"] == 0:
            files["save_checkpoint"](path, state_of(run, step + 1))
    files["save_checkpoint"](folder / "final.pt", final(run, spec["steps"]))


def dying(files: dict[str, Any], at: str, nth: int, size: int = 0) -> dict[str, Any]:
    """The recipe, but that the ``nth`` checkpoint kills the process: ``at`` a number of bytes, or a call of ``os``."""
    if at == "bytes":
        counter = itertools.count(1)

        def opened(name: str, mode: str) -> Any:
            file = builtins.open(name, mode)  # noqa: SIM115
            return faults.DyingFile(file, size) if next(counter) == nth else file

        files["open"] = opened
    else:
        when, name = at.split()
        calls = 2 if name == "fsync" else 1  # of one checkpoint: the file's, and the folder's
        files["os"] = faults.DyingOs(name, calls * nth - (calls - 1), after=when == "after")
    return files


def warm() -> None:
    torch.set_num_threads(1)
    lane = open_lane("cpu")  # no other device may start before the fork
    spec = {"level": "O2", "optimizer": "adam", "fused": "auto", "accumulate": 1, "growth_interval": 4, "overflows": []}
    model, optimizer, _ = build(spec, lane)
    model(torch.ones(16, 8))  # no backward, which starts a thread for each device there is
    optimizer.zero_grad()


if __name__ == "__main__":
    faults.serve(sys.argv[1:], work, warm)
