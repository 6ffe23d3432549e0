"""Parameters that a script puts into ``param_groups`` by hand, as densification does, against plain fp32.

Covers: xamp.scaling.parameters, xamp.scaling.parts.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lanes import Lane
from stepping import OPTIMIZERS
from torch import nn
from torch.optim import Optimizer

import xamp
from xamp.errors import StateError

LEVELS = ("O0", "O1", "O2", "O4", "O5")


class Points(nn.Module):
    """Points that a script adds to and removes while it trains; the gradient of each is one."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
        self.more: nn.Parameter | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [self.near, self.far, *([] if self.more is None else [self.more])]
        return torch.stack([part.float().sum() for part in parts]).sum() + 0 * x.sum()


def points(lane: Lane, level: str | None, name: str, **options: Any) -> tuple[Any, Any]:
    model = Points().to(lane.device)
    optimizer = OPTIMIZERS[name](model.parameters())
    if level is not None:
        xamp.initialize(model, optimizer, level, verbosity=0, **{"init_scale": 64.0, **options})
    return model, optimizer


def backward(model: Any, optimizer: Optimizer, lane: Lane, scaled: bool) -> None:
    loss = model(torch.zeros(1, device=lane.device))
    if not scaled:
        loss.backward()
        return
    with xamp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()


def replace(model: Any, optimizer: Optimizer) -> None:
    """As densification does: two rows more, with their state."""
    before: Any = optimizer.param_groups[0]["params"][0]
    grown = nn.Parameter(torch.cat([model.near.detach(), torch.ones_like(model.near[:2])]))
    state = optimizer.state.pop(before, {})
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.shape == before.shape:
            state[key] = torch.cat([value, torch.zeros_like(value[:2])])
    if state:
        optimizer.state[grown] = state
    optimizer.param_groups[0]["params"][0] = model.near = grown


def exchange(model: Any, optimizer: Optimizer) -> None:
    """A new parameter, without state, beside one that has some."""
    optimizer.state.pop(optimizer.param_groups[0]["params"][0], None)
    optimizer.param_groups[0]["params"][0] = model.near = nn.Parameter(torch.ones_like(model.near))


def append(model: Any, optimizer: Optimizer) -> None:
    model.more = nn.Parameter(torch.ones_like(model.near))
    optimizer.param_groups[0]["params"].append(model.more)


def remove(model: Any, optimizer: Optimizer) -> None:
    optimizer.state.pop(optimizer.param_groups[0]["params"].pop(0), None)
    model.near = nn.Parameter(model.near.detach(), requires_grad=False)


def trained(lane: Lane, level: str | None, name: str, change: Any, **options: Any) -> list[torch.Tensor]:
    model, optimizer = points(lane, level, name, **options)
    for step in range(5):
        optimizer.zero_grad()
        backward(model, optimizer, lane, level is not None)
        optimizer.step()
        if step == 1:
            change(model, optimizer)
    return [p.detach().float() for p in model.parameters()]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("change", [replace, exchange, append, remove])
def test_what_is_put_in_by_hand_trains(lane: Lane, level: str, name: str, change: Any) -> None:
    found, wanted = trained(lane, level, name, change), trained(lane, None, name, change)
    rough = {"O2": 2e-3, "O5": 2e-2}.get(level, 1e-5)
    torch.testing.assert_close(found, wanted, rtol=rough, atol=rough)


@pytest.mark.parametrize("change", [replace, append])
def test_it_trains_at_a_static_scale(lane: Lane, change: Any) -> None:
    found = trained(lane, "O1", "SGD", change, loss_scale=1000.0)
    torch.testing.assert_close(found, trained(lane, None, "SGD", change), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_clipping_and_the_decision_see_it(lane: Lane, level: str) -> None:
    model, optimizer = points(lane, level, "SGD")
    backward(model, optimizer, lane, True)
    optimizer.step()
    append(model, optimizer)
    optimizer.zero_grad()
    backward(model, optimizer, lane, True)
    assert float(xamp.clip_grad_norm_(optimizer, 1e9)) == pytest.approx(12**0.5, rel=1e-3)
    optimizer.step()
    before = model.more.detach().clone()
    optimizer.zero_grad()
    with xamp.scale_loss(model(torch.zeros(1, device=lane.device)), optimizer) as scaled:
        scaled.backward()
        lane.overflow_(model.more.grad)
    optimizer.step()
    assert torch.equal(model.more, before)
    assert xamp.session(optimizer).stats.skipped == 1


@pytest.mark.parametrize("call", ["optimizer.step()", "master_params(optimizer)"])
def test_after_the_backward_it_is_too_late(lane: Lane, call: str) -> None:
    """Its gradient has the scale, and nobody would take that away. Torch's GradScaler does, for it unscales in step."""
    model, optimizer = points(lane, "O1", "SGD")
    model.more = nn.Parameter(torch.ones_like(model.near))
    backward(model, optimizer, lane, True)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.param_groups[0]["params"].append(model.more)
    for _ in range(2):
        with pytest.raises(StateError, match=r"more was put into param_groups after the scale_loss"):
            optimizer.step() if call == "optimizer.step()" else list(xamp.master_params(optimizer))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    model.more.grad = None
    optimizer.step()
    assert torch.equal(model.more, before[2])
    assert not torch.equal(model.near, before[0])


def test_it_may_not_be_in_two_optimizers(lane: Lane) -> None:
    model = Points().to(lane.device)
    optimizers = [torch.optim.SGD([model.near], lr=0.1), torch.optim.SGD([model.far], lr=0.1)]
    xamp.initialize(model, optimizers, "O1", verbosity=0)
    optimizers[0].param_groups[0]["params"].append(model.far)
    with (
        pytest.raises(StateError, match=r"param_groups: far is in another optimizer of this session"),
        xamp.scale_loss(model(torch.zeros(1, device=lane.device)), optimizers),
    ):
        pass
