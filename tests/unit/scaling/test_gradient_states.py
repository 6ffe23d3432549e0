"""Each cell of the table in :mod:`xamp.scaling.gradients`: what a call does in each state of the gradients.

The gradient of ``Dot`` is its input, so that every sum is known to the bit.

Covers: xamp.scaling.gradients.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import onepass_reference
import pytest
import torch
from stepping import Dot, at
from torch.optim import SGD

import xamp
from xamp.errors import StateError
from xamp.scaling import gradients
from xamp.scaling.gradients import State

FORMS = ("O1", "O2", "O2 in one pass")


@pytest.fixture(autouse=True)
def _reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference is in the place of the kernels of one pass."""
    onepass_reference.use(monkeypatch)


class Run:
    """A model, its optimizer, and the calls of the table."""

    def __init__(self, form: str) -> None:
        level, _, in_one_pass = form.partition(" ")
        self.model: Any = Dot()
        self.optimizer: Any = SGD(self.model.parameters(), lr=0.125)
        fused: Any = "one-pass" if in_one_pass else "auto"
        xamp.initialize(self.model, self.optimizer, init_scale=64.0, fused=fused, **at(level))
        self.has_masters = level == "O2"
        self.holds = bool(in_one_pass)  # gradients of one backward
        self.sum = 0.0  # what each element of the gradients is to be

    @property
    def gradients(self) -> Any:
        return self.optimizer._xamp.state.gradients

    @property
    def state(self) -> State:
        found: State = self.gradients.state
        return found

    def loss(self) -> torch.Tensor:
        loss: torch.Tensor = self.model(torch.ones(7))
        return loss

    def scale_loss(self, **options: Any) -> None:
        with xamp.scale_loss(self.loss(), self.optimizer, **options) as scaled:
            scaled.backward()
        self.sum += 1.0

    def delayed(self) -> None:
        self.scale_loss(delay_unscale=True)

    def raises(self, after_backward: bool = False) -> None:
        with contextlib.suppress(ZeroDivisionError), xamp.scale_loss(self.loss(), self.optimizer) as scaled:
            if after_backward:
                scaled.backward()
                self.sum *= self.has_masters
            raise ZeroDivisionError

    def raises_after(self) -> None:
        self.raises(after_backward=True)

    def without(self) -> None:
        self.loss().backward()

    def clip(self) -> None:
        xamp.clip_grad_norm_(self.optimizer, 1e9)

    def step(self) -> None:
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
        self.sum = 0.0

    def clear_model(self) -> None:
        self.model.zero_grad()
        self.sum = 0.0

    def load(self) -> None:
        xamp.load_state_dict(xamp.state_dict(self.optimizer), self.optimizer)

    def come_to(self, state: State) -> None:
        if state is State.SCALED:
            self.delayed()
        elif state is not State.CLEAR:
            self.scale_loss()
        if state is State.SPENT:
            self.step()
        assert self.state is state
        assert (self.gradients.held is not None) == (self.holds and state in (State.UNSCALED, State.SPENT))

    def values(self) -> list[torch.Tensor]:
        held = self.gradients.held
        factor = 1.0 if held is None else held.inverse
        return [grad.float() * factor for _, grad in self.gradients.present()]


AFTER_BACKWARD, WITH_MASTERS = "its body raises after backward()", "the same, where masters are all"
CALLS: dict[str, Callable[[Run], None]] = {
    "scale_loss": Run.scale_loss,
    "scale_loss(delay_unscale=True)": Run.delayed,
    "its body raises, no backward ran": Run.raises,
    AFTER_BACKWARD: Run.raises_after,
    "clip_grad_norm_": Run.clip,
    "optimizer.step()": Run.step,
    "optimizer.zero_grad()": Run.zero_grad,
    "model.zero_grad()": Run.clear_model,
    "xamp.load_state_dict": Run.load,
}


def table() -> dict[tuple[str, State], str]:
    """The cells, as the docstring has them: call and state -> what comes next."""
    text = gradients.__doc__ or ""
    _, *rows = re.findall(r"^    (.+?)  +(\S+) +(\S+) +(\S+) +(\S+)$", text, re.MULTILINE)
    return {(row[0], state): cell for row in rows for state, cell in zip(State, row[1:], strict=True)}


CELLS = [cell for cell in table() if cell[0] in CALLS]


def test_the_table_has_all_calls_and_states() -> None:
    rows = {call for call, _ in table()}
    assert rows == {*CALLS, WITH_MASTERS, "backward() without scale_loss"}
    assert len(table()) == len(State) * len(rows)


@pytest.mark.filterwarnings("ignore:.*finds no gradient:UserWarning")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("call", "state"), CELLS, ids=[f"{call}-{state.name}" for call, state in CELLS])
def test_a_cell(form: str, call: str, state: State) -> None:
    run = Run(form)
    wanted = table()[WITH_MASTERS if call == AFTER_BACKWARD and run.has_masters else call, state]
    run.come_to(state)
    before = [value.clone() for value in run.values()]
    if wanted == "error":
        with pytest.raises(StateError):
            CALLS[call](run)
        assert run.state is state
        assert all(map(torch.equal, run.values(), before))
        return
    CALLS[call](run)
    assert run.state.name == wanted
    if wanted == "UNSCALED":
        assert sum(float(value.sum()) for value in run.values()) == 7 * run.sum


@pytest.mark.parametrize("state", State)
def test_a_backward_without_scale_loss(state: State) -> None:
    """At O1 it adds to what is there. What did not come through ``scale_loss`` alone is refused at the step."""
    run = Run("O1")
    run.come_to(state)
    run.without()
    assert run.state.name == table()["backward() without scale_loss", state]


@pytest.mark.parametrize("state", [State.CLEAR, State.UNSCALED, State.SPENT])
def test_a_backward_without_scale_loss_is_on_the_model_where_there_are_masters(state: State) -> None:
    run = Run("O2")
    run.come_to(state)
    run.without()
    assert run.state.name == table()["backward() without scale_loss", state]
    for call in (run.clip, run.step) if state is State.UNSCALED else (run.step,):
        with pytest.raises(StateError):
            call()
