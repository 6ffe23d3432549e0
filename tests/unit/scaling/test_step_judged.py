"""How steps are counted and judged: whose flag, which scale, late numbers, steps that raise when they are done.

Covers: xamp.scaling.outcomes, xamp.scaling.counts, xamp.scaling.step.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import pytest
import torch
from late_history import LateHistory
from stepping import Dot, at
from torch.optim import SGD, Adam

import xamp
from xamp.errors import LossScaleCollapsed
from xamp.scaling.counts import COLLAPSE_RUN
from xamp.scaling.scale import DeviceState
from xamp.scaling.step import OptimizerState
from xamp.sessions import checkpoint
from xamp.values.late_reads import HISTORY_LAG

ONES = torch.ones(7)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xamp.scaling.outcomes.History", LateHistory)


def start(level: str = "O1", make: Any = SGD, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Dot()
    optimizer = make(model.parameters(), lr=0.125, **({"momentum": 0.5} if make is SGD else {}))
    xamp.initialize(model, optimizer, **{"init_scale": 64.0, **at(level), **options})
    return model, optimizer


def backward(model: Any, optimizer: Any, *, overflow: bool = False, **options: Any) -> None:
    with xamp.scale_loss(model(ONES), optimizer, **options) as scaled:
        scaled.backward()
        if overflow:
            model.a.grad[0] = torch.inf


def iterate(model: Any, optimizer: Any, *, overflow: bool = False, **options: Any) -> None:
    optimizer.zero_grad()
    backward(model, optimizer, overflow=overflow, **options)
    optimizer.step()


def counts(optimizer: Any) -> tuple[int, int]:
    found = xamp.session(optimizer).stats
    return found.applied, found.skipped


def run_of(optimizer: Any) -> int:
    found: int = xamp.state_dict(optimizer)["optimizers"][0]["overflow_run"]
    return found


# ---------------------------------------------------------------- whose flag, which scale


def test_each_optimizer_has_a_flag_of_its_own() -> None:
    models = [Dot(), Dot()]
    optimizers: list[Any] = [SGD(m.parameters(), lr=0.125, momentum=0.5) for m in models]
    xamp.initialize(models, optimizers, "O1", init_scale=64.0, fused=False, verbosity=0)
    for spoilt in (1, 0):
        for index, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            backward(model, optimizer, overflow=index == spoilt)
        for optimizer in optimizers:
            optimizer.step()
        found = [xamp.session(optimizer).last_step.name for optimizer in optimizers]  # type: ignore[union-attr]
        assert found == ["SKIPPED" if index == spoilt else "APPLIED" for index in range(2)]
    assert counts(optimizers[0]) == (2, 2)


def test_an_overflow_tells_the_scale_of_its_own_loss(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = start(num_losses=2, fused=False, verbosity=1)
    with caplog.at_level(logging.INFO, logger="xamp"):
        caplog.clear()
        iterate(model, optimizer)
        iterate(model, optimizer, overflow=True, loss_id=1)
        iterate(model, optimizer, overflow=True, loss_id=1)
    assert [r.getMessage().rpartition(" ")[2] for r in caplog.records] == ["32", "16"]


def test_a_loss_collapses_while_the_scale_of_another_is_high() -> None:
    model, optimizer = start(num_losses=2, init_scale=1.0, growth_interval=1, fused=False)
    for _ in range(3):
        iterate(model, optimizer)
    for _ in range(COLLAPSE_RUN - 1):
        iterate(model, optimizer, overflow=True, loss_id=1)
    with pytest.raises(LossScaleCollapsed, match="50 overflows in a row with the loss scale 1, at its floor"):
        iterate(model, optimizer, overflow=True, loss_id=1)
    assert [xamp.loss_scale(optimizer, i) for i in range(2)] == [8.0, 1.0]


@pytest.mark.parametrize("all_of_them", [True, False])
def test_a_collapse_says_whether_all_gradients_are_not_finite(all_of_them: bool) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=0.125)
    xamp.initialize(model, optimizer, "O1", init_scale=1.0, min_loss_scale=1.0, verbosity=0)

    def iterate_once() -> None:
        optimizer.zero_grad()
        loss = model.weight.sum() * float("inf") + model.bias.sum() * (float("inf") if all_of_them else 1.0)
        with xamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()

    for _ in range(COLLAPSE_RUN - 1):
        iterate_once()
    with pytest.raises(LossScaleCollapsed) as raised:
        iterate_once()
    assert ("These are all there are" in str(raised.value)) == all_of_them
    assert "weight" in str(raised.value)


def test_a_scale_that_grew_since_the_last_overflow_is_not_at_its_floor() -> None:
    model, optimizer = start(init_scale=1.0, growth_interval=1, fused=False)
    iterate(model, optimizer, overflow=True)
    iterate(model, optimizer)
    for _ in range(COLLAPSE_RUN):  # the first of these halves the scale, and is none of the run
        iterate(model, optimizer, overflow=True)
    with pytest.raises(LossScaleCollapsed):
        iterate(model, optimizer, overflow=True)


@pytest.mark.parametrize(("scale", "collapses"), [(1.0, True), (64.0, False)])
def test_a_loaded_run_goes_on_only_at_the_floor(scale: float, collapses: bool) -> None:
    model, optimizer = start(fused=False)
    state = xamp.state_dict(optimizer)
    state["scalers"][0]["scale"] = scale
    state["optimizers"][0]["overflow_run"] = COLLAPSE_RUN - 1
    xamp.load_state_dict(state, optimizer)
    raised = False
    try:
        iterate(model, optimizer, overflow=True)
    except LossScaleCollapsed:
        raised = True
    assert raised == collapses


@pytest.mark.parametrize(("count", "late", "collapses"), [(1, False, True), (1, True, True), (2, False, False)])
def test_a_loaded_run_goes_on_only_for_as_many_optimizers(count: int, late: bool, collapses: bool) -> None:
    """Where they come ``late``, after the load, it goes on too."""
    _, optimizer = start(fused=False, init_scale=1.0)
    state = xamp.state_dict(optimizer)
    state["optimizers"][0]["overflow_run"] = COLLAPSE_RUN - 1
    models = [Dot() for _ in range(count)]
    optimizers = [SGD(model.parameters(), lr=0.125) for model in models]
    told: dict[str, Any] = {"level": "O1", "init_scale": 1.0, "fused": False, "verbosity": 0}
    if late:
        xamp.initialize(models, **told)
        xamp.load_state_dict(state, models[0])
    xamp.initialize(models, optimizers, **told)
    if not late:
        xamp.load_state_dict(state, models[0])
    with pytest.raises(LossScaleCollapsed) if collapses else contextlib.nullcontext():
        iterate(models[0], optimizers[0], overflow=True)


def test_a_grad_scaler_that_never_backs_off_collapses_wherever_it_stands() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = SGD([weight], lr=0.125)
    scaler = xamp.GradScaler(init_scale=64.0)
    scaler.set_backoff_factor(1.0)
    for count in range(COLLAPSE_RUN):
        optimizer.zero_grad()
        scaler.scale(weight.sum()).backward()
        weight.grad.fill_(torch.inf)  # type: ignore[union-attr]
        if count == COLLAPSE_RUN - 1:
            with pytest.raises(LossScaleCollapsed):
                scaler.step(optimizer)
        else:
            scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 64.0


def test_updates_between_two_steps_stay_within_the_bounds() -> None:
    """What the host knows of the scale after a step of one optimizer holds for as many updates as it says."""
    models = [Dot(), Dot()]
    optimizers = [SGD(model.parameters(), lr=0.125) for model in models]
    options: Any = {"init_scale": 16.0, "growth_interval": 1, "max_loss_scale": 128.0, "verbosity": 0}
    xamp.initialize(models, optimizers, "O1", fused=False, **options)
    iterate(models[0], optimizers[0])
    found = []
    for _ in range(4):
        iterate(models[1], optimizers[1])
        found.append(xamp.loss_scale(optimizers[0]))
    assert found == [64.0, 128.0, 128.0, 128.0]


# ---------------------------------------------------------------- late numbers


@pytest.mark.usefixtures("late")
def test_a_step_that_the_host_decides_comes_after_those_that_wait() -> None:
    """A clean step of the host ends a run; overflows before it must not be counted with those after."""
    model, optimizer = start(init_scale=1.0, growth_interval=1000)
    iterate(model, optimizer)
    for _ in range(COLLAPSE_RUN - 1):
        iterate(model, optimizer, overflow=True)
    optimizer.state.clear()  # so the host decides on the next
    iterate(model, optimizer)
    assert counts(optimizer) == (2, COLLAPSE_RUN - 1)
    raised = []
    for step in range(1, COLLAPSE_RUN + HISTORY_LAG + 2):
        try:
            iterate(model, optimizer, overflow=True)
        except LossScaleCollapsed:
            raised.append(step)
    assert raised == [COLLAPSE_RUN + HISTORY_LAG]


@pytest.mark.usefixtures("late")
def test_saving_counts_no_overflow_twice() -> None:
    model, optimizer = start(init_scale=1.0)
    iterate(model, optimizer)
    for _ in range(3):
        iterate(model, optimizer, overflow=True)
    assert [run_of(optimizer) for _ in range(2)] == [3, 3]
    for _ in range(COLLAPSE_RUN - 3):
        iterate(model, optimizer, overflow=True)
    assert run_of(optimizer) == COLLAPSE_RUN - 1, "the next overflow is to raise"


@pytest.mark.usefixtures("late")
def test_steps_that_wait_are_none_of_a_loaded_run() -> None:
    model, optimizer = start(init_scale=1.0)
    state = xamp.state_dict(optimizer)
    state["steps"] = {"applied": 10, "skipped": 0}
    iterate(model, optimizer)
    assert counts(optimizer) == (1, 0), "this step was seen; the next ones wait"
    (of_optimizer,) = xamp.session(optimizer).engine.states
    assert of_optimizer.outcomes.newest() is not None
    for _ in range(3):
        iterate(model, optimizer, overflow=True)
    xamp.load_state_dict(state, optimizer)
    assert of_optimizer.outcomes.newest() is None
    assert counts(optimizer) == (10, 0)
    assert run_of(optimizer) == 0
    assert xamp.session(optimizer).metrics()["steps_skipped"] == 0


@pytest.mark.usefixtures("late")
def test_a_load_that_fails_loses_no_step_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = start(init_scale=1.0)
    state = xamp.state_dict(optimizer)
    iterate(model, optimizer)
    for _ in range(3):
        iterate(model, optimizer, overflow=True)
    optimizer.zero_grad()
    backward(model, optimizer, overflow=True)
    before = counts(optimizer), run_of(optimizer)
    engine = xamp.session(optimizer).engine

    with monkeypatch.context() as patched:
        patched.setattr(OptimizerState, "resume", _resumed_and_failed(OptimizerState.resume))
        with pytest.raises(MemoryError):
            checkpoint.load(engine, state)
    assert (counts(optimizer), run_of(optimizer)) == before
    optimizer.step()
    assert xamp.session(optimizer).last_step is xamp.StepOutcome.SKIPPED


def _resumed_and_failed(resume: Any) -> Any:
    def resumed(self: Any, run: int) -> None:
        resume(self, run)
        raise MemoryError

    return resumed


def test_a_load_that_fails_keeps_the_run_of_overflows(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = start(init_scale=1.0, fused=False)
    state = xamp.state_dict(optimizer)
    for _ in range(COLLAPSE_RUN - 1):
        iterate(model, optimizer, overflow=True)
    with monkeypatch.context() as patched:
        patched.setattr(OptimizerState, "resume", _resumed_and_failed(OptimizerState.resume))
        with pytest.raises(MemoryError):
            xamp.load_state_dict(state, optimizer)
    with pytest.raises(LossScaleCollapsed):
        iterate(model, optimizer, overflow=True)


def test_records_are_read_in_order_and_forgotten() -> None:
    history = LateHistory(DeviceState(1, 1, torch.device("cpu")).values)
    for note in range(3):
        assert list(history.push(note)) == []
    assert [note for note, _ in history.peek()] == [0, 1, 2]
    history._waiting[1] = (*history._waiting[1][:2], _NotYet())
    assert [note for note, _ in history.arrived()] == [0], "those after it wait for it"
    history.forget()
    assert history.waiting == 0


class _NotYet:
    def query(self) -> bool:
        return False


# ---------------------------------------------------------------- steps that raise when they are done


def _post_hook(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("fused", [False, "auto"])
@pytest.mark.parametrize("make", [SGD, Adam])
def test_a_step_whose_hook_raises_is_not_counted_and_the_model_follows(
    level: str, fused: str | bool, make: Any
) -> None:
    model, optimizer = start(level, make, fused=fused)
    iterate(model, optimizer)
    handle = optimizer.register_step_post_hook(_post_hook)
    with pytest.raises(KeyboardInterrupt):
        iterate(model, optimizer)
    handle.remove()
    assert counts(optimizer) == (1, 0)
    for param, master in zip(model.parameters(), xamp.master_params(optimizer), strict=True):
        assert torch.equal(param.detach(), master.detach().to(param.dtype))
    assert "found_inf" not in vars(optimizer)
    iterate(model, optimizer)
    assert counts(optimizer) == (2, 0)


@pytest.mark.parametrize("level", ["O1", "O5"])
def test_the_first_step_runs_in_the_form_that_the_user_left(level: str) -> None:
    """A fused kernel makes moments of what memory holds where a first step is skipped."""
    model, optimizer = start(level, Adam)
    found: list[Any] = []
    optimizer.register_step_pre_hook(lambda *_: found.append(optimizer.param_groups[0]["fused"]))
    for _ in range(2):
        iterate(model, optimizer)
    assert found == [None, True]


# ---------------------------------------------------------------- what is told and passed on


def test_an_overflow_is_told_at_verbosity_1_only(caplog: pytest.LogCaptureFixture) -> None:
    for verbosity in (0, 1):
        model, optimizer = start(verbosity=verbosity)
        with caplog.at_level(logging.INFO, logger="xamp"):
            caplog.clear()
            iterate(model, optimizer, overflow=True)
        assert len(caplog.records) == verbosity


def test_the_form_of_an_sgd_without_momentum() -> None:
    """It keeps no state, so the device decides from its first step on."""
    model = Dot()
    optimizer = SGD(model.parameters(), lr=0.125)
    xamp.initialize(model, optimizer, "O1", init_scale=64.0, verbosity=0)
    found: list[Any] = []
    optimizer.register_step_pre_hook(lambda *_: found.append(optimizer.param_groups[0]["fused"]))
    iterate(model, optimizer)
    assert found == [True]


def test_the_users_own_grad_scale_is_passed_on() -> None:
    """Some set it for gradients that they have scaled themselves."""
    model, optimizer = start()
    iterate(model, optimizer)
    found: list[Any] = []
    optimizer.grad_scale = torch.full((), 2.0)
    optimizer.register_step_pre_hook(lambda *_: found.append(optimizer.grad_scale))
    iterate(model, optimizer)
    assert [float(scale) for scale in found] == [2.0]


class RaisesWhenDone(SGD):
    """Somebody's optimizer, interrupted between its last parameter and its end."""

    raises = False

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    param -= 0.5 * param.grad
        if self.raises:
            raise KeyboardInterrupt


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_what_a_step_moved_before_it_raised_stays(level: str) -> None:
    model = Dot()
    optimizer: Any = RaisesWhenDone(model.parameters(), lr=0.125)
    xamp.initialize(model, optimizer, level, init_scale=64.0, verbosity=0)
    iterate(model, optimizer)
    before = [master.detach().clone() for master in xamp.master_params(optimizer)]
    optimizer.raises = True
    with pytest.raises(KeyboardInterrupt):
        iterate(model, optimizer)
    assert counts(optimizer) == (1, 0)
    for param, master, old in zip(model.parameters(), xamp.master_params(optimizer), before, strict=True):
        assert torch.equal(master.detach(), old - 0.5)  # the gradient is one
        assert torch.equal(param.detach(), master.detach().to(param.dtype))
