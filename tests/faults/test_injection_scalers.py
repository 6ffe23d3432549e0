"""A fault at any point of a call of ``xamp.GradScaler`` or ``xamp.apex``: training ends with the same weights.

As in ``test_injection.py``, but after a fault these users do what torch's and Apex's scripts do: they run the iteration
again, and look first whether the step was done.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from injection import KINDS, Fault
from torch import nn

import xamp
from xamp.apex import amp
from xamp.errors import StateError

EVERY = bool(os.environ.get("XAMP_EVERY_POINT"))
"""Set: each time that a line is reached is a point. Else, of each call and kind, a sample."""

STEPS = 3
X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
Y = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
FaultOf = Callable[[], Fault]


class Run:
    """A model with its optimizer, and one iteration in three parts, of which a fault may come into one."""

    def __init__(self, steps: int = 0) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.5)
        self.start()
        for _ in range(steps):
            self.iterate()

    def start(self) -> None:
        raise NotImplementedError

    def loss(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        found: torch.Tensor = nn.functional.mse_loss(self.model(X).float(), Y)
        return found

    def iterate(self) -> None:
        raise NotImplementedError

    def numbers(self) -> list[torch.Tensor]:
        """Everything that a run ends with."""
        moments = [v for state in self.optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
        stepped = [p for group in self.optimizer.param_groups for p in group["params"]]
        scale = torch.tensor(self.scale())
        return [tensor.detach().clone() for tensor in (*self.model.parameters(), *stepped, *moments, scale)]

    def scale(self) -> list[float]:
        """The loss scale, and the growth tracker."""
        raise NotImplementedError


class ScalerRun(Run):
    """``xamp.GradScaler`` over a model in fp32."""

    def start(self) -> None:
        self.scaler = xamp.GradScaler(init_scale=2.0**8, growth_interval=2)

    def iterate(self) -> None:
        self.scaler.scale(self.loss()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def done(self) -> int:
        stats = self.scaler.stats
        return stats.applied + stats.skipped

    def scale(self) -> list[float]:
        return [self.scaler.get_scale(), self.scaler.state_dict()["_growth_tracker"]]


class ApexRun(Run):
    """``xamp.apex.amp`` at O2."""

    def start(self) -> None:
        # With the scale that dynamic scales start at, gradients would overflow.
        self.model, self.optimizer = amp.initialize(
            self.model, self.optimizer, opt_level="O2", loss_scale=128.0, verbosity=0
        )

    def iterate(self) -> None:
        with amp.scale_loss(self.loss(), self.optimizer) as scaled:
            scaled.backward()
        self.optimizer.step()

    def scale(self) -> list[float]:
        return [128.0]


def finish(run: Run, reference: list[torch.Tensor]) -> None:
    for _ in range(STEPS):
        run.iterate()
    found = run.numbers()
    assert len(found) == len(reference)
    assert all(torch.equal(a, b) for a, b in zip(found, reference, strict=True)), "other numbers than undisturbed"
    assert torch.is_grad_enabled()


_references: dict[tuple[type[Run], int], list[torch.Tensor]] = {}


def reference(kind: type[Run], steps: int) -> list[torch.Tensor]:
    if (kind, steps) not in _references:
        run = kind(steps + STEPS)
        _references[kind, steps] = run.numbers()
    return _references[kind, steps]


def scaler_scale(fault: FaultOf) -> Fault:
    run = ScalerRun(1)
    loss = run.loss()
    with fault() as put_in:
        run.scaler.scale(loss)
    run.iterate()
    finish(run, reference(ScalerRun, 2))
    return put_in


def scaler_unscale(fault: FaultOf) -> Fault:
    run = ScalerRun(1)
    run.scaler.scale(run.loss()).backward()
    with fault() as put_in:
        run.scaler.unscale_(run.optimizer)
    if all(p.grad is None for p in run.model.parameters()):  # they were half unscaled, and dropped
        run.scaler.scale(run.loss()).backward()
    elif put_in.raised:
        with contextlib.suppress(StateError):  # it is done
            run.scaler.unscale_(run.optimizer)
    run.scaler.step(run.optimizer)
    run.scaler.update()
    finish(run, reference(ScalerRun, 2))
    return put_in


def scaler_step(fault: FaultOf) -> Fault:
    run = ScalerRun(1)
    before = run.done()
    run.scaler.scale(run.loss()).backward()
    with fault() as put_in:
        run.scaler.step(run.optimizer)
    assert run.done() - before in (0, 1)
    if run.done() == before:
        if all(p.grad is None for p in run.model.parameters()):
            run.scaler.scale(run.loss()).backward()
        run.scaler.step(run.optimizer)
    run.scaler.update()
    finish(run, reference(ScalerRun, 2))
    return put_in


def scaler_update(fault: FaultOf) -> Fault:
    run = ScalerRun(2)  # the next update but one makes the scale grow
    run.scaler.scale(run.loss()).backward()
    run.scaler.step(run.optimizer)
    with fault() as put_in:
        run.scaler.update()
    if put_in.raised:
        with contextlib.suppress(StateError):  # it is done
            run.scaler.update()
    finish(run, reference(ScalerRun, 3))
    return put_in


def apex_scale_loss(fault: FaultOf) -> Fault:
    run = ApexRun(1)
    loss = run.loss()
    with fault() as put_in, amp.scale_loss(loss, run.optimizer) as scaled:
        scaled.backward()
    if put_in.raised:
        with amp.scale_loss(run.loss(), run.optimizer) as scaled:
            scaled.backward()
    run.optimizer.step()
    finish(run, reference(ApexRun, 2))
    return put_in


def apex_step(fault: FaultOf) -> Fault:
    run = ApexRun(1)
    with amp.scale_loss(run.loss(), run.optimizer) as scaled:
        scaled.backward()
    before = xamp.session(run.optimizer).stats.applied
    with fault() as put_in:
        run.optimizer.step()
    if xamp.session(run.optimizer).stats.applied == before:
        run.optimizer.step()
    finish(run, reference(ApexRun, 2))
    return put_in


CASES: dict[str, Callable[[FaultOf], Fault]] = {
    each.__name__: each
    for each in (scaler_scale, scaler_unscale, scaler_step, scaler_update, apex_scale_loss, apex_step)
}


def damaged(name: str, kind: str, points: list[int]) -> list[str]:
    found = []
    for n in points:
        try:
            CASES[name](lambda n=n: Fault(kind, n))  # type: ignore[misc]
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
