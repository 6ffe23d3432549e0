"""Masters that something other than ``step`` changes, parameters that change their size, modules that come later.

Covers: xamp.scaling.weights, xamp.scaling.masters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.optim import SGD, AdamW, Optimizer

import xamp

X = torch.linspace(-1.0, 1.0, 32).reshape(8, 4)


class SAM(Optimizer):
    """Sharpness-aware minimization as it is commonly written: the groups are the base optimizer's."""

    def __init__(self, params: Any, base: type[Optimizer], rho: float, **kwargs: Any) -> None:
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = base(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            self.state[p]["old"] = p.data.clone()
            p.add_(p.grad * (self.param_groups[0]["rho"] / norm))

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old"] if p.grad is not None else p.data
        self.base_optimizer.step()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise NotImplementedError


def net() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def sam_steps(
    model: nn.Module, optimizer: Any, backward: Callable[[torch.Tensor], None], steps: int = 6
) -> list[float]:
    losses = []
    for _ in range(steps):
        for move in (optimizer.first_step, optimizer.second_step):
            optimizer.zero_grad()
            loss = model(X).square().mean()
            backward(loss)
            move()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("level", "near"), [("O2", 1e-3), ("O5", 8e-3)])
def test_sam_trains_as_in_fp32(level: str, near: float) -> None:
    plain, model = net(), net()
    expected = sam_steps(plain, SAM(plain.parameters(), SGD, 0.05, lr=0.5), lambda loss: loss.backward())
    optimizer = SAM(model.parameters(), SGD, 0.05, lr=0.5)
    xamp.initialize(model, optimizer, level, verbosity=0, loss_scale=128.0)

    def backward(loss: torch.Tensor) -> None:
        with xamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()

    found = sam_steps(model, optimizer, backward)
    assert expected[-1] < 0.7 * expected[0]
    assert found == pytest.approx(expected, rel=0.0, abs=near * expected[0])


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_what_is_written_into_masters_is_there_in_the_next_forward(level: str) -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    xamp.initialize(model, optimizer, level, verbosity=0, loss_scale=128.0)
    for moves in (False, True):  # before the first use of the masters, and after it
        with torch.no_grad():
            for master in xamp.master_params(optimizer):
                master.fill_(0.5)
        expected = net()
        with torch.no_grad():
            for param in expected.parameters():
                param.fill_(0.5)
        assert torch.allclose(model(X), expected(X), rtol=2e-2)
        if not moves:
            with xamp.scale_loss(model(X).sum(), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()


def test_a_forward_between_leaves_earlier_graphs_whole() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    xamp.initialize(model, optimizer, "O2", verbosity=0, loss_scale=128.0)
    first, second = model(X).sum(), model(X).sum()
    with xamp.scale_loss(first, optimizer) as scaled:
        scaled.backward()
    model(X)
    with xamp.scale_loss(second, optimizer) as scaled:
        scaled.backward()
    optimizer.step()


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("rows", [4096, 2])
def test_a_parameter_of_another_size_is_stepped_as_the_user_left_it(level: str, rows: int) -> None:
    model = nn.Embedding(16, 8)
    optimizer = AdamW(model.parameters(), lr=0.1)
    xamp.initialize(model, optimizer, level, verbosity=0, loss_scale=128.0)

    def step() -> None:
        optimizer.zero_grad()
        with xamp.scale_loss(model(torch.tensor([0, 1])).sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()

    step()
    step()
    model.weight.data = torch.zeros(rows, 8, dtype=model.weight.dtype)
    for master in xamp.master_params(optimizer):
        master.data = torch.zeros(rows, 8)
    with pytest.raises(RuntimeError, match="size"):
        step()


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_states_hold_the_masters_of_modules_that_came_later(level: str) -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.125)
    xamp.initialize(model, optimizer, level, verbosity=0, loss_scale=128.0)
    lower = xamp.session(model).policy.dtype
    head = nn.Sequential(nn.Linear(8, 2).to(lower))
    model[2] = head
    parametrize.register_parametrization(model[0], "weight", nn.Identity())
    optimizer.add_param_group({"params": list(head.parameters())})

    def step() -> None:
        optimizer.zero_grad()
        with xamp.scale_loss(model(X).square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()

    step()
    saved = copy.deepcopy(model.state_dict())
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    steps = {id(m) for m in xamp.master_params(optimizer)}
    assert len(steps) == len(list(model.parameters())) + 2  # the head that left is still stepped
    step()
    moved = model.state_dict()
    assert any(not torch.equal(moved[key], saved[key]) for key in saved)
    model.load_state_dict(saved)
    assert all(torch.equal(tensor, saved[key]) for key, tensor in model.state_dict().items())
    step()
    again = model.state_dict()
    assert all(torch.equal(again[key], moved[key]) for key in moved), "a step after a load starts from what was loaded"
