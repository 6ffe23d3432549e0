"""Models that come in half precision, objects that other libraries wrap, optimizers of other parameters.

Covers: xamp.sessions.foreign, xamp.sessions.session, xamp.sessions.lowering.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from snapshot import Snapshot
from torch import nn
from torch.nn.parallel import DataParallel
from torch.optim import SGD, Optimizer

import xamp

X = torch.linspace(-1.0, 1.0, 32).reshape(8, 4)
HALF = [("O2", torch.float16), ("O5", torch.bfloat16)]


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def train(model: nn.Module, level: str, steps: int = 4) -> dict[str, torch.Tensor]:
    optimizer = SGD(model.parameters(), lr=0.25, momentum=0.5)
    xamp.initialize(model, optimizer, level, verbosity=0, loss_scale=64.0)
    for _ in range(steps):
        optimizer.zero_grad()
        with xamp.scale_loss(model(X).square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    return model.state_dict()


# ---------------------------------------------------------------- models in half precision


@pytest.mark.parametrize(("level", "dtype"), HALF)
def test_a_half_model_trains_as_its_fp32_twin(level: str, dtype: torch.dtype) -> None:
    model = net().to(dtype)
    twin = copy.deepcopy(model).float()
    found, expected = train(model, level), train(twin, level)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert {tensor.dtype for tensor in found.values()} == {torch.float32, torch.int64}
    xamp.session(model).close()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert torch.equal(model.state_dict()["1.running_mean"], expected["1.running_mean"])


@pytest.mark.parametrize(("level", "dtype"), HALF)
def test_a_refused_half_model_is_as_it_was(level: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = net().to(dtype)
    model(X.to(dtype)).sum().backward()
    optimizer = SGD(model.parameters(), lr=0.1)
    before = Snapshot(model, optimizer)

    def fail(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("xamp.sessions.set_up.manage", fail)
    with pytest.raises(MemoryError):
        xamp.initialize(model, optimizer, level, verbosity=0)
    before.assert_same()


# ---------------------------------------------------------------- wrappers


class Accelerated(Optimizer):
    """As accelerate's: an Optimizer around one, which hands on by name."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad()


class Lightning:
    """As Lightning's: no Optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_optimizer"], name)


class Fabric(nn.Module):
    """As Fabric's module: what is set on it is set on the module inside."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._forward_module = module

    def forward(self, x: torch.Tensor) -> Any:
        return self._forward_module(x)

    def __setattr__(self, name: str, value: Any) -> None:
        inner = self.__dict__.get("_modules", {}).get("_forward_module")
        setattr(inner, name, value) if inner is not None else super().__setattr__(name, value)


@pytest.mark.parametrize("wrap", [Accelerated, Lightning])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_what_wraps_an_optimizer_is_looked_into(wrap: Any, level: str) -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.25)
    xamp.initialize(model, optimizer, level, verbosity=0, loss_scale=64.0)
    wrapped = wrap(optimizer)
    for given in (wrapped, [wrapped]):
        wrapped.zero_grad()
        with xamp.scale_loss(model(X).square().mean(), given) as scaled:
            scaled.backward()
        norm = xamp.clip_grad_norm_(wrapped, 1e9)
        assert 0 < float(norm) < 64
        wrapped.step()
    assert xamp.session(wrapped).stats.applied == 2
    assert [p is q for p, q in zip(xamp.master_params(wrapped), xamp.master_params(optimizer), strict=True)] == [
        True
    ] * 6


@pytest.mark.parametrize("enabled", [False, True])
def test_a_wrapper_that_was_itself_given_is_the_optimizer(enabled: bool) -> None:
    model = net()

    class Lookahead(SGD):
        def __init__(self, optimizer: Optimizer) -> None:
            super().__init__([{"params": g["params"]} for g in optimizer.param_groups], lr=0.1)
            self.optimizer = optimizer

    optimizer = Lookahead(SGD(model.parameters(), lr=0.25))
    xamp.initialize(model, optimizer, "O1", verbosity=0, enabled=enabled)
    with xamp.scale_loss(model(X).sum(), optimizer) as scaled:
        scaled.backward()
    assert list(xamp.master_params(optimizer)) == list(model.parameters())
    optimizer.step()


def test_an_aux_optimizer_of_an_unmanaged_one_is_not_taken_for_it() -> None:
    model, aux = net(), net()
    optimizer: Any = SGD(model.parameters(), lr=0.1)
    optimizer.optimizer = SGD(aux.parameters(), lr=0.1)
    assert list(xamp.master_params(optimizer)) == list(model.parameters())


def test_half_buffers_are_fp32_after_the_session() -> None:
    model = net()
    model.register_buffer("projection", torch.ones(4))
    model.to(torch.bfloat16)
    xamp.initialize(model, SGD(model.parameters(), lr=0.1), "O5", verbosity=0)
    xamp.session(model).close()
    assert {b.dtype for b in model.buffers() if b.is_floating_point()} == {torch.float32}


@pytest.mark.parametrize("wrap", [DataParallel, lambda m: torch.compile(m, backend="eager"), Fabric])
def test_a_wrapper_made_afterwards_leads_to_the_session(wrap: Any) -> None:
    model = net()
    xamp.initialize(model, level="O4", verbosity=0)
    assert xamp.session(wrap(model)).engine is xamp.session(model).engine


def test_a_wrapper_that_hands_assignments_on_leaves_the_inner_class_to_itself() -> None:
    wrapper = Fabric(net())
    inner = wrapper._forward_module
    xamp.initialize(wrapper, level="O4", verbosity=0)
    assert isinstance(wrapper, Fabric)
    assert isinstance(inner, nn.Sequential)
    assert wrapper(X).dtype is torch.float32
    xamp.session(wrapper).close()
    assert (type(wrapper), type(inner)) == (Fabric, nn.Sequential)


# ---------------------------------------------------------------- steps without a gradient


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_a_step_without_any_gradient_warns_once(level: str, caplog: pytest.LogCaptureFixture) -> None:
    model, other = net(), net()
    optimizer = SGD([*model[0].parameters()], lr=0.1)
    xamp.initialize(model, optimizer, level, verbosity=0)
    with caplog.at_level(logging.WARNING, "xamp"):
        for _ in range(3):
            other(X).sum().backward()
            optimizer.step()
    (record,) = caplog.records
    assert record.getMessage().startswith("SGD.step() finds no gradient on anything that this optimizer holds")


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True to a scalar")  # torch 2.8, of its LBFGS
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4"])
def test_a_usual_step_does_not_warn(level: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "xamp"):
        train(net(), level)
        model = net()
        optimizer = torch.optim.LBFGS(model.parameters())
        if level in ("O0", "O4"):
            xamp.initialize(model, optimizer, level, verbosity=0)

            def closure() -> torch.Tensor:
                loss: torch.Tensor = model(X).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)
    assert [record.getMessage() for record in caplog.records if "no gradient" in record.getMessage()] == []
