"""``session(...).metrics()`` and ``GradScaler.metrics()``: plain numbers, the same names everywhere, no wait.

Covers: xamp.sessions.metrics, xamp.values.late_reads.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from lanes import Lane, needs_values, steps_late
from late_history import LateHistory
from stepping import inputs, iterate, run_backward, start
from torch import nn
from torch.optim import SGD

import xamp
from xamp.values.late_reads import HISTORY_LAG, LateNumber

NAMES = {"loss_scale", "steps_applied", "steps_skipped", "last_step_skipped", "grad_norm", "steps_late"}
LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]


@pytest.mark.parametrize("level", LEVELS)
def test_the_same_names_and_plain_numbers_at_every_level(level: str, lane: Lane) -> None:
    model, optimizer = start(lane, level)
    scaler = xamp.GradScaler()
    for found in (xamp.session(model).metrics(), xamp.session(optimizer).metrics(), scaler.metrics()):
        assert set(found) == NAMES
        assert {type(value) for value in found.values()} <= {int, float}
        assert math.isnan(found["grad_norm"])
        assert found["steps_applied"] == found["steps_skipped"] == found["last_step_skipped"] == 0
    iterate(model, optimizer, inputs(1, lane)[0])
    found = xamp.session(model).metrics(wait=True)
    assert (found["steps_applied"], found["steps_skipped"], found["steps_late"]) == (1, 0, 0)
    assert found["loss_scale"] == xamp.loss_scale(optimizer)


@pytest.mark.parametrize("level", LEVELS)
def test_the_norm_is_that_of_the_unscaled_gradients_or_of_the_last_clipping(level: str, lane: Lane) -> None:
    model, optimizer = start(lane, level)
    x = inputs(1, lane)[0]
    run_backward(model(x), optimizer)
    grads = [p.grad.double() for p in xamp.master_params(optimizer) if p.grad is not None]
    wanted = float(torch.cat([g.flatten() for g in grads]).norm())
    found = xamp.session(optimizer).metrics(wait=True)["grad_norm"]
    assert found == pytest.approx(wanted, rel=1e-3 if level == "O3" else 1e-6)
    returned = float(xamp.clip_grad_norm_(optimizer, wanted / 4))
    assert xamp.session(model).metrics(wait=True)["grad_norm"] == returned == pytest.approx(wanted, rel=1e-3)
    optimizer.step()
    optimizer.zero_grad()
    assert xamp.session(model).metrics(wait=True)["grad_norm"] == returned


def test_scaled_gradients_have_no_norm_yet(lane: Lane) -> None:
    model, optimizer = start(lane, "O1")
    with xamp.scale_loss(model(inputs(1, lane)[0]), optimizer, delay_unscale=True) as scaled:
        scaled.backward()
        assert math.isnan(xamp.session(optimizer).metrics()["grad_norm"])
    assert math.isnan(xamp.session(optimizer).metrics()["grad_norm"])
    scaler = xamp.GradScaler(init_scale=64.0)
    plain = nn.Linear(2, 1).to(lane.device)
    other = SGD(plain.parameters(), lr=0.1)
    scaler.scale(plain(torch.ones(1, 2, device=lane.device)).sum()).backward()
    assert math.isnan(scaler.metrics()["grad_norm"])
    scaler.unscale_(other)
    assert scaler.metrics(wait=True)["grad_norm"] == pytest.approx(math.sqrt(3))
    norm = xamp.clip_grad_norm_(other, 0.5)
    assert scaler.metrics(wait=True)["grad_norm"] == float(norm)
    scaler.step(other)
    scaler.update()
    assert scaler.metrics(wait=True)["steps_applied"] == 1


def test_several_losses_and_several_optimizers(lane: Lane) -> None:
    needs_values(lane)
    models = [nn.Linear(2, 1, bias=False).to(lane.device) for _ in range(2)]
    made: Any = [SGD(model.parameters(), lr=0.1) for model in models]
    xamp.initialize(models, made, "O1", num_losses=2, init_scale=8.0, verbosity=0, fused=False)
    x = torch.ones(1, 2, device=lane.device)
    for index, factor in enumerate((1.0, float("inf"))):
        with xamp.scale_loss(models[index](x).sum() * factor, made[index], loss_id=index) as scaled:
            scaled.backward()
        made[index].step()
    found = xamp.session(models[0]).metrics(wait=True)
    assert (found["loss_scale"], found["loss_scale_1"], found["last_step_skipped"]) == (8.0, 4.0, 1)
    assert [xamp.session(one).metrics(wait=True)["last_step_skipped"] for one in made] == [0, 1]
    assert xamp.session(made[0]).metrics(wait=True)["grad_norm"] == pytest.approx(math.sqrt(2))


def test_a_disabled_session_and_a_disabled_scaler_have_them_too() -> None:
    model = nn.Linear(2, 1)
    xamp.initialize(model, SGD(model.parameters(), lr=0.1), enabled=False)
    for found in (xamp.session(model).metrics(), xamp.GradScaler(enabled=False).metrics()):
        assert set(found) == NAMES
        assert (found["loss_scale"], found["steps_applied"]) == (1.0, 0)


def late(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    monkeypatch.setattr("xamp.scaling.outcomes.History", LateHistory)
    model = nn.Linear(2, 1, bias=False)
    optimizer: Any = SGD(model.parameters(), lr=0.1, momentum=0.5)
    xamp.initialize(model, optimizer, "O1", init_scale=8.0, verbosity=0)
    return model, optimizer


def backward_and_step(model: Any, optimizer: Any, factor: float = 1.0) -> None:
    optimizer.zero_grad()
    with xamp.scale_loss(model(torch.ones(1, 2)).sum() * factor, optimizer) as scaled:
        scaled.backward()
    optimizer.step()


def test_records_that_have_not_arrived_are_late_and_counted_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = late(monkeypatch)
    backward_and_step(model, optimizer)  # decided on the host
    there = [True]
    monkeypatch.setattr("late_history._Arrived.query", lambda _: there[0])
    for factor in (1.0, float("inf"), 1.0):
        backward_and_step(model, optimizer, factor)
    found = xamp.session(model).metrics()
    assert (found["steps_applied"], found["steps_skipped"], found["steps_late"]) == (3, 1, 0)
    there[0] = False
    found = xamp.session(model).metrics()
    assert (found["steps_applied"], found["steps_skipped"], found["steps_late"]) == (1, 0, 3)
    found = xamp.session(model).metrics(wait=True)
    assert (found["steps_applied"], found["steps_skipped"], found["steps_late"]) == (3, 1, 0)
    assert xamp.session(model).stats.applied == 3, "and nothing was counted twice"


def test_a_late_number_is_the_newest_that_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []

    class Event:
        done = False

        def query(self) -> bool:
            return self.done

        def synchronize(self) -> None:
            self.done = True

    def copy(values: torch.Tensor) -> tuple[torch.Tensor, Event]:
        events.append(Event())
        return values.clone(), events[-1]

    class OnDevice:
        """A scalar tensor that says it is not in host memory."""

        is_cpu, device = False, torch.device("cpu")

        def __init__(self, value: float) -> None:
            self._value = torch.tensor(value)

        def detach(self) -> torch.Tensor:
            return self._value

    monkeypatch.setattr("xamp.values.late_reads.copies_without_waiting", lambda _: True)
    monkeypatch.setattr("xamp.values.late_reads.copy_without_waiting", copy)
    reader = LateNumber()
    read: Any = reader.read
    assert read(OnDevice(1.0)) == 1.0, "the first is waited for"
    assert read(OnDevice(2.0)) == 1.0
    assert read(OnDevice(3.0)) == 1.0
    events[1].done = True
    assert read(OnDevice(4.0)) == 2.0
    events[2].done = events[3].done = True
    assert read(OnDevice(5.0)) == 4.0
    for index in range(2 * HISTORY_LAG):
        newest = read(OnDevice(6.0 + index))
    assert newest == 6.0 + index - HISTORY_LAG, "and of too many the oldest"


def test_a_norm_is_waited_for_where_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of a device: nothing but the first number arrives without a wait."""

    class First(LateNumber):
        def read(self, number: torch.Tensor) -> float:
            self._known = float(number) if self._known is None else self._known
            return self._known

    monkeypatch.setattr("xamp.sessions.metrics.LateNumber", First)
    model = nn.Linear(2, 1, bias=False)
    optimizer: Any = SGD(model.parameters(), lr=0.1)
    xamp.initialize(model, optimizer, "O0", verbosity=0)
    told = []
    for factor in (1.0, 2.0, 4.0):
        model(torch.tensor([[3.0, 4.0]])).mul(factor).sum().backward()
        told += [xamp.session(model).metrics(wait=wait)["grad_norm"] for wait in (False, True)]
        optimizer.zero_grad()
    assert told == [5.0, 5.0, 5.0, 10.0, 5.0, 20.0]


# ---------------------------------------------------------------- the log


@pytest.mark.parametrize("fused", [None, True])
def test_a_grad_scaler_logs_the_new_scale_as_scale_loss_does(
    fused: bool | None, lane: Lane, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(2, 1).to(lane.device)
    optimizer = SGD(
        model.parameters(), lr=0.1, momentum=0.9, fused=fused
    )  # the card's fused implementation wants a momentum
    scaler = xamp.GradScaler(init_scale=256.0)
    needs_values(lane)
    told: list[tuple[int, str]] = []
    with caplog.at_level(logging.INFO, logger="xamp"):
        for index in range(3 + HISTORY_LAG):
            caplog.clear()
            optimizer.zero_grad()
            factor = float("inf") if index in (1, 2) else 1.0  # the host decides on the first step
            scaler.scale(model(torch.ones(1, 2, device=lane.device)).sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            told += [(index, record.getMessage()) for record in caplog.records]
    late = steps_late(lane, optimizer)
    said = "gradient overflow: step skipped, loss scale"
    assert told == [(1 + late, f"{said} 128"), (2 + late, f"{said} 64")]
    assert scaler.get_scale() == 64.0


def test_at_the_floor_and_with_a_scale_that_stays_the_log_says_what_stays(
    lane: Lane, caplog: pytest.LogCaptureFixture
) -> None:
    needs_values(lane)
    model, optimizer = start(lane, "O1")
    xamp.session(optimizer).close()
    plain = SGD(model.parameters(), lr=0.1)
    for scaler, wanted in ((xamp.GradScaler(init_scale=1.0), "1"), (xamp.GradScaler(init_scale=64.0), "64")):
        if wanted == "64":
            scaler.set_backoff_factor(1.0)
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="xamp"):
            plain.zero_grad()
            scaler.scale(model(inputs(1, lane)[0]) * float("inf")).backward()
            scaler.step(plain)
            scaler.update()
        assert [r.getMessage() for r in caplog.records] == [f"gradient overflow: step skipped, loss scale {wanted}"]
        assert scaler.get_scale() == float(wanted)


def _two(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], list[Any]]:
    """Two models, each with its optimizer, on one scale that grows at every second step, read late."""
    monkeypatch.setattr("xamp.scaling.outcomes.History", LateHistory)
    models = [nn.Linear(2, 1, bias=False) for _ in range(2)]
    optimizers: list[Any] = [SGD(model.parameters(), lr=0.1, momentum=0.5) for model in models]
    xamp.initialize(models, optimizers, "O1", init_scale=8.0, growth_interval=2, verbosity=0)
    monkeypatch.setattr("xamp.sessions.metrics._is_on_host", lambda _: False)
    return models, optimizers


def test_an_optimizer_that_rests_does_not_hold_the_scale_back(monkeypatch: pytest.MonkeyPatch) -> None:
    models, optimizers = _two(monkeypatch)
    for busy in (0, 1, 1, 1, 1, 0, 0, 0, 0):
        backward_and_step(models[busy], optimizers[busy])
        late, exact = (xamp.session(models[0]).metrics(wait=wait)["loss_scale"] for wait in (False, True))
        assert late == exact
    assert exact == 8.0 * 2**4


def test_a_scale_that_was_set_or_loaded_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xamp.scaling.outcomes.History", LateHistory)
    monkeypatch.setattr("xamp.sessions.metrics._is_on_host", lambda _: False)
    model = nn.Linear(2, 1, bias=False)
    optimizer: Any = SGD(model.parameters(), lr=0.1, momentum=0.5)
    scaler = xamp.GradScaler(init_scale=8.0)

    def train(factor: float = 1.0) -> float:
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 2)).sum() * factor).backward()
        scaler.step(optimizer)
        return scaler.metrics()["loss_scale"]

    for _ in range(3):
        train()
        scaler.update()
    saved = scaler.state_dict()
    train(float("inf"))
    scaler.update()
    assert scaler.metrics()["loss_scale"] == 4.0
    train()
    scaler.update(1024.0)
    assert scaler.metrics()["loss_scale"] == 1024.0
    assert train() == 1024.0
    scaler.update()
    train(float("inf"))
    scaler.update()
    assert scaler.metrics()["loss_scale"] == 512.0
    scaler.load_state_dict(saved)
    assert scaler.metrics()["loss_scale"] == 8.0


class _OneCallLate(LateNumber):
    """Numbers of a device that arrive by the next call."""

    def read(self, number: torch.Tensor) -> float:
        before, self._known = self._known, float(number)
        return self._known if before is None else before


def test_by_hand_the_scale_is_that_of_an_earlier_call_but_one_that_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xamp.sessions.metrics.LateNumber", _OneCallLate)
    weight = nn.Parameter(torch.ones(2))
    optimizer, scaler = SGD([weight], lr=0.1), xamp.GradScaler(init_scale=8.0)

    def train(factor: float, scale: float | None = None) -> float:
        scaler.scale(weight.sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update(scale)
        optimizer.zero_grad()
        return scaler.metrics()["loss_scale"]

    inf = float("inf")
    assert [train(1.0), train(inf), train(1.0), train(1.0, 1024.0), train(inf)] == [8.0, 8.0, 4.0, 1024.0, 1024.0]
    scaler.load_state_dict({**scaler.state_dict(), "scale": 64.0})
    assert scaler.metrics()["loss_scale"] == 64.0
    assert scaler.metrics(wait=True)["last_step_skipped"] == 1
