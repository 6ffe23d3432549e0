"""Saving and loading at odd moments: inside ``scale_loss``, with gradients waiting, on the way to a collapse.

Covers: xamp.sessions.checkpoint, xamp.scaling.counts, xamp.scaling.weights.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from checkpoints import Run, backward, each_order, everything, load, save, start, train
from lanes import Lane, lag, steps_late
from late_history import LateHistory
from stepping import Dot, assert_same, inputs, iterate, run_backward
from stepping import start as start_dot
from torch.optim import SGD

import xamp
from xamp.errors import LossScaleCollapsed, StateError
from xamp.scaling.counts import COLLAPSE_RUN

masters_or_not = pytest.mark.parametrize("level", ["O1", "O2"])


@masters_or_not
def test_loading_inside_scale_loss_is_refused_and_saving_is_not(lane: Lane, level: str) -> None:
    run = start(lane, level)
    train(run, lane, range(2))
    state = xamp.state_dict(run.optimizer)
    loss = run.model(torch.ones(2, 4, device=lane.device))[0].sum()
    message = r"load_state_dict: inside `with xamp.scale_loss\(\.\.\.\)`. Load after the block."
    with xamp.scale_loss(loss, run.optimizer) as scaled:
        assert_same(xamp.state_dict(run.optimizer), state)
        with pytest.raises(StateError, match=message):
            xamp.load_state_dict(state, run.optimizer)
        scaled.backward()
    assert_same(xamp.state_dict(run.optimizer)["masters"], state["masters"])
    xamp.load_state_dict(state, run.optimizer)


def with_scale(state: Any, scale: float) -> Any:
    return {**state, "scalers": [{"dynamic": True, "scale": scale, "growth_tracker": 0}]}


@pytest.mark.parametrize("level", ["O1", "O2", "O2-second-fp32"])
@pytest.mark.parametrize("delay", [True, False])
def test_gradients_that_wait_are_right_under_a_scale_loaded_meanwhile(lane: Lane, level: str, delay: bool) -> None:
    """They were scaled by 64 (or are plain again), and 1024 is loaded before the backward that adds to them."""
    model, optimizer = start_dot(lane, level)
    first, second = inputs(2, lane)
    run_backward(model(first), optimizer, delay_unscale=delay)
    xamp.load_state_dict(with_scale(xamp.state_dict(optimizer), 1024.0), optimizer)
    run_backward(model(second), optimizer)
    grads = torch.cat([p.grad for p in xamp.master_params(optimizer) if p.grad is not None])
    assert torch.equal(grads.sort().values, (first + second).sort().values)
    before = [p.detach().clone() for p in xamp.master_params(optimizer)]
    optimizer.step()
    assert all(not torch.equal(p, old) for p, old in zip(xamp.master_params(optimizer), before, strict=True))


def test_weights_written_after_a_load_and_before_the_first_step_count(lane: Lane) -> None:
    """As weights that are initialised or broadcast after ``initialize`` do."""
    source = start(lane, "O2")
    train(source, lane, range(3))
    state, run = save(source), start(lane, "O2", seed=2)
    load(run, state, ["xamp"])
    with torch.no_grad():
        run.model.head.weight.fill_(0.25)
    run.optimizer.param_groups[0]["lr"] = 0.0
    train(run, lane, [0])
    masters = dict(zip(dict(run.model.named_parameters()), xamp.master_params(run.optimizer), strict=True))
    assert bool((masters["head.weight"] == 0.25).all())
    assert torch.equal(masters["inner.weight"].detach().cpu(), state["xamp"]["masters"][0]["inner.weight"])


@masters_or_not
def test_going_back_after_an_overflow_that_was_not_stepped(lane: Lane, level: str) -> None:
    """The flag of that backward belongs to the run that is left behind: the next step must not be skipped for it."""
    run = start(lane, level)
    train(run, lane, range(4))
    state = save(run)
    train(run, lane, range(4, 6))
    expected = everything(run)
    backward(run, lane, 6, overflow=True)
    load(run, state)
    assert train(run, lane, range(4, 6)) == ["APPLIED"] * 2
    assert_same(everything(run), expected)


# ---------------------------------------------------------------- collapse


def overflow(run: Run, lane: Lane, count: int) -> list[int]:
    """That many overflows in a row; gives those at which LossScaleCollapsed was raised."""
    raised = []
    for number in range(1, count + 1):
        try:
            iterate(run.model, run.optimizer, inputs(1, lane)[0], lane, ["a"])
        except LossScaleCollapsed:
            raised.append(number)
    return raised


def on_the_floor(lane: Lane, **options: Any) -> Run:
    torch.manual_seed(1)
    model: Any = Dot().to(lane.device)
    optimizer = SGD(model.parameters(), lr=0.125, momentum=0.9)
    xamp.initialize(model, optimizer, "O1", verbosity=0, **{"init_scale": 1.0, **options})
    return Run(model, optimizer)


@functools.cache  # no order of a load matters to it
def overflowing(lane: Lane, options: tuple[tuple[str, float], ...], before: int) -> tuple[Any, list[int], Any]:
    """The state after ``before`` overflows, at which of 100 more it raised, and what they made of the run."""
    run = on_the_floor(lane, **dict(options))
    overflow(run, lane, before)
    state = save(run)
    return state, overflow(run, lane, 2 * COLLAPSE_RUN), everything(run)


@pytest.mark.drawn(30)
@pytest.mark.parametrize("options", [(), (("init_scale", 4.0),), (("loss_scale", 8.0),)], ids=str)
@pytest.mark.parametrize("before", [1, 20, COLLAPSE_RUN - 1, COLLAPSE_RUN, COLLAPSE_RUN + 1])
@each_order
def test_a_run_of_overflows_goes_on_over_a_resume(
    lane: Lane, options: tuple[tuple[str, float], ...], before: int, order: Sequence[str]
) -> None:
    state, raised, end = overflowing(lane, options, before)
    resumed = on_the_floor(lane, **dict(options))
    load(resumed, state, order)
    assert overflow(resumed, lane, 2 * COLLAPSE_RUN) == raised
    assert_same(everything(resumed), end)


def test_a_clean_step_after_the_resume_ends_it(lane: Lane) -> None:
    run = on_the_floor(lane)
    overflow(run, lane, COLLAPSE_RUN - 1)
    resumed = on_the_floor(lane)
    load(resumed, save(run))
    iterate(resumed.model, resumed.optimizer, inputs(1, lane)[0])
    known = COLLAPSE_RUN + steps_late(lane, resumed.optimizer)
    assert overflow(resumed, lane, known) == [known]


def test_a_state_of_another_number_of_optimizers_starts_it_anew(lane: Lane) -> None:
    run = on_the_floor(lane)
    overflow(run, lane, COLLAPSE_RUN - 1)
    state = xamp.state_dict(run.optimizer)
    state["optimizers"] *= 2
    xamp.load_state_dict(state, run.optimizer)
    assert overflow(run, lane, COLLAPSE_RUN) == [COLLAPSE_RUN]


def test_it_goes_on_where_the_optimizer_came_after_the_state(lane: Lane) -> None:
    run = on_the_floor(lane)
    overflow(run, lane, COLLAPSE_RUN - 1)
    state = xamp.state_dict(run.optimizer)
    model: Any = Dot().to(lane.device)
    told: dict[str, Any] = {"level": "O1", "verbosity": 0, "init_scale": 1.0}
    xamp.initialize(model, **told)
    xamp.load_state_dict(state, model)
    optimizer = SGD(model.parameters(), lr=0.125, momentum=0.9)
    xamp.initialize(model, optimizer, **told)
    assert overflow(Run(model, optimizer), lane, 1) == [1]


# ---------------------------------------------------------------- devices that are read late


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xamp.scaling.outcomes.History", LateHistory)


@pytest.mark.usefixtures("late")
@masters_or_not
@each_order
def test_steps_that_the_host_has_not_seen_yet_are_in_the_state(lane: Lane, level: str, order: Sequence[str]) -> None:
    run = start(lane, level)
    train(run, lane, range(10), overflows=[4, 9])
    state = save(run)
    assert state["xamp"]["steps"] == {"applied": 8, "skipped": 2}
    assert xamp.session(run.optimizer).stats.skipped == 2, "saving took nothing away"
    train(run, lane, range(10, 30), overflows=[11])
    resumed = start(lane, level, seed=2)
    load(resumed, state, order)
    train(resumed, lane, range(10, 30), overflows=[11])
    assert_same(everything(resumed), everything(run))


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("kind", ["torch", "torch_npu"])
def test_a_state_without_counts_leaves_those_that_wait(lane: Lane, kind: str) -> None:
    run = start(lane, "O1")
    train(run, lane, range(10), overflows=[4, 9])
    xamp.load_state_dict(xamp.state_dict(run.optimizer, format=kind), run.optimizer)
    stats = xamp.session(run.optimizer).stats
    assert (stats.applied, stats.skipped) == (8, 2)


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("before", [1, 20, COLLAPSE_RUN - 1])
def test_a_run_of_overflows_goes_on_over_a_resume_there(lane: Lane, before: int) -> None:
    run = on_the_floor(lane)
    iterate(run.model, run.optimizer, inputs(1, lane)[0])
    overflow(run, lane, before)
    state = save(run)
    resumed = on_the_floor(lane)
    load(resumed, state)
    known = COLLAPSE_RUN + lag(lane)
    assert overflow(run, lane, known) == [known - before]
    assert overflow(resumed, lane, known) == [known - before]


@pytest.mark.usefixtures("late")
def test_a_collapse_that_is_about_to_be_raised_there(lane: Lane) -> None:
    run = on_the_floor(lane)
    iterate(run.model, run.optimizer, inputs(1, lane)[0])
    late = lag(lane)
    assert not overflow(run, lane, COLLAPSE_RUN + (late // 2 if late else -1))
    resumed = on_the_floor(lane)
    load(resumed, save(run))
    assert overflow(resumed, lane, COLLAPSE_RUN // 2), "raised late, but raised"


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("how", ["model", "xamp", "close"])
def test_weights_written_after_initialize_are_saved_before_the_first_step(lane: Lane, level: str, how: str) -> None:
    model = torch.nn.Linear(2, 2).to(lane.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    xamp.initialize(model, optimizer, level=level, verbosity=0)
    with torch.no_grad():
        model.weight.fill_(3.0)
    if how == "close":
        xamp.session(model).close()
        saved = model.weight
    else:
        saved = model.state_dict()["weight"] if how == "model" else xamp.state_dict(model)["masters"][0]["weight"]
    assert torch.equal(saved.cpu(), torch.full((2, 2), 3.0))


def test_a_frozen_parameter_that_is_written_to_is_saved_as_written(lane: Lane) -> None:
    if "O2" not in lane.can.levels:
        pytest.skip(f"{lane} cannot run O2")
    first = torch.nn.Linear(2, 2)
    model = torch.nn.Sequential(first, torch.nn.Linear(2, 1)).to(lane.device)
    first.requires_grad_(False)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    xamp.initialize(model, optimizer, level="O2", verbosity=0)
    with xamp.scale_loss(model(torch.ones(1, 2, device=lane.device)).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    with torch.no_grad():
        first.weight.fill_(0.5)  # a teacher's weights, averaged by hand
    assert torch.equal(model.state_dict()["0.weight"].cpu(), torch.full((2, 2), 0.5))
