"""Tier optimizers, second part: what scripts do with them: groups, schedulers, closures, exceptions, ``close``."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch.optim import LBFGS, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR, StepLR

import xamp
from xamp.errors import PolicyError, StateError
from xamp.policy import LEVELS
from xamp.testing.exact import (
    LR,
    Dot,
    Pair,
    assert_follows,
    assert_same,
    closeness,
    inputs,
    iterate,
    outcome,
    picture,
    plain_iterate,
    run_backward,
    sgd,
    start,
    stepped,
)
from xamp.testing.forms import FEW, SETTINGS, Form, begin, row_of
from xamp.testing.lane import Lane
from xamp.testing.tier import Tier, at_levels, managed

__all__ = ["OptimizerScripts"]

each_setting = pytest.mark.parametrize("setting", SETTINGS)
few_forms = pytest.mark.parametrize("form", FEW, ids=str)

SCHEDULERS: dict[str, Any] = {
    "StepLR": lambda optimizer: StepLR(optimizer, step_size=2, gamma=0.5),
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, max_lr=0.5, total_steps=8),
}


class _BodyError(Exception):
    """Raised by a clause in the body of a ``scale_loss``."""


class _Grouped(Form):
    """One group for each parameter, with a learning rate of its own."""

    def make(self, params: Any, half: bool = False) -> Optimizer:
        first, second = params
        return super().make([{"params": [first], "lr": LR}, {"params": [second], "lr": LR / 4}], half)


class _FirstOnly(Form):
    """An optimizer over the first parameter alone."""

    def make(self, params: Any, half: bool = False) -> Optimizer:
        return super().make([next(iter(params))], half)


class OptimizerScripts(Tier):
    """Optimizers step as in plain torch, whatever a script does with them."""

    tier = "optimizers"

    @each_setting
    @few_forms
    def test_groups_keep_their_settings(self, lane: Lane, setting: str, form: Form) -> None:
        """Each group steps by its own learning rate, also when that changes."""
        pair = begin(lane, setting, _Grouped(form.cls, form.options, form.way))
        for count, x in enumerate(inputs(4, lane)):
            for optimizer in (pair.optimizer, pair.plain_optimizer):
                optimizer.param_groups[0]["lr"] = LR / (count + 1)
            iterate(pair.model, pair.optimizer, x)
            plain_iterate(pair.plain_model, pair.plain_optimizer, x)
        assert [group["lr"] for group in pair.optimizer.param_groups] == [LR / 4, LR / 4]
        assert_follows(pair)

    @each_setting
    @few_forms
    def test_group_added_in_the_middle(self, lane: Lane, setting: str, form: Form) -> None:
        """A group added after two steps steps and skips like the others; its low-precision parameters get masters."""
        pair = begin(lane, setting, _FirstOnly(form.cls, form.options, form.way))
        for count, x in enumerate(inputs(6, lane)):
            if count == 2:
                for model, optimizer in ((pair.model, pair.optimizer), (pair.plain_model, pair.plain_optimizer)):
                    optimizer.add_param_group({"params": [model.second.weight], "lr": LR / 2})
            still = picture(pair.model, pair.optimizer)
            iterate(pair.model, pair.optimizer, x, lane, ["second.weight"] if count == 4 else [])
            if count == 4:
                assert_same(picture(pair.model, pair.optimizer), still)
            else:
                plain_iterate(pair.plain_model, pair.plain_optimizer, x)
        assert len(stepped(pair.optimizer)) == 2
        assert_follows(pair)

    @each_setting
    @few_forms
    @pytest.mark.parametrize("how", ["frozen", "no-gradient"])
    def test_parameter_left_out(self, lane: Lane, setting: str, form: Form, how: str) -> None:
        """A frozen parameter, or one without a gradient, stays the same to the bit and has no state until it trains."""
        pair = begin(lane, setting, form)
        before = [p.clone() for p in (pair.model.second.weight.detach(), stepped(pair.optimizer)[1])]
        for model in (pair.model, pair.plain_model):
            model.second.weight.requires_grad_(how != "frozen")
        for x in inputs(3, lane):
            _iterate_first_part(pair, x)
        assert_same([pair.model.second.weight.detach(), stepped(pair.optimizer)[1]], before)
        assert len(pair.optimizer.state_dict()["state"]) == 1
        for model in (pair.model, pair.plain_model):
            model.second.weight.requires_grad_(True)
        for x in inputs(3, lane, seed=2):
            iterate(pair.model, pair.optimizer, x)
            plain_iterate(pair.plain_model, pair.plain_optimizer, x)
        assert_follows(pair)

    def test_eps_that_rounds_to_zero(self, lane: Lane) -> None:
        """O3 steps fp16: it refuses an ``eps`` that is zero in fp16, names it, and changes nothing."""
        lane.need("O3")
        model = Dot().to(lane.device)
        optimizer = Adam(model.parameters(), lr=LR)
        still = picture(model, optimizer)
        with pytest.raises(PolicyError, match="eps=1e-08"):
            xamp.initialize(model, optimizer, level="O3", verbosity=0)
        assert_same(picture(model, optimizer), still)

    @at_levels(lambda row: not row.manages_gradients and not row.steps_lower)
    def test_closure(self, lane: Lane, level: str) -> None:
        """At levels without scaling an optimizer that calls a closure (LBFGS) steps as in plain torch."""
        pair = start(lane, level, lambda params: LBFGS(params, lr=LR, max_iter=3))
        for x in inputs(2, lane):
            returned = []
            for model, optimizer in ((pair.model, pair.optimizer), (pair.plain_model, pair.plain_optimizer)):

                def closure(model: Any = model, optimizer: Any = optimizer) -> torch.Tensor:
                    optimizer.zero_grad()
                    loss: torch.Tensor = model(x)  # noqa: B023 - it is called before the next x
                    run_backward(loss, optimizer) if model is pair.model else loss.backward()
                    return loss.detach()

                returned.append(optimizer.step(closure))
            torch.testing.assert_close(returned[0], returned[1])
            assert outcome(pair.optimizer) == "APPLIED"
        assert_follows(pair)

    @managed
    def test_closure_is_refused(self, lane: Lane, level: str) -> None:
        """At levels with a scale or masters ``step(closure)`` raises and does nothing: backward would bypass them."""
        pair = start(lane, level)
        still = picture(pair.model, pair.optimizer)
        called: list[int] = []
        with pytest.raises(StateError, match="closure"):
            pair.optimizer.step(lambda: called.append(1))
        assert called == []
        assert_same(picture(pair.model, pair.optimizer), still)

    @at_levels(lambda row: not row.steps_lower)
    @pytest.mark.parametrize("made", ["before", "after"])
    @pytest.mark.parametrize("name", SCHEDULERS)
    def test_scheduler(self, lane: Lane, level: str, made: str, name: str) -> None:
        """A scheduler made before or after ``initialize`` advances when it is called, without a warning."""
        lane.need(level)
        model, make = Dot().to(lane.device), SCHEDULERS[name]
        plain_model = copy.deepcopy(model)
        pair = Pair(model, sgd(model.parameters()), plain_model, sgd(plain_model.parameters()))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            scheduler = make(pair.optimizer) if made == "before" else None
            xamp.initialize(model, pair.optimizer, level=level, init_scale=64.0, verbosity=0)
            scheduler, plain_scheduler = scheduler or make(pair.optimizer), make(pair.plain_optimizer)
            for count, x in enumerate(inputs(6, lane)):
                skips = count == 0 and LEVELS[level].scales
                iterate(model, pair.optimizer, x, lane, ["first.weight"] if skips else [])
                if skips:
                    pair.plain_optimizer._opt_called = True  # else torch warns that the scheduler steps first
                else:
                    plain_iterate(plain_model, pair.plain_optimizer, x)
                scheduler.step()
                plain_scheduler.step()
                assert pair.optimizer.param_groups[0]["lr"] == pair.plain_optimizer.param_groups[0]["lr"]
        assert_follows(pair)

    @each_setting
    @pytest.mark.parametrize("when", ["before", "inside", "after"])
    def test_exception_in_the_body(self, lane: Lane, setting: str, when: str) -> None:
        """If the body of ``scale_loss`` raises, before, inside or after backward, nothing is left half done."""
        pair = begin(lane, setting, FEW[0])
        first, second, third = inputs(3, lane)
        iterate(pair.model, pair.optimizer, first)
        plain_iterate(pair.plain_model, pair.plain_optimizer, first)
        pair.optimizer.zero_grad()
        still, was = picture(pair.model, pair.optimizer), xamp.loss_scale(pair.optimizer)
        _fail(pair, second, when)
        assert [p.grad for p in (*pair.model.parameters(), *xamp.master_params(pair.optimizer))] == [None] * 4
        pair.optimizer.step()
        assert_same(picture(pair.model, pair.optimizer), still)
        assert xamp.loss_scale(pair.optimizer) == was
        iterate(pair.model, pair.optimizer, third)
        plain_iterate(pair.plain_model, pair.plain_optimizer, third)
        assert_follows(pair)

    @each_setting
    @few_forms
    @pytest.mark.parametrize("set_to_none", [True, False], ids=["to-none", "to-zero"])
    def test_zero_grad(self, lane: Lane, setting: str, form: Form, set_to_none: bool) -> None:
        """``zero_grad`` clears accumulated gradients, in parameters and in masters."""
        pair = begin(lane, setting, form)
        batches = inputs(6, lane)
        for first, second in zip(batches[::2], batches[1::2], strict=True):
            run_backward(pair.model(first), pair.optimizer)
            pair.optimizer.zero_grad(set_to_none=set_to_none)
            held = [p.grad for p in xamp.master_params(pair.optimizer) if p.grad is not None]
            assert held == [] if set_to_none else not any(bool(grad.any()) for grad in held)
            run_backward(pair.model(second), pair.optimizer)
            pair.optimizer.step()
            pair.optimizer.zero_grad(set_to_none=set_to_none)
            plain_iterate(pair.plain_model, pair.plain_optimizer, second)
        assert_follows(pair)

    @each_setting
    def test_close_gives_back_fp32(self, lane: Lane, setting: str) -> None:
        """After ``close()`` model and optimizer are plain fp32 objects that continue to train in plain torch."""
        pair = begin(lane, setting, Form(AdamW, {}, "auto"))
        params = list(pair.model.parameters())
        batches = inputs(6, lane)
        for x in batches[:3]:
            iterate(pair.model, pair.optimizer, x)
            plain_iterate(pair.plain_model, pair.plain_optimizer, x)
        exact = [p.float() for p in stepped(pair.optimizer)]
        near = closeness(pair.optimizer)
        xamp.session(pair.model).close()
        assert (type(pair.model), type(pair.optimizer)) == (Dot, AdamW)
        assert all(now is before for now, before in zip(pair.model.parameters(), params, strict=True))
        assert_same([p.detach() for p in params], exact)
        assert [id(p) for group in pair.optimizer.param_groups for p in group["params"]] == [id(p) for p in params]
        moments = [v for state in pair.optimizer.state.values() for k, v in state.items() if k != "step"]
        assert {moment.dtype for moment in moments} == {torch.float32}
        for x in batches[3:]:
            plain_iterate(pair.model, pair.optimizer, x)
            plain_iterate(pair.plain_model, pair.plain_optimizer, x)
        if not row_of(setting).steps_lower:  # its twin stays in 16 bits
            assert_follows(pair, rtol=near, atol=near)


def _iterate_first_part(pair: Pair, x: torch.Tensor) -> None:
    """One iteration, under xamp and in plain torch, on a loss that uses only the first parameter."""
    for optimizer in (pair.optimizer, pair.plain_optimizer):
        optimizer.zero_grad()
    run_backward(pair.model.first(x[:4]), pair.optimizer)
    pair.plain_model.first(x[:4]).backward()
    for optimizer in (pair.optimizer, pair.plain_optimizer):
        optimizer.step()


class _Refusal(torch.autograd.Function):
    """Raises in backward. A tensor's hook that raises would crash a device whose guard is written in Python."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(*_: Any) -> torch.Tensor:
        raise _BodyError


def _fail(pair: Pair, x: torch.Tensor, when: str) -> None:
    """Run a ``scale_loss`` whose body raises before, inside or after backward."""
    refusing = (lambda _, args: tuple(map(_Refusal.apply, args))) if when == "inside" else None
    handle = None if refusing is None else pair.model.second.register_forward_pre_hook(refusing)
    x = x.clone().requires_grad_() if when == "inside" else x
    with pytest.raises(_BodyError), xamp.scale_loss(pair.model(x), pair.optimizer) as scaled:  # noqa: PT012
        if when != "before":
            scaled.backward()
        raise _BodyError
    if handle is not None:
        handle.remove()
