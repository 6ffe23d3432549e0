"""The fused implementation is tried on enough elements, and with momentum: the half SGD of torch 2.13 on a CPU errs.

Covers: xamp.scaling.fused, xamp.registry.fused_classes.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from lanes import Lane
from torch import nn
from torch.optim import SGD

import xamp
from xamp.errors import UnsupportedPolicy
from xamp.registry import fused_classes


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_half_parameters_without_masters_step_as_without_the_fused_form(lane: Lane, level: str) -> None:
    if level not in lane.can.levels:
        pytest.skip(f"{lane} cannot run {level}")
    results = []
    for form in ("auto", False):
        torch.manual_seed(0)
        model: Any = nn.Linear(8, 8).to(lane.device)
        optimizer = SGD(model.parameters(), lr=0.125, momentum=0.9)
        told: dict[str, Any] = {"master_weights": False, "loss_scale": "dynamic", "init_scale": 64.0}
        xamp.initialize(model, optimizer, level, fused=form, verbosity=0, **told)
        for step in range(4):
            optimizer.zero_grad()
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).to(lane.device)
            with xamp.scale_loss(model(x).square().mean(), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
        results.append([p.detach().float() for p in model.parameters()])
    torch.testing.assert_close(results[0], results[1], rtol=0.05, atol=0.02)


def sum_of(model: nn.Module) -> torch.Tensor:
    return torch.stack([p.float().sum() for p in model.parameters()]).sum()


@pytest.mark.parametrize(("level", "dtype"), [("O5", torch.bfloat16), ("O2", torch.float16)])
def test_required_fused_form_is_tried_in_the_dtype_that_is_stepped(level: str, dtype: torch.dtype) -> None:
    """torch's fused SGD is wrong in half on a CPU; the masters of a half model are fp32, for which it is right."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4).to(dtype)
    plain = nn.Linear(4, 4)
    plain.load_state_dict(model.state_dict())
    optimizer = SGD(model.parameters(), lr=0.125, momentum=0.5)
    xamp.initialize(model, optimizer, level, fused=True, verbosity=0)
    assert optimizer.param_groups[0]["fused"] is True
    twin = SGD(plain.parameters(), lr=0.125, momentum=0.5)
    for _ in range(3):
        for (_, master), param in zip(model.named_parameters(), plain.parameters(), strict=True):
            param.grad = torch.full_like(param, 0.25)
            assert master.dtype == dtype
        with xamp.scale_loss(sum_of(model) * 0.25, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
        twin.step()
    for found, wanted in zip(xamp.master_params(optimizer), plain.parameters(), strict=True):
        assert torch.allclose(found, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_fused_form_that_is_wrong_with_momentum_is_not_chosen(
    lane: Lane, momentum: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = torch._fused_sgd_

    def without_momentum(*args: Any, **kwargs: Any) -> Any:
        return right(*args, **{**kwargs, "momentum": 0.0})

    monkeypatch.setattr(torch, "_fused_sgd_", without_momentum)
    fused_classes.is_right.cache_clear()
    try:
        torch.manual_seed(0)
        model: Any = nn.Linear(8, 8).to(lane.device)
        reference = copy.deepcopy(model)
        optimizer = SGD(model.parameters(), lr=0.125, momentum=momentum)
        plain = SGD(reference.parameters(), lr=0.125, momentum=momentum)
        xamp.initialize(model, optimizer, "O1", verbosity=0, init_scale=64.0)
        for _ in range(3):
            optimizer.zero_grad()
            plain.zero_grad()
            with xamp.scale_loss(sum_of(model), optimizer) as scaled:
                scaled.backward()
            sum_of(reference).backward()
            optimizer.step()
            plain.step()
        torch.testing.assert_close(list(model.parameters()), list(reference.parameters()))
    finally:
        fused_classes.is_right.cache_clear()


class FirstStepMatters(SGD):
    """A fused implementation that goes wrong where its first step is skipped, as torch's with momentum does."""

    broken: bool | None = None

    def step(self, closure: Any = None) -> Any:
        if self.broken is None:
            self.broken = bool(getattr(self, "found_inf", False))
        result = super().step(closure)
        if self.broken:
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
        return result


def test_the_trial_skips_no_first_step_for_the_host_decides_on_it() -> None:
    assert fused_classes.is_right(FirstStepMatters, torch.device("cpu"), torch.float32)


class RefusesMomentum(SGD):
    """A fused implementation that a device has without momentum only."""

    __module__ = "torch.optim.sgd"

    def step(self, closure: Any = None) -> Any:
        if self.param_groups[0]["momentum"]:
            raise RuntimeError("no momentum on this device")
        return super().step(closure)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_what_was_made_fused_is_tried_with_the_momentum_that_it_has(momentum: float) -> None:
    model = nn.Linear(2, 2)
    optimizer = RefusesMomentum(model.parameters(), lr=0.125, momentum=momentum, fused=True)
    if momentum:
        with pytest.raises(UnsupportedPolicy, match=r"made with fused=True.*no momentum on this device"):
            xamp.initialize(model, optimizer, "O1", verbosity=0)
    else:
        xamp.initialize(model, optimizer, "O1", verbosity=0)


def test_a_form_is_tried_with_momentum_where_its_class_has_it() -> None:
    assert not fused_classes.is_right(RefusesMomentum, torch.device("cpu"), torch.float32)


def test_gradients_of_two_dtypes_leave_the_fused_form_on() -> None:
    """They are unscaled one dtype after the other, as sparse ones are, which switch it off."""
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, dtype=torch.float64))]
    model = nn.ParameterList(params)
    optimizer = SGD(model.parameters(), lr=0.125)
    xamp.initialize(model, optimizer, "O1", init_scale=64.0, verbosity=0)
    for _ in range(2):
        optimizer.zero_grad()
        with xamp.scale_loss(sum(p.float().sum() for p in model), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    assert optimizer.param_groups[0]["fused"] is True
    assert [p.tolist() for p in params] == [[0.75] * 3] * 2


@pytest.mark.parametrize(("units", "alike"), [(15.5, True), (16.5, False)])
def test_forms_are_alike_within_16_units_of_the_dtype(units: float, alike: bool) -> None:
    class Off(torch.optim.Optimizer):
        """Steps as SGD; its fused form is off by so many units in the end."""

        steps = 0

        def __init__(self, params: Any, lr: float, fused: bool = False, foreach: bool | None = None) -> None:
            super().__init__(params, {"lr": lr, "fused": fused})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            del closure
            (group,) = self.param_groups
            (param,) = group["params"]
            self.steps += 1
            if not group["fused"] or not bool(self.found_inf):  # type: ignore[attr-defined]
                param.sub_(param.grad, alpha=group["lr"])
            if group["fused"] and self.steps == 4:
                param.add_(units * torch.finfo(param.dtype).eps * (1.0 + param.abs()))

    assert fused_classes._steps_alike(Off, torch.device("cpu"), torch.float32, {}) is alike
