"""A fault at any point of a call of ``xamp.GradScaler`` or ``xamp.apex``.

As in ``test_injection.py`` training goes on as from the states that are taken after it. Of a scaler, as of torch's, the
user first ends the iteration with ``update()``, where it takes one.

Covers: xamp.sessions.grad_scaler, xamp.sessions.scaler_steps, xamp.apex._scale_loss, xamp.scaling.writing_mark.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from injection import KINDS, Fault, Training, go_on
from torch import nn

import xamp
from xamp.apex import amp
from xamp.errors import StateError

EVERY = bool(os.environ.get("XAMP_EVERY_POINT"))
"""Set: each time that a line is reached is a point. Else, of each call and kind, a sample."""

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
Y = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
FaultOf = Callable[[], Fault]


class Run(Training):
    """A model with its optimizer, under a scaler or under Apex."""

    def __init__(self, steps: int = 0) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.5)
        self.start()
        for _ in range(steps):
            self.window(1)
            self.step()

    def fresh(self) -> Run:
        return type(self)()

    def start(self) -> None:
        raise NotImplementedError

    def loss(self) -> torch.Tensor:
        found: torch.Tensor = nn.functional.mse_loss(self.model(X).float(), Y)
        return found


class ScalerRun(Run):
    """``xamp.GradScaler`` over a model in fp32."""

    def start(self) -> None:
        self.scaler = xamp.GradScaler(init_scale=2.0**8, growth_interval=2)

    def window(self, micro: int) -> None:
        self.optimizer.zero_grad()
        for _ in range(micro):
            self.scaler.scale(self.loss()).backward()

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def states(self) -> list[Any]:
        return [self.model.state_dict(), self.optimizer.state_dict(), self.scaler.state_dict()]

    def load(self, states: list[Any]) -> None:
        self.model.load_state_dict(states[0])
        self.optimizer.load_state_dict(states[1])
        self.scaler.load_state_dict(states[2])


class ApexRun(Run):
    """``xamp.apex.amp`` at O2."""

    def start(self) -> None:
        # With the scale that dynamic scales start at, gradients would overflow.
        self.model, self.optimizer = amp.initialize(
            self.model, self.optimizer, opt_level="O2", loss_scale=128.0, verbosity=0
        )

    def window(self, micro: int) -> None:
        self.optimizer.zero_grad()
        for _ in range(micro):
            with amp.scale_loss(self.loss(), self.optimizer) as scaled:
                scaled.backward()


def scaler_scale(fault: FaultOf) -> Fault:
    run = ScalerRun(1)
    return _of_scaler(run, fault, lambda: run.scaler.scale(X))


def scaler_unscale(fault: FaultOf) -> Fault:
    run = ScalerRun(1)
    run.window(1)
    return _of_scaler(run, fault, lambda: run.scaler.unscale_(run.optimizer))


def scaler_step(fault: FaultOf) -> Fault:
    run = ScalerRun(1)
    run.window(1)
    return _of_scaler(run, fault, lambda: run.scaler.step(run.optimizer))


def scaler_update(fault: FaultOf) -> Fault:
    run = ScalerRun(2)  # the next update but one makes the scale grow
    run.window(1)
    run.scaler.step(run.optimizer)
    return _of_scaler(run, fault, run.scaler.update)


def _of_scaler(run: ScalerRun, fault: FaultOf, call: Callable[[], object]) -> Fault:
    with fault() as put_in:
        call()
    with contextlib.suppress(StateError):  # nothing was checked, or all is done
        run.scaler.update()
    go_on(run)
    return put_in


def apex_scale_loss(fault: FaultOf) -> Fault:
    run = ApexRun(1)
    run.optimizer.zero_grad()
    loss = run.loss()
    with fault() as put_in, amp.scale_loss(loss, run.optimizer) as scaled:
        scaled.backward()
    go_on(run, put_in)
    return put_in


def apex_step(fault: FaultOf) -> Fault:
    run = ApexRun(1)
    run.window(1)
    with fault() as put_in:
        run.optimizer.step()
    go_on(run, put_in)
    return put_in


CASES: dict[str, Callable[[FaultOf], Fault]] = {
    each.__name__: each
    for each in (scaler_scale, scaler_unscale, scaler_step, scaler_update, apex_scale_loss, apex_step)
}


def damaged(name: str, kind: str, points: list[int]) -> list[str]:
    found = []
    for n in points:
        try:
            CASES[name](lambda n=n: Fault(kind, n, keeps=n % 2 == 1))  # type: ignore[misc]
        except Exception as error:
            torch.set_grad_enabled(True)
            found.append(f"{name}, {kind} {n}: {type(error).__name__}: {str(error)[:300]}")
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_fault_at_some_points_or_every_point(name: str) -> None:
    chosen = random.Random(name)
    total, found = 0, []
    for kind in KINDS:
        points = list(range(len(CASES[name](lambda kind=kind: Fault(kind)).seen)))  # type: ignore[misc]
        picked = points if EVERY else sorted(chosen.sample(points, min(4, len(points))))
        total += len(picked)
        found += damaged(name, kind, picked)
    print(f"{len(found)} damaged of {total} faults in {name}")
    assert found == []
