"""Wrote the files beside it, each named after its schema and its level: to be run once after SCHEMA was raised.

It refuses to overwrite one. Files of older schemas stay: tests/unit/sessions/test_checkpoint_files.py
loads every one of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import SGD

import xamp
from xamp.sessions.formats import SCHEMA

HERE = Path(__file__).parent


def layers(*values: float) -> list[Any]:
    made = []
    for value in values:
        layer = nn.Linear(2, 1)
        nn.init.constant_(layer.weight, value)
        nn.init.constant_(layer.bias, value)
        made.append(layer)
    return made


def step(model: Any, optimizer: Any, *, overflow: bool = False, loss_id: int = 0) -> None:
    optimizer.zero_grad()
    loss = model(torch.ones(1, 2)).sum() * (float("inf") if overflow else 1.0)
    with xamp.scale_loss(loss, optimizer, loss_id) as scaled:
        scaled.backward()
    optimizer.step()


def o1() -> Any:
    """Five overflows at the floor, after three steps of which the second made the scale grow."""
    [model] = layers(0.5)
    optimizer = SGD(model.parameters(), lr=0.125)
    xamp.initialize(model, optimizer, "O1", init_scale=1.0, growth_interval=2, verbosity=0)
    for number in range(9):
        step(model, optimizer, overflow=number >= 3)
    return xamp.state_dict(optimizer)


def o2() -> Any:
    """Two models, two optimizers, two losses; masters that fp16 cannot hold, one of them of no model."""
    models = layers(0.5, 0.25)
    optimizers = [SGD(model.parameters(), lr=2.0**-15) for model in models]
    xamp.initialize(models, optimizers, "O2", num_losses=2, init_scale=64.0, growth_interval=3, verbosity=0)
    for number in range(4):
        step(models[0], optimizers[0])
        step(models[1], optimizers[1], overflow=number == 2, loss_id=1)
    optimizers[1].add_param_group({"params": [torch.full((2,), 3.0, dtype=torch.float16, requires_grad=True)]})
    with torch.no_grad():
        list(xamp.master_params(optimizers[1]))[-1].add_(2.0**-12)
    return xamp.state_dict(models[0])


if __name__ == "__main__":
    for level, make in (("O1", o1), ("O2", o2)):
        with (HERE / f"schema{SCHEMA}-{level}.pt").open("xb") as file:
            torch.save(make(), file)
