"""Tier optimizers, first part: each optimizer, in each form, steps as in a plain loop or skips."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, Optimizer

import xamp
from xamp.errors import XampError
from xamp.testing.exact import (
    LR,
    Dot,
    Pair,
    assert_follows,
    assert_same,
    clip,
    inputs,
    iterate,
    outcome,
    picture,
    plain_iterate,
    run_backward,
)
from xamp.testing.forms import FEW, FORMS, FUSIBLE, SETTINGS, Form, begin, stepped_as
from xamp.testing.lane import Lane
from xamp.testing.tier import Tier, scaled

__all__ = ["OptimizerSteps"]

MAX_NORM = 0.5
each_setting = pytest.mark.parametrize("setting", SETTINGS)
each_form = pytest.mark.parametrize("form", FORMS, ids=str)
few_forms = pytest.mark.parametrize("form", FEW, ids=str)
each_fused = pytest.mark.parametrize("fused", [False, "auto"], ids=["unfused", "auto"])


class OptimizerSteps(Tier):
    """Optimizers step as in plain torch, whatever the level."""

    tier = "optimizers"

    @each_setting
    @each_form
    def test_update_equals_plain(self, lane: Lane, setting: str, form: Form) -> None:
        """Steps equal those of a plain fp32 loop (at O3: an fp16 loop), and the parameters are the masters, rounded."""
        pair = begin(lane, setting, form, growth_interval=2)
        for x in inputs(6, lane):
            iterate(pair.model, pair.optimizer, x)
            plain_iterate(pair.plain_model, pair.plain_optimizer, x)
            assert outcome(pair.optimizer) == "APPLIED"
            assert_follows(pair)

    @each_setting
    @each_form
    @pytest.mark.parametrize("before", [0, 2], ids=["first-step", "later-step"])
    def test_skipped_step_changes_nothing(self, lane: Lane, setting: str, form: Form, before: int) -> None:
        """A skip keeps weights, masters and state to the bit; training continues as if the batch had not existed."""
        pair = begin(lane, setting, form)
        batches = inputs(before + 4, lane)
        for x in batches[:before]:
            iterate(pair.model, pair.optimizer, x)
            plain_iterate(pair.plain_model, pair.plain_optimizer, x)
        still = picture(pair.model, pair.optimizer)
        for spoilt, x in zip(("first", "second"), batches[before:], strict=False):
            was = xamp.loss_scale(pair.optimizer)
            iterate(pair.model, pair.optimizer, x, lane, [f"{spoilt}.weight"])
            assert_same(picture(pair.model, pair.optimizer), still)
            assert outcome(pair.optimizer) == "SKIPPED"
            assert xamp.loss_scale(pair.optimizer) == was / 2
        for x in batches[before + 2 :]:
            iterate(pair.model, pair.optimizer, x)
            plain_iterate(pair.plain_model, pair.plain_optimizer, x)
            assert outcome(pair.optimizer) == "APPLIED"
        assert_follows(pair)

    @scaled
    @pytest.mark.parametrize("name", FUSIBLE)
    def test_fused_works_or_is_refused(self, lane: Lane, level: str, name: str) -> None:
        """A user's ``fused=True`` optimizer steps and skips correctly, declared or not; or xamp refuses it."""
        lane.need(level)
        form = Form(FUSIBLE[name], {}, "fused")
        declared = name in lane.can.fused_optimizers
        if not form.runs(lane):
            assert not declared, "declared, and torch has none for this device"
            lane.lacks(f"a fused {name}, which torch does not have here")
        pair = _beside(Dot().to(lane.device), form)
        still, refused = picture(pair.model, pair.optimizer), ""
        try:
            xamp.initialize(pair.model, pair.optimizer, level=level, init_scale=64.0, verbosity=0)
        except XampError as error:
            refused = str(error)
        if refused:
            assert not declared, f"declared, and refused: {refused}"
            assert_same(picture(pair.model, pair.optimizer), still)
            return
        for count, x in enumerate(inputs(6, lane)):
            still = picture(pair.model, pair.optimizer)
            overflows = count in (0, 3)
            iterate(pair.model, pair.optimizer, x, lane, ["first.weight"] if overflows else [])
            assert outcome(pair.optimizer) == ("SKIPPED" if overflows else "APPLIED")
            if overflows:
                assert_same(picture(pair.model, pair.optimizer), still)
            else:
                plain_iterate(pair.plain_model, pair.plain_optimizer, x)
            assert_follows(pair)

    @scaled
    @pytest.mark.parametrize("name", FUSIBLE)
    def test_declared_form_is_used(self, lane: Lane, level: str, name: str) -> None:
        """Where the user left it open, a declared fused implementation is used; the state does not show it."""
        lane.need(level)
        model = Dot().to(lane.device)
        optimizer = FUSIBLE[name](model.parameters(), lr=LR)
        xamp.initialize(model, optimizer, level=level, verbosity=0)
        assert bool(optimizer.param_groups[0]["fused"]) is (name in lane.can.fused_optimizers)
        assert optimizer.state_dict()["param_groups"][0]["fused"] is None

    @scaled
    @each_fused
    @pytest.mark.parametrize("how", ["xamp", "torch"])
    def test_two_optimizers_joint_loss_and_clip(self, lane: Lane, level: str, fused: Any, how: str) -> None:
        """Two optimizers on one loss, each clipped, step as in fp32 while the scale grows."""
        pairs = _two(lane, level, init_scale=1024.0, growth_interval=2, fused=fused)
        for x in inputs(6, lane):
            _joint_backward(pairs, x)
            for pair in pairs:
                norm, wanted = _clip(pair, how)
                torch.testing.assert_close(norm, wanted, rtol=1e-6, atol=0)
            for pair in pairs:
                pair.optimizer.step()
                pair.plain_optimizer.step()
                assert_follows(pair)
        assert xamp.loss_scale(pairs[0].optimizer) == 1024.0 * 2**3

    @scaled
    @each_fused
    @pytest.mark.parametrize("overflow_at", [0, 3])
    def test_overflow_in_one_of_two(self, lane: Lane, level: str, fused: Any, overflow_at: int) -> None:
        """On a joint loss only the optimizer that overflowed skips (on a chip with a flag, both)."""
        pairs = _two(lane, level, init_scale=1024.0, fused=fused)
        for count, x in enumerate(inputs(6, lane)):
            overflows = count == overflow_at
            stills = [picture(pair.model, pair.optimizer) for pair in pairs]
            _joint_backward(pairs, x, lane if overflows else None)
            for index, (pair, still) in enumerate(zip(pairs, stills, strict=True)):
                skips = overflows and (index == 0 or lane.can.overflow == "flag")
                pair.optimizer.step()
                assert outcome(pair.optimizer) == ("SKIPPED" if skips else "APPLIED")
                if skips:
                    assert_same(picture(pair.model, pair.optimizer), still)
                else:
                    pair.plain_optimizer.step()
                assert_follows(pair)
            assert xamp.loss_scale(pairs[0].optimizer) == (1024.0 if count < overflow_at else 512.0)

    @scaled
    @each_fused
    def test_overflow_in_one_of_two_losses(self, lane: Lane, level: str, fused: Any) -> None:
        """If each optimizer has its own loss, only the one whose loss overflowed skips, on every chip."""
        pairs = _two(lane, level, init_scale=1024.0, fused=fused)
        for count, x in enumerate(inputs(6, lane)):
            for index, pair in enumerate(pairs):
                pair.optimizer.zero_grad()
                spoil = [pair.model.first.weight] if count == 2 + index else []
                run_backward(pair.model(x), pair.optimizer, lane, spoil)
            for index, pair in enumerate(pairs):
                skips = count == 2 + index
                pair.optimizer.step()
                assert outcome(pair.optimizer) == ("SKIPPED" if skips else "APPLIED")
                if not skips:
                    plain_iterate(pair.plain_model, pair.plain_optimizer, x)
                assert_follows(pair)
        assert xamp.loss_scale(pairs[0].optimizer) == 256.0
        last: Any = xamp.session(pairs[0].model).last_step
        assert {optimizer: found.name for optimizer, found in last.items()} == {
            pair.optimizer: "APPLIED" for pair in pairs
        }

    @scaled
    @each_fused
    def test_growth_between_two(self, lane: Lane, level: str, fused: Any) -> None:
        """The scale grows once a window, in which two optimizers have a backward each; both updates keep their size."""
        pairs = _two(lane, level, init_scale=8.0, growth_interval=1, fused=fused)
        for x in inputs(3, lane):
            for pair in pairs:
                pair.optimizer.zero_grad()
                run_backward(pair.model(x), pair.optimizer)
            for pair in pairs:
                pair.optimizer.step()
                plain_iterate(pair.plain_model, pair.plain_optimizer, x)
                assert_follows(pair)
        assert xamp.loss_scale(pairs[0].optimizer) == 8.0 * 2**3

    @each_setting
    @few_forms
    @pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf], ids=str)
    def test_clipping_sees_plain_gradients(self, lane: Lane, setting: str, form: Form, norm_type: float) -> None:
        """Clipping uses the norm of the unscaled gradients, as in fp64, and leaves gradients of the requested norm."""
        pair = begin(lane, setting, form, init_scale=1024.0)
        stepped = stepped_as(setting)  # a norm of fp16 gradients is rounded to fp16
        exact_to = 1e-6 if stepped == torch.float32 else 2 * torch.finfo(stepped).eps
        for x in inputs(3, lane):
            exact = torch.linalg.vector_norm(x.cpu().double(), norm_type)
            pair.optimizer.zero_grad()
            run_backward(pair.model(x), pair.optimizer)
            norm = xamp.clip_grad_norm_(pair.optimizer, MAX_NORM, norm_type)
            torch.testing.assert_close(norm.cpu().double(), exact, rtol=exact_to, atol=0)
            grads = [p.grad.cpu().double() for p in xamp.master_params(pair.optimizer) if p.grad is not None]
            torch.testing.assert_close(torch.cat(grads), x.cpu().double() * MAX_NORM / exact, rtol=2 * exact_to, atol=0)
            pair.optimizer.step()


def _beside(model: Dot, form: Form) -> Pair:
    """A model and its twin, neither given to ``initialize`` yet."""
    plain = copy.deepcopy(model)
    return Pair(model, form.make(model.parameters()), plain, form.make(plain.parameters()))


def _two(lane: Lane, level: str, **options: Any) -> list[Pair]:
    """Two models under one ``initialize``, with SGD and Adam, and the twin of each."""
    lane.need(level)
    forms = [Form(SGD, {"momentum": 0.9}, "auto"), Form(Adam, {}, "auto")]
    pairs = [_beside(Dot().to(lane.device), form) for form in forms]
    models, optimizers = [pair.model for pair in pairs], [pair.optimizer for pair in pairs]
    xamp.initialize(models, optimizers, level=level, verbosity=0, **options)
    return pairs


def _joint_backward(pairs: list[Pair], x: torch.Tensor, overflow_on: Lane | None = None) -> None:
    """Backward of one joint loss, under xamp and in plain torch; ``overflow_on``: the first model overflows there."""
    optimizers: list[Optimizer] = [pair.optimizer for pair in pairs]
    for optimizer in (*optimizers, *(pair.plain_optimizer for pair in pairs)):
        optimizer.zero_grad()
    spoil = [] if overflow_on is None else [pairs[0].model.second.weight]
    run_backward(sum(pair.model(x) for pair in pairs), optimizers, overflow_on, spoil)
    plain_loss: Any = sum(pair.plain_model(x) for pair in pairs)
    plain_loss.backward()


def _clip(pair: Pair, how: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Clip, under xamp and in plain torch; return both norms before clipping."""
    if how == "xamp":
        found = xamp.clip_grad_norm_(pair.optimizer, MAX_NORM)
    else:
        found = clip(xamp.master_params(pair.optimizer), MAX_NORM)
    return found, clip(pair.plain_model.parameters(), MAX_NORM)
