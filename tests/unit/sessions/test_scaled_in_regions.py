"""A loss that needs no scale, and a GradScaler's step, in an autocast region of the code around them.

Covers: xamp.sessions.scale_loss, xamp.sessions.grad_scaler.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from noting import noted_in_backward
from torch import nn

import xamp


def first_of(x: torch.Tensor, weight: torch.Tensor) -> float:
    return (x @ weight)[0, 0].item()


@pytest.mark.parametrize("level", ["O0", "O3", "O4"])
@pytest.mark.parametrize("enabled", [True, False])
def test_a_loss_without_a_scale(level: str, enabled: bool) -> None:
    """A session that is disabled leaves everything to the script."""
    net: Any = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    xamp.initialize(net, optimizer, level=level, enabled=enabled, verbosity=0)
    noted, seen = noted_in_backward(lambda: torch.is_autocast_enabled("cpu"))
    x, weight = torch.ones(2, 2), nn.Parameter(torch.ones(2, 2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = noted(net(x)).sum()
        before = first_of(x, weight)
        with torch.no_grad():
            weight.mul_(2)
        with xamp.scale_loss(loss, optimizer) as scaled:
            assert scaled is loss
            scaled.backward()
        assert torch.is_autocast_enabled("cpu")
        assert first_of(x, weight) == before * (2 if enabled else 1)
    assert seen == [not enabled]


@pytest.mark.parametrize("enabled", [True, False])
def test_a_scaler_casts_anew_after_its_step(enabled: bool) -> None:
    weight, seen = nn.Parameter(torch.ones(2, 2)), []
    optimizer, scaler = torch.optim.SGD([weight], lr=0.25), xamp.GradScaler(init_scale=4.0, enabled=enabled)
    with xamp.autocast():
        for _ in range(2):
            out = torch.ones(2, 2) @ weight
            seen.append(out[0, 0].item())
            scaler.scale(out.sum().float()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert seen == [2.0, 1.0]
