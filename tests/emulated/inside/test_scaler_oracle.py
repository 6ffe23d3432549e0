"""torch_npu's GradScaler, xamp.GradScaler and xamp.initialize on the same gradients: scales, skips, growth, weights.

Covers: xamp.sessions.grad_scaler, xamp.scaling.scale.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

import xamp
from xamp.contract import Backend

NPU = torch.device("npu", 0)
OPTIONS: dict[str, Any] = {"init_scale": 1024.0, "growth_interval": 2}
RUNS = {
    "clean": [0, 0, 0, 0, 0],
    "one overflow": [0, 0, 1, 0, 0, 0, 0],
    "at once": [1, 1, 0, 0, 0],
    "before growth": [0, 1, 0, 1, 0, 0],
}

Course = tuple[list[float], list[bool], torch.Tensor]


class Weights(nn.Module):
    """Its loss has the gradient that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1.0, 1.0, 9))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.weight * gradient).sum()


def gradient(step: int) -> torch.Tensor:
    return torch.randn(9, generator=torch.Generator().manual_seed(step)).to(NPU)


def by_scaler(scaler: Any, overflows: list[int], backend: Backend) -> Course:
    model = Weights().to(NPU)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.9)
    scales, moved = [], []
    for step, overflow in enumerate(overflows):
        optimizer.zero_grad()
        before = model.weight.detach().clone()
        scaler.scale(model(gradient(step))).backward()
        if overflow:
            backend.make_overflow_(model.weight.grad)  # type: ignore[arg-type]
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        moved.append(not torch.equal(before, model.weight))
    return scales, moved, model.weight.detach().cpu()


def by_initialize(overflows: list[int], backend: Backend) -> Course:
    model = Weights().to(NPU)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.9)
    # O0 keeps the loss fp32, as in the loops by hand.
    xamp.initialize(model, optimizer, "O0", loss_scale="dynamic", verbosity=0, **OPTIONS)
    scales, moved = [], []
    for step, overflow in enumerate(overflows):
        optimizer.zero_grad()
        before = model.weight.detach().clone()
        with xamp.scale_loss(model(gradient(step)), optimizer) as scaled:
            scaled.backward()
            if overflow:
                backend.make_overflow_(model.weight.grad)  # type: ignore[arg-type]
        optimizer.step()
        scales.append(xamp.loss_scale(optimizer))
        moved.append(not torch.equal(before, model.weight))
        assert (xamp.session(optimizer).last_step is xamp.StepOutcome.APPLIED) == moved[-1]
    return scales, moved, model.weight.detach().cpu()


def assert_same_course(found: Course, wanted: Course) -> None:
    assert found[:2] == wanted[:2]
    assert torch.equal(found[2], wanted[2])


@pytest.mark.parametrize("run", RUNS)
def test_the_three_take_the_same_course(run: str, backend: Backend) -> None:
    overflows = RUNS[run]
    theirs = by_scaler(sys.modules["torch_npu"].npu.amp.GradScaler(**OPTIONS), overflows, backend)
    assert theirs[1] == [not overflow for overflow in overflows]
    scale, clean, wanted = 1024.0, 0, []
    for overflow in overflows:
        clean = 0 if overflow else clean + 1
        scale *= 0.5 if overflow else 2.0 if clean == 2 else 1.0
        clean %= 2
        wanted.append(scale)
    assert theirs[0] == wanted
    assert_same_course(by_scaler(xamp.GradScaler(**OPTIONS), overflows, backend), theirs)
    assert_same_course(by_initialize(overflows, backend), theirs)


def test_a_static_scale_of_torch_npu_is_a_static_scale_here(backend: Backend) -> None:
    scaler = sys.modules["torch_npu"].npu.amp.GradScaler(init_scale=128.0, dynamic=False)
    theirs = by_scaler(scaler, [0, 0, 0], backend)
    model = Weights().to(NPU)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.9)
    xamp.initialize(model, optimizer, "O0", loss_scale=128, verbosity=0)
    for step in range(3):
        optimizer.zero_grad()
        with xamp.scale_loss(model(gradient(step)), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    assert theirs[0] == [128.0] * 3
    assert torch.equal(model.weight.detach().cpu(), theirs[2])


def their_state(**changes: Any) -> dict[str, Any]:
    scaler = sys.modules["torch_npu"].npu.amp.GradScaler(init_scale=256.0, growth_interval=7, **changes)
    state: dict[str, Any] = scaler.state_dict()
    return state


def test_the_state_of_torch_npus_scaler_is_read() -> None:
    mine = xamp.GradScaler()
    mine.load_state_dict(their_state())
    assert (mine.get_scale(), mine.get_growth_interval()) == (256.0, 7)
    model = Weights().to(NPU)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    xamp.initialize(model, optimizer, "O1", verbosity=0)
    xamp.load_state_dict(their_state(), optimizer)
    assert xamp.loss_scale(optimizer) == 256.0


def test_a_state_written_for_torch_npus_scaler_loads_there(backend: Backend) -> None:
    model = Weights().to(NPU)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    xamp.initialize(model, optimizer, "O1", init_scale=512.0, growth_interval=3, verbosity=0)
    for step in range(2):
        with xamp.scale_loss(model(gradient(step)), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    theirs = sys.modules["torch_npu"].npu.amp.GradScaler()
    theirs.load_state_dict(xamp.state_dict(optimizer, format="torch_npu"))
    assert (theirs.get_scale(), theirs.get_growth_interval()) == (512.0, 3)
    assert theirs.state_dict()["_growth_tracker"] == 2
    assert theirs.state_dict()["dynamic"] is True
    scales, moved, _ = by_scaler(theirs, [0, 1], backend)
    assert (scales, moved) == ([1024.0, 512.0], [True, False]), "the third clean update in a row, then an overflow"
