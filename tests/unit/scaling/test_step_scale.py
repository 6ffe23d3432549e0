"""How the loss scale moves, where it stops, and when it has collapsed.

Covers: xamp.scaling.scale, xamp.scaling.counts, xamp.scaling.models.
"""

from __future__ import annotations

import itertools
import logging
import re
from typing import Any

import pytest
import torch
from lanes import Lane, steps_late
from stepping import (
    SCALED,
    Dot,
    HostReads,
    assert_same,
    at,
    inputs,
    iterate,
    outcome,
    picture,
    plain_iterate,
    run_backward,
    stepped,
    twin,
)
from torch.optim import SGD, Optimizer

import xamp
from xamp.errors import LossScaleCollapsed

scaled_levels = pytest.mark.parametrize("level", SCALED)
both_forms = pytest.mark.parametrize("fused", [False, "auto"])

NOT_NAMED = "unknown, for this chip tells of an overflow by a flag"


def start(lane: Lane, level: str, **options: Any) -> tuple[Any, Optimizer]:
    model = Dot().to(lane.device)
    optimizer: Optimizer = SGD(model.parameters(), lr=0.125, momentum=0.9)
    model, optimizer = xamp.initialize(model, optimizer, **at(level), **options)
    return model, optimizer


def scales_after(model: Any, optimizer: Optimizer, lane: Lane, overflows: str) -> list[float]:
    """The scale after each iteration; ``x`` in ``overflows`` is one that overflows."""
    found = []
    for kind, x in zip(overflows, inputs(len(overflows), lane), strict=True):
        iterate(model, optimizer, x, lane, ["a"] if kind == "x" else ())
        found.append(xamp.loss_scale(optimizer))
    return found


@scaled_levels
@both_forms
def test_it_grows_after_exactly_growth_interval_clean_updates_and_an_overflow_starts_the_count_again(
    lane: Lane, level: str, fused: str | bool
) -> None:
    model, optimizer = start(lane, level, init_scale=64.0, growth_interval=3, fused=fused)
    found = scales_after(model, optimizer, lane, "........x..x...")
    assert found == [64, 64, 128, 128, 128, 256, 256, 256, 128, 128, 128, 64, 64, 64, 128]


@scaled_levels
def test_factors_are_those_that_were_asked_for(lane: Lane, level: str) -> None:
    model, optimizer = start(
        lane, level, init_scale=64.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=1, min_loss_scale=0.5
    )
    assert scales_after(model, optimizer, lane, "..xxx.") == [192, 576, 144, 36, 9, 27]


@scaled_levels
@both_forms
def test_it_stops_at_floor_and_ceiling(lane: Lane, level: str, fused: str | bool) -> None:
    model, optimizer = start(
        lane, level, init_scale=64.0, growth_interval=1, min_loss_scale=24.0, max_loss_scale=200.0, fused=fused
    )
    assert scales_after(model, optimizer, lane, "...xxxx.") == [128, 200, 200, 100, 50, 25, 24, 48]


@pytest.mark.parametrize(
    ("init", "floor", "ceiling", "start_at"),
    [(2.0**16, 1.0, 2.0**24, 2.0**16), (2.0**30, 1.0, 2.0**24, 2.0**24), (0.25, 1.0, 2.0**24, 1.0)],
)
def test_the_start_lies_within_the_bounds(
    lane: Lane, init: float, floor: float, ceiling: float, start_at: float
) -> None:
    _, optimizer = start(lane, "O1", init_scale=init, min_loss_scale=floor, max_loss_scale=ceiling)
    assert xamp.loss_scale(optimizer) == start_at


@scaled_levels
@both_forms
def test_a_window_is_one_update(lane: Lane, level: str, fused: str | bool) -> None:
    """From one step to the next, however many micro-batches there are and however many of them overflow."""
    model, optimizer = start(lane, level, init_scale=64.0, growth_interval=2, fused=fused)
    found = []
    for window in ["...", ".....", "x..", "xxxx", "...", ".x.x", ".", "........"]:
        optimizer.zero_grad()
        for kind, x in zip(window, inputs(len(window), lane), strict=True):
            run_backward(model(x), optimizer, lane, [model.a] if kind == "x" else ())
        optimizer.step()
        found.append(xamp.loss_scale(optimizer))
    assert found == [64, 128, 64, 32, 32, 16, 16, 32]


@pytest.mark.parametrize("level", SCALED)
@pytest.mark.parametrize("scale", [64.0, 1000.0, "dynamic"])
def test_the_yielded_loss_is_fp32_and_times_the_scale(lane: Lane, level: str, scale: str | float) -> None:
    model, optimizer = start(lane, level, loss_scale=scale, init_scale=64.0)
    loss = model(inputs(1, lane)[0])
    with xamp.scale_loss(loss.half(), optimizer) as scaled:
        assert scaled.dtype == torch.float32
        torch.testing.assert_close(scaled, loss.half().float() * (64.0 if scale == "dynamic" else scale))


@scaled_levels
@both_forms
@pytest.mark.parametrize("first_is_clean", [False, True])
def test_200_overflows_from_2_to_the_16_stay_at_the_floor_and_are_reported_every_50(
    lane: Lane, level: str, fused: str | bool, first_is_clean: bool
) -> None:
    """The scale reaches 1.0 with the 16th; the 17th is the first at the floor, so the 66th is the 50th there.

    That is told with its step, or a fixed number of steps later where the device decides and is not waited for.
    """
    model, optimizer = start(lane, level, fused=fused, init_scale=2.0**15 if level != "O1" else 2.0**16)
    late = steps_late(lane, optimizer) if first_is_clean else 0  # the host decides until a step has made the momentum
    x = inputs(1, lane)[0]
    if first_is_clean:
        iterate(model, optimizer, x)
    still = picture(model, optimizer)
    reported, messages = [], set()
    for count in range(1, 201):
        try:
            iterate(model, optimizer, x, lane, ["b"])
        except LossScaleCollapsed as error:
            reported.append(count)
            messages.add(str(error))
        assert xamp.loss_scale(optimizer) >= 1.0
    assert len(messages) == 1
    named = r"second\.weight" if lane.can.overflow == "inf" else NOT_NAMED
    assert re.search(rf"loss scale 1, at its floor \(min_loss_scale=1\).* not finite: {named}\. ", messages.pop())
    falls = 15 if level != "O1" else 16
    assert reported == [falls + 50 + late, falls + 100 + late, falls + 150 + late]
    assert_same(picture(model, optimizer), still)
    assert xamp.session(optimizer).stats.skipped == 200
    optimizer.zero_grad()
    iterate(model, optimizer, x)
    assert outcome(optimizer) == "APPLIED"
    assert all(bool(p.isfinite().all()) for p in stepped(optimizer))


@scaled_levels
def test_a_clean_step_starts_the_count_to_the_collapse_again(lane: Lane, level: str) -> None:
    model, optimizer = start(lane, level, init_scale=1.0, growth_interval=1000, fused=False)
    x = inputs(1, lane)[0]
    for _ in range(49):
        iterate(model, optimizer, x, lane, ["a"])
    iterate(model, optimizer, x)
    for _ in range(49):
        iterate(model, optimizer, x, lane, ["a"])
    with pytest.raises(LossScaleCollapsed, match="50 overflows in a row"):
        iterate(model, optimizer, x, lane, ["a"])
    assert outcome(optimizer) == "SKIPPED"


def test_the_message_names_parameters_by_model_and_says_what_to_do(lane: Lane) -> None:
    models = [Dot().to(lane.device), Dot().to(lane.device)]
    optimizer: Any = SGD([p for m in models for p in m.parameters()], lr=0.1)
    models, optimizer = xamp.initialize(models, optimizer, level="O2", init_scale=1.0, verbosity=0)
    x = inputs(1, lane)[0]
    named = r"models\[0\]\.second\.weight, models\[1\]\.first\.weight"
    named = named if lane.can.overflow == "inf" else NOT_NAMED
    pattern = rf"min_loss_scale=1.*not finite: {named}\. .*keep_fp32"
    late = steps_late(lane, optimizer)
    for count in itertools.count(1):
        optimizer.zero_grad()
        run_backward(models[0](x) + models[1](x), optimizer, lane, [models[0].b, models[1].a])
        if count == 50 + late:
            break
        optimizer.step()
    with pytest.raises(LossScaleCollapsed, match=pattern):
        optimizer.step()


@scaled_levels
@pytest.mark.parametrize("scale", [128.0, 1000.0, "1.0"])
def test_a_static_scale_skips_and_stays_and_reports_every_50(lane: Lane, level: str, scale: float | str) -> None:
    model, optimizer = start(lane, level, loss_scale=scale, on_static_overflow="skip", fused=False)
    x, other = inputs(2, lane)
    iterate(model, optimizer, other)
    still = picture(model, optimizer)
    reported = []
    for count in range(1, 121):
        try:
            iterate(model, optimizer, x, lane, ["a"])
        except LossScaleCollapsed as error:
            reported.append((count, "static" in str(error)))
        assert outcome(optimizer) == "SKIPPED"
    assert reported == [(50, True), (100, True)]
    assert_same(picture(model, optimizer), still)
    assert xamp.loss_scale(optimizer) == float(scale)


@pytest.mark.parametrize("level", SCALED)
@pytest.mark.parametrize("fused", [False, "auto"])
def test_a_static_scale_other_than_one_is_checked_by_default(lane: Lane, level: str, fused: str | bool) -> None:
    model, optimizer = start(lane, level, loss_scale=128, fused=fused)
    first, second = inputs(2, lane)
    iterate(model, optimizer, first)
    still = picture(model, optimizer)
    iterate(model, optimizer, second, lane, ["a"])
    assert_same(picture(model, optimizer), still)
    assert (outcome(optimizer), xamp.loss_scale(optimizer)) == ("SKIPPED", 128.0)


@pytest.mark.parametrize("level", ["O0", "O4", "O5"])
def test_on_static_overflow_skip_checks_at_a_scale_of_one(lane: Lane, level: str) -> None:
    model, optimizer = start(lane, level, on_static_overflow="skip")
    first, second = inputs(2, lane)
    iterate(model, optimizer, first)
    still = picture(model, optimizer)
    iterate(model, optimizer, second, lane, ["a"])
    assert_same(picture(model, optimizer), still)
    assert (outcome(optimizer), xamp.loss_scale(optimizer)) == ("SKIPPED", 1.0)


@pytest.mark.parametrize("level", SCALED)
@pytest.mark.parametrize("scale", [128.0, 1000.0])
def test_on_static_overflow_step_never_checks(lane: Lane, level: str, scale: float) -> None:
    model = Dot().to(lane.device)
    reference = twin(model)
    optimizer: Any = SGD(model.parameters(), lr=0.125)
    plain = SGD(reference.parameters(), lr=0.125)
    options: dict[str, Any] = {"loss_scale": scale, "on_static_overflow": "step"}
    model, optimizer = xamp.initialize(model, optimizer, **at(level), **options)
    with HostReads() as reads:
        for x in inputs(3, lane):
            iterate(model, optimizer, x)
            plain_iterate(reference, plain, x)
    assert (reads.scalars, reads.lists) == (0, 0)
    torch.testing.assert_close(stepped(optimizer), [p.detach() for p in reference.parameters()], rtol=1e-6, atol=1e-6)
    iterate(model, optimizer, inputs(1, lane)[0], lane, ["a"])
    assert outcome(optimizer) == "APPLIED"
    if lane.can.overflow == "inf":
        assert not bool(stepped(optimizer)[0].isfinite().any())
    assert xamp.loss_scale(optimizer) == scale


@pytest.mark.parametrize("level", ["O0", "O3", "O4", "O5"])
def test_a_static_scale_of_one_is_a_pass_through(lane: Lane, level: str) -> None:
    model, optimizer = start(lane, level)
    with HostReads() as reads:
        for x in inputs(3, lane):
            optimizer.zero_grad()
            loss = model(x)
            with xamp.scale_loss(loss, optimizer) as scaled:
                assert scaled is loss
                scaled.backward()
            optimizer.step()
    assert (reads.scalars, reads.lists) == (0, 0)
    assert (outcome(optimizer), xamp.loss_scale(optimizer)) == ("APPLIED", 1.0)
    stats = xamp.session(optimizer).stats
    assert (stats.applied, stats.skipped) == (3, 0)


@pytest.mark.parametrize("level", ["O0", "O3", "O4"])
def test_a_pass_through_hands_a_half_loss_on_as_fp32(lane: Lane, level: str) -> None:
    model, optimizer = start(lane, level)
    with xamp.scale_loss(model(inputs(1, lane)[0]).half(), optimizer) as scaled:
        assert scaled.dtype == torch.float32


def test_an_overflow_is_logged_at_verbosity_1_and_never_printed(
    lane: Lane, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Dot().to(lane.device)
    optimizer: Any = SGD(model.parameters(), lr=0.1)
    with caplog.at_level(logging.INFO, logger="xamp"):
        model, optimizer = xamp.initialize(model, optimizer, level="O1", init_scale=256.0, fused=False)
        caplog.clear()
        iterate(model, optimizer, inputs(1, lane)[0], lane, ["a"])
    assert [r.getMessage() for r in caplog.records] == ["gradient overflow: step skipped, loss scale 128"]
    assert capsys.readouterr().out == ""
