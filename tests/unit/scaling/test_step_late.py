"""Devices that must not be waited for: their numbers are read a fixed number of steps late, and judged in order.

Covers: xamp.scaling.outcomes, xamp.scaling.counts, xamp.values.late_reads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lanes import Lane, lag
from late_history import LateHistory
from stepping import Dot, inputs, run_backward
from torch.optim import SGD, AdamW

import xamp
import xamp.registry.fused_classes
from xamp.errors import LossScaleCollapsed
from xamp.scaling.counts import COLLAPSE_RUN
from xamp.scaling.optimizer import state_of
from xamp.scaling.scale import DeviceState
from xamp.values.late_reads import HISTORY_LAG


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xamp.scaling.outcomes.History", LateHistory)


def start(lane: Lane, **options: Any) -> tuple[Any, Any]:
    model = Dot().to(lane.device)
    optimizer = SGD(model.parameters(), lr=0.125, momentum=0.5)
    xamp.initialize(model, optimizer, "O1", verbosity=0, **options)
    return model, optimizer


def one_step(lane: Lane, model: Any, optimizer: Any, *, overflow: bool) -> None:
    optimizer.zero_grad()
    run_backward(model(inputs(1, lane)[0]), optimizer, lane, [model.a] if overflow else [])
    optimizer.step()


def test_values_come_out_in_order_a_fixed_number_of_steps_late() -> None:
    state = DeviceState(1, 1, torch.device("cpu"))
    history = LateHistory(state.values)
    got = []
    for step in range(HISTORY_LAG + 3):
        state.scales.fill_(step)
        got += [(note, values[0]) for note, values in history.push(step)]
    assert got == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert [values[0] for _, values in history.peek()] == [float(s) for s in range(3, HISTORY_LAG + 3)]
    assert [note for note, _ in history.drain()] == list(range(3, HISTORY_LAG + 3))
    assert list(history.peek()) == []


def test_the_page_says_how_late() -> None:
    page = (Path(__file__).parents[3] / "docs" / "scaling.md").read_text(encoding="utf-8")
    assert f"\n{HISTORY_LAG} steps later" in page
    assert f"at the {COLLAPSE_RUN + HISTORY_LAG}th, and every {COLLAPSE_RUN} after | at the {COLLAPSE_RUN}th" in page


@pytest.mark.usefixtures("late")
def test_collapse_is_raised_that_many_steps_late(lane: Lane) -> None:
    model, optimizer = start(lane, init_scale=1.0)
    one_step(lane, model, optimizer, overflow=False)  # decided on the host: the first
    late = lag(lane)
    raised = []
    for step in range(1, 2 * COLLAPSE_RUN + late + 1):
        try:
            one_step(lane, model, optimizer, overflow=True)
        except LossScaleCollapsed:
            raised.append(step)
    assert raised == [COLLAPSE_RUN + late, 2 * COLLAPSE_RUN + late]
    assert xamp.session(optimizer).stats.skipped == 2 * COLLAPSE_RUN + late


@pytest.mark.usefixtures("late")
def test_counts_wait_and_outcomes_are_those_of_the_step(lane: Lane) -> None:
    model, optimizer = start(lane)
    for overflow in (False, False, True, False):
        one_step(lane, model, optimizer, overflow=overflow)
        expected = xamp.StepOutcome.SKIPPED if overflow else xamp.StepOutcome.APPLIED
        assert xamp.session(optimizer).last_step is expected
    stats = xamp.session(optimizer).stats
    assert (stats.applied, stats.skipped) == (3, 1)


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("kind", ["xamp", "torch"])
def test_steps_that_wait_to_be_counted_are_counted_by_a_load(lane: Lane, kind: str) -> None:
    """A state of xamp has counts of its own, one of torch's GradScaler has none."""
    model, optimizer = start(lane)
    state = xamp.state_dict(optimizer, format=kind)
    for overflow in (False, False, True, False):
        one_step(lane, model, optimizer, overflow=overflow)
    xamp.load_state_dict(state, optimizer)
    stats = xamp.session(optimizer).stats
    assert (stats.applied, stats.skipped) == ((0, 0) if kind == "xamp" else (3, 1))


@pytest.mark.usefixtures("late")
def test_a_step_decided_on_the_host_is_judged_after_those_still_waiting(lane: Lane) -> None:
    """A new parameter's first step ends a run of overflows; those before it must not be counted with those after."""
    model, optimizer = start(lane, init_scale=1.0)
    one_step(lane, model, optimizer, overflow=False)
    for _ in range(COLLAPSE_RUN - 1):
        one_step(lane, model, optimizer, overflow=True)
    optimizer.add_param_group({"params": [torch.zeros(2, device=lane.device, requires_grad=True)]})
    one_step(lane, model, optimizer, overflow=False)
    raised, late = [], lag(lane)
    for step in range(1, COLLAPSE_RUN + late + 2):
        try:
            one_step(lane, model, optimizer, overflow=True)
        except LossScaleCollapsed:
            raised.append(step)
    assert raised == [COLLAPSE_RUN + late]


def test_a_fused_form_that_ignores_found_inf_is_decided_on_the_host(
    lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch_npu's AdamW does; also where the user asked for it."""
    right = torch._fused_adamw_

    def ignores(*args: Any, **kwargs: Any) -> Any:
        return right(*args, **{**kwargs, "found_inf": None})

    monkeypatch.setattr(torch, "_fused_adamw_", ignores)
    xamp.registry.fused_classes.is_right.cache_clear()
    try:
        model = Dot().to(lane.device)
        optimizer = AdamW(model.parameters(), lr=0.1, fused=True)
        xamp.initialize(model, optimizer, "O1", verbosity=0, init_scale=64.0)
        one_step(lane, model, optimizer, overflow=False)
        before = model.a.detach().clone()
        one_step(lane, model, optimizer, overflow=True)
        assert xamp.session(optimizer).last_step is xamp.StepOutcome.SKIPPED
        assert torch.equal(model.a.detach(), before)
        state = state_of(optimizer)
        assert state is not None
        assert not state.fused.skips_on_device
    finally:
        xamp.registry.fused_classes.is_right.cache_clear()


def test_a_step_that_takes_other_arguments_gets_them(lane: Lane) -> None:
    plain: Any = SGD

    class Scaled(plain):  # type: ignore[misc]
        def step(self, by: float = 1.0, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["lr"] *= by
            return super().step(closure)

    model = Dot().to(lane.device)
    optimizer = Scaled(model.parameters(), lr=0.125)
    xamp.initialize(model, optimizer, "O1", verbosity=0, init_scale=64.0)
    run_backward(model(inputs(1, lane)[0]), optimizer)
    optimizer.step(0.5)
    assert optimizer.param_groups[0]["lr"] == 0.0625
