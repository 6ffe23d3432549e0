"""Writes what the release of torch that runs leaves behind, beside this file: ``python make.py``, once on each release.

Each file, such as ``2.8.0.pt``, has a row for each level and optimizer of :data:`ROWS`: a checkpoint in the middle of
training, with an overflow before it and one after it; and the weights at the end.
tests/unit/sessions/test_releases.py reads every file on the release that runs there. The policy files, such as
``2.8.0-cpu.json``, are what ``xamp policy show cpu --json`` prints; tests/unit/cli/test_policy_releases.py reads them.
"""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam

import xamp
from xamp.cli import policy

HERE = Path(__file__).parent
ROWS = [(level, optimizer) for level in ("O1", "O2", "O5") for optimizer in ("fused Adam", "SGD")]
MIDDLE, END = 5, 10
OVERFLOWS = (2, 7)
DEVICES = ("cpu", "cuda")


def started(level: str, optimizer: str) -> tuple[Any, Any]:
    """A model of two layers and its optimizer, managed; the weights are sixteenths, which every release makes alike."""
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((torch.arange(parameter.numel()) * 7 % 16 - 8).reshape(parameter.shape) / 16)
    fused = optimizer == "fused Adam"
    made = Adam(model.parameters(), lr=2.0**-7, fused=True) if fused else SGD(model.parameters(), 2.0**-4, 0.5)
    xamp.initialize(model, made, level, loss_scale="dynamic", init_scale=256.0, growth_interval=3, verbosity=0)
    return model, made


def train(model: Any, optimizer: Any, first: int, last: int) -> dict[str, Any]:
    """Take the steps from ``first`` up to ``last``; return weights and scale after them."""
    for number in range(first, last):
        x = (torch.arange(24) * (number + 3) % 17 - 8).reshape(4, 6) / 8
        loss = model(x).float().square().mean() * (float("inf") if number in OVERFLOWS else 1.0)
        optimizer.zero_grad()
        with xamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    return {"weights": copy.deepcopy(model.state_dict()), "scale": xamp.loss_scale(model)}


def row(level: str, optimizer: str) -> dict[str, Any]:
    """All of one row; see the module."""
    model, made = started(level, optimizer)
    train(model, made, 0, MIDDLE)
    state = {"model": model.state_dict(), "optimizer": made.state_dict(), "xamp": xamp.state_dict(made)}
    state = copy.deepcopy(state)  # its tensors are those that the next steps change
    return {"state": state, "end": train(model, made, MIDDLE, END)}


def release() -> str:
    """The release that runs, such as ``"2.8.0"``."""
    return re.split(r"[^\d.]", torch.__version__)[0]


def main() -> None:
    """Writes the files of this release."""
    torch.save({f"{level} {optimizer}": row(level, optimizer) for level, optimizer in ROWS}, HERE / f"{release()}.pt")
    for device in DEVICES:
        text = json.dumps(policy.show(device), separators=(",", ":"))
        (HERE / f"{release()}-{device}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
