"""Tier scaling, first part: how a loss scale moves, what a static scale does, waits for the device, and reports."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import pytest
import torch

import xamp
from xamp.errors import LossScaleCollapsed
from xamp.policy import LEVELS
from xamp.registry.registry import HOST
from xamp.testing.exact import (
    Pair,
    assert_follows,
    assert_same,
    inputs,
    iterate,
    outcome,
    picture,
    plain_iterate,
    run_backward,
    start,
    stepped,
)
from xamp.testing.forms import FUSIBLE, Form
from xamp.testing.lane import Lane
from xamp.testing.reads import HostReads, host_as_device, no_waiting, steps_late
from xamp.testing.scale_rules import Rule, overflows
from xamp.testing.tier import Tier, at_levels, every_level, managed, scaled
from xamp.values.late_reads import copies_without_waiting

__all__ = ["Scales"]

STEPS = 20
unscaled = at_levels(lambda row: not row.scales)
each_fused = pytest.mark.parametrize("fused", [False, "auto"], ids=["unfused", "auto"])

RULES = {
    "wide": Rule(interval=3, ceiling=2.0**15),  # at larger scales fp16 gradients overflow by themselves
    "tight": Rule(interval=1, floor=4.0, ceiling=256.0),
    "bounds-between": Rule(interval=2, floor=24.0, ceiling=200.0),
    "odd-factors": Rule(growth=3.0, backoff=0.25, interval=2, floor=0.5, ceiling=5000.0),
}


class Scales(Tier):
    """Loss scales move by the rule, and a session reports what happened."""

    tier = "scaling"

    @scaled
    @each_fused
    @pytest.mark.parametrize("rule", RULES)
    def test_scale_sequence(self, lane: Lane, level: str, fused: Any, rule: str) -> None:
        """Over 300 steps with overflows the scale follows the rule: growth, backoff, count, floor and ceiling."""
        spoilt = overflows(300)
        pair = start(lane, level, fused=fused, **RULES[rule].options)
        found = []
        for overflow, x in zip(spoilt, inputs(300, lane), strict=True):
            iterate(pair.model, pair.optimizer, x, lane, ["first.weight"] if overflow else [])
            if not overflow:
                plain_iterate(pair.plain_model, pair.plain_optimizer, x)
            found.append(xamp.loss_scale(pair.optimizer))
        assert found == list(RULES[rule].scales(spoilt))
        stats = xamp.session(pair.model).stats
        assert (stats.applied, stats.skipped) == (300 - sum(spoilt), sum(spoilt))
        if rule in ("wide", "tight"):  # a power of two at every step
            assert_follows(pair)
        elif not LEVELS[level].casts_parameters:  # else 16-bit gradients are rounded under odd scales
            assert_follows(pair, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize(
        ("init", "at"), [(2.0**16, 2.0**16), (2.0**30, 2.0**24), (0.25, 1.0)], ids=["inside", "above", "below"]
    )
    def test_start_within_bounds(self, lane: Lane, init: float, at: float) -> None:
        """The scale starts at ``init_scale``, clamped to the floor and the ceiling."""
        assert xamp.loss_scale(start(lane, "O1", init_scale=init).optimizer) == at

    @scaled
    @each_fused
    def test_floor(self, lane: Lane, level: str, fused: Any) -> None:
        """After 200 overflows in a row the scale is the floor and the weights are unchanged.

        Each 50 are reported, with the step or as many steps late as :func:`steps_late` says.
        """
        pair = start(lane, level, fused=fused, init_scale=2.0**15)
        x = inputs(1, lane)[0]
        iterate(pair.model, pair.optimizer, x)
        still = picture(pair.model, pair.optimizer)
        reported, messages = [], set()
        for count in range(1, 201):
            try:
                iterate(pair.model, pair.optimizer, x, lane, ["second.weight"])
            except LossScaleCollapsed as error:
                reported.append(count)
                messages.add(str(error))
            assert xamp.loss_scale(pair.optimizer) == max(2.0 ** (15 - count), 1.0)
        late = steps_late(lane, pair.optimizer)
        assert reported == [15 + 50 + late, 15 + 100 + late, 15 + 150 + late]
        (message,) = messages
        assert "min_loss_scale=1" in message
        assert "second.weight" in message or lane.can.overflow == "flag"  # a flag does not say which gradient it was
        assert_same(picture(pair.model, pair.optimizer), still)
        assert xamp.session(pair.model).stats.skipped == 200
        iterate(pair.model, pair.optimizer, x)
        assert outcome(pair.optimizer) == "APPLIED"
        assert all(bool(p.isfinite().all()) for p in stepped(pair.optimizer))

    @scaled
    def test_clean_step_restarts_the_count_to_collapse(self, lane: Lane, level: str) -> None:
        """49 overflows at the floor, a clean step, and 49 more do not collapse; the next one does."""
        pair = start(lane, level, init_scale=1.0, fused=False)
        x = inputs(1, lane)[0]
        for _ in range(2):
            iterate(pair.model, pair.optimizer, x)
            for _ in range(49):
                iterate(pair.model, pair.optimizer, x, lane, ["first.weight"])
        with pytest.raises(LossScaleCollapsed):
            iterate(pair.model, pair.optimizer, x, lane, ["first.weight"])
        assert outcome(pair.optimizer) == "SKIPPED"

    # ---------------------------------------------------------------- static scales

    @scaled
    @each_fused
    @pytest.mark.parametrize("options", [{"loss_scale": 128}, {"loss_scale": "1000"}], ids=["128", "1000"])
    def test_static_scale_skips(self, lane: Lane, level: str, options: dict[str, Any], fused: Any) -> None:
        """A static scale other than 1 is checked: an overflow skips, the scale stays, 50 in a row are reported."""
        _check_static(start(lane, level, fused=fused, **options), lane, float(options["loss_scale"]))

    @unscaled
    @each_fused
    def test_static_one_can_be_checked(self, lane: Lane, level: str, fused: Any) -> None:
        """``on_static_overflow="skip"`` checks at a scale of 1 too."""
        _check_static(start(lane, level, on_static_overflow="skip", fused=fused), lane, 1.0)

    @scaled
    def test_static_scale_that_steps(self, lane: Lane, level: str) -> None:
        """``on_static_overflow="step"`` applies every step, as Apex does, and unscales correctly."""
        pair = start(lane, level, loss_scale=128, on_static_overflow="step")
        for x in inputs(3, lane):
            iterate(pair.model, pair.optimizer, x)
            plain_iterate(pair.plain_model, pair.plain_optimizer, x)
        assert_follows(pair)
        before = [p.clone() for p in stepped(pair.optimizer)]
        iterate(pair.model, pair.optimizer, inputs(1, lane)[0], lane, ["first.weight"])
        assert outcome(pair.optimizer) == "APPLIED"
        assert not torch.equal(stepped(pair.optimizer)[0], before[0])
        assert xamp.loss_scale(pair.optimizer) == 128.0

    @unscaled
    def test_static_one_is_a_pass_through(self, lane: Lane, level: str) -> None:
        """At a static scale of 1 ``scale_loss`` returns the loss itself."""
        pair = start(lane, level)
        for x in inputs(3, lane):
            pair.optimizer.zero_grad()
            loss = pair.model(x)
            with xamp.scale_loss(loss, pair.optimizer) as scaled_loss:
                assert scaled_loss is loss
                scaled_loss.backward()
            pair.optimizer.step()
            assert (outcome(pair.optimizer), xamp.loss_scale(pair.optimizer)) == ("APPLIED", 1.0)

    # ---------------------------------------------------------------- waits for the device, and reports

    @managed
    @pytest.mark.parametrize("way", ["auto", "fused"])
    @pytest.mark.parametrize("name", FUSIBLE)
    def test_no_host_reads_when_fused(self, lane: Lane, level: str, way: str, name: str) -> None:
        """Under a dynamic scale a clipped step of a declared fused optimizer never waits for the device.

        If torch has no pinned memory or no events for the device, it cannot copy without waiting, and waits once.
        """
        form = Form(FUSIBLE[name], {}, way)
        Form(FUSIBLE[name], {}, "fused").need(lane)
        can_wait_less = lane.kind == HOST or copies_without_waiting(lane.device)
        reads = _reads(lane, level, form, {"loss_scale": "dynamic"}, strict=can_wait_less)
        assert len(reads) <= (0 if can_wait_less else STEPS), reads

    @scaled
    @pytest.mark.parametrize("options", [{}, {"loss_scale": 128}], ids=["dynamic", "static"])
    @pytest.mark.parametrize("name", ["SGD", "Adam"])
    def test_one_host_read_when_unfused(self, lane: Lane, level: str, options: dict[str, Any], name: str) -> None:
        """A step of an unfused optimizer waits at most once."""
        form = Form(FUSIBLE[name], {}, "foreach")
        assert len(_reads(lane, level, form, options)) <= STEPS

    @every_level
    def test_no_host_reads_when_static(self, lane: Lane, level: str) -> None:
        """A step under a static scale of 1, or one that is never checked, does not wait."""
        options = {"loss_scale": 128, "on_static_overflow": "step"} if LEVELS[level].scales else {}
        assert _reads(lane, level, Form(FUSIBLE["SGD"], {}, "foreach"), options, strict=True) == []

    @scaled
    @each_fused
    def test_outcomes_can_be_read(self, lane: Lane, level: str, fused: Any) -> None:
        """``last_step``, ``stats`` and ``loss_scale`` report what happened, by the model and by the optimizer."""
        pair = start(lane, level, fused=fused)
        sessions = [xamp.session(pair.model), xamp.session(pair.optimizer)]
        assert [session.last_step for session in sessions] == [None, None]
        assert [xamp.loss_scale(each) for each in (pair.model, pair.optimizer)] == [64.0, 64.0]
        wanted = {"APPLIED": 0, "SKIPPED": 0}
        for overflow, x in zip(overflows(20, seed=1), inputs(20, lane), strict=True):
            iterate(pair.model, pair.optimizer, x, lane, ["second.weight"] if overflow else [])
            wanted["SKIPPED" if overflow else "APPLIED"] += 1
            for session in sessions:
                assert session.last_step is xamp.StepOutcome["SKIPPED" if overflow else "APPLIED"]
                assert (session.stats.applied, session.stats.skipped) == (wanted["APPLIED"], wanted["SKIPPED"])
            assert [xamp.loss_scale(each) for each in (pair.model, pair.optimizer)] == [64 / 2 ** wanted["SKIPPED"]] * 2

    @scaled
    @each_fused
    def test_overflow_is_logged(
        self, lane: Lane, level: str, fused: Any, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """Each skipped step gives one record of the logger ``xamp``, with the new scale; nothing is printed."""
        told: list[tuple[int, str]] = []
        with caplog.at_level(logging.INFO, logger="xamp"):
            pair = start(lane, level, verbosity=1, fused=fused)
            capfd.readouterr()
            for count, x in enumerate(inputs(STEPS, lane)):
                caplog.clear()
                iterate(pair.model, pair.optimizer, x, lane, ["first.weight"] if count in (1, 3) else [])
                told += [(count, record.getMessage()) for record in caplog.records if record.name == "xamp"]
        late = steps_late(lane, pair.optimizer)
        assert [count for count, _ in told] == [1 + late, 3 + late]
        assert ["32" in told[0][1], "16" in told[1][1]] == [True, True]
        assert tuple(capfd.readouterr()) == ("", "")


def _check_static(pair: Pair, lane: Lane, scale: float) -> None:
    first, second = inputs(2, lane)
    iterate(pair.model, pair.optimizer, first)
    still = picture(pair.model, pair.optimizer)
    reported = []
    for count in range(1, 121):
        try:
            iterate(pair.model, pair.optimizer, second, lane, ["first.weight"])
        except LossScaleCollapsed as error:
            reported.append((count, "static" in str(error)))
        assert (outcome(pair.optimizer), xamp.loss_scale(pair.optimizer)) == ("SKIPPED", scale)
    late = steps_late(lane, pair.optimizer)
    assert reported == [(50 + late, True), (100 + late, True)]
    assert_same(picture(pair.model, pair.optimizer), still)
    iterate(pair.model, pair.optimizer, second)
    assert outcome(pair.optimizer) == "APPLIED"


def _reads(lane: Lane, level: str, form: Form, options: dict[str, Any], strict: bool = False) -> list[str]:
    """The reads of the host in 20 steps, less those of a plain loop; ``strict``: a wait raises."""
    with host_as_device(lane.device):
        pair = start(lane, level, lambda params: form.make(params, LEVELS[level].steps_lower), **options)
    x = inputs(1, lane)[0]

    def one() -> None:
        pair.optimizer.zero_grad()
        run_backward(pair.model(x), pair.optimizer)
        xamp.clip_grad_norm_(pair.optimizer, 1.0)
        pair.optimizer.step()

    def plain() -> None:
        plain_iterate(pair.plain_model, pair.plain_optimizer, x)

    counted = []
    for run in (one, plain):
        for _ in range(3):  # the host decides about a parameter's first fused step
            run()
        with HostReads(lane.device) as reads, no_waiting(lane) if strict and run is one else contextlib.nullcontext():
            for _ in range(STEPS):
                run()
        counted.append(reads.names)
    found, allowed = counted
    for name in allowed:
        if name in found:
            found.remove(name)
    return found
