"""GradScaler beyond torch's: floor and ceiling, the end of a run that no scale cures, what became of a step.

Covers: xamp.sessions.grad_scaler, xamp.scaling.scale, xamp.scaling.counts.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from lanes import Lane, needs_values, steps_late
from scaler_comparison import FORMS, data, net
from torch import nn
from torch.optim import SGD, Adam, Optimizer

import xamp
from xamp.errors import LossScaleCollapsed, PolicyError

LARGEST = torch.finfo(torch.float32).max


class Loop:
    """One weight per optimizer, and an iteration in which some of them overflow."""

    def __init__(self, scaler: Any, lane: Lane, count: int = 1, fused: bool | None = None) -> None:
        self.scaler = scaler
        self.lane = lane
        self.weights = [nn.Parameter(torch.ones(2, device=lane.device)) for _ in range(count)]
        self.optimizers: list[Optimizer] = [Adam([w], lr=0.125, fused=fused) for w in self.weights]

    def __call__(self, overflows: tuple[int, ...] = ()) -> float:
        """The scale afterwards."""
        self.backward(overflows)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        return float(self.scaler.get_scale())

    def backward(self, overflows: tuple[int, ...] = ()) -> None:
        for index, (weight, optimizer) in enumerate(zip(self.weights, self.optimizers, strict=True)):
            optimizer.zero_grad()
            self.scaler.scale(weight.sum()).backward()
            if index in overflows:
                assert weight.grad is not None
                self.lane.overflow_(weight.grad)


FINE, BAD = "fine", "overflow"
SEQUENCES: dict[str, tuple[dict[str, Any], list[tuple[Any, float | None]], dict[str, Any]]] = {
    "it stops at one": ({"init_scale": 4.0}, [(BAD, 2.0), (BAD, 1.0), (BAD, 1.0), (BAD, 1.0)], {}),
    "it is asked before and after": (
        {"init_scale": 8.0, "growth_interval": 1},
        [(FINE, 16.0), (FINE, 32.0), (BAD, 16.0), (BAD, 8.0), (FINE, 16.0), (FINE, 32.0)],
        {},
    ),
    "a floor that is set holds from then on": (
        {"init_scale": 64.0},
        [
            *[(("min_loss_scale", 16), 64.0), (BAD, 32.0), (BAD, 16.0), (BAD, 16.0), (("min_loss_scale", 0.25), 16.0)],
            *((BAD, scale) for scale in (8.0, 4.0, 2.0, 1.0, 0.5, 0.25, 0.25)),
            *[(("min_loss_scale", 2.0), None), (FINE, 2.0)],
        ],
        {},
    ),
    "a start below the floor is the floor": (
        {"init_scale": 0.25, "growth_interval": 2},
        [(BAD, 0.25), (FINE, 0.25), (FINE, 0.5), (BAD, 0.25), (BAD, 0.25)],
        {},
    ),
    **{
        f"{value!r} is below the floor and lowers it": (
            {"init_scale": 8.0},
            [(FINE, 8.0), (("update", value), 0.5), (FINE, 0.5), (BAD, 0.5)],
            {"min_loss_scale": 0.5},
        )
        for value in (0.5, torch.tensor(0.5), torch.tensor([0.5]))
    },
    **{
        f"it may be set to {value!r}": (
            {"init_scale": 8.0},
            [(FINE, 8.0), (("update", value), 640.0)],
            {"_get_growth_tracker": 1},
        )
        for value in (640.0, 640, "640", torch.tensor(640), torch.tensor([[640.0]]))
    },
    "a ceiling that is set": (
        {"init_scale": 64.0, "growth_interval": 1},
        [
            *[(("max_loss_scale", 200.0), 64.0), (FINE, 128.0), (FINE, 200.0), (FINE, 200.0)],
            *[(("max_loss_scale", 32.0), None), (FINE, 32.0), (FINE, 32.0), (("update", 1024.0), 32.0)],
        ],
        {"min_loss_scale": 1.0, "max_loss_scale": 32.0},
    ),
    "what is set counts at the next update": (
        {"init_scale": 8.0},
        [
            *[(("set_growth_interval", 1), 8.0), (("set_growth_factor", 4), 8.0), (FINE, 32.0)],
            *[(("set_growth_factor", 1), 32.0), (FINE, 32.0), (FINE, 32.0), (("set_backoff_factor", 0.25), 32.0)],
            (BAD, 8.0),
        ],
        {"get_growth_factor": 1.0, "get_backoff_factor": 0.25, "get_growth_interval": 1},
    ),
}
"""Of each: arguments, what is done with the scale that it is then (None: nobody asks), and what is there at the end."""


@pytest.mark.parametrize("name", SEQUENCES)
def test_where_the_scale_goes(name: str, lane: Lane) -> None:
    options, steps, end = SEQUENCES[name]
    scaler: Any = xamp.GradScaler(**options)
    loop = Loop(scaler, lane)
    for index, (step, wanted) in enumerate(steps):
        if isinstance(step, str):
            assert loop((0,) if step == BAD else ()) == wanted, index
            continue
        called, value = step
        given = value.to(lane.device) if isinstance(value, torch.Tensor) else value
        if callable(getattr(scaler, called)):
            getattr(scaler, called)(given)
        else:
            setattr(scaler, called, given)
        assert wanted is None or scaler.get_scale() == wanted, index
    for attribute, value in end.items():
        found = getattr(scaler, attribute)
        assert (found() if callable(found) else found) == value, attribute


@pytest.mark.parametrize("exponent", [-149, -140, -126])
def test_a_loaded_scale_whose_inverse_is_inf_in_fp32_becomes_the_smallest_that_works(lane: Lane, exponent: int) -> None:
    """A collapsed run of another GradScaler leaves such a state."""
    state = {**torch.amp.GradScaler("cpu").state_dict(), "scale": 2.0**exponent}
    scaler = xamp.GradScaler()
    scaler.load_state_dict(state)
    assert scaler.get_scale() == 2.0**-126
    loop = Loop(scaler, lane)
    loop.backward()
    scaler.unscale_(loop.optimizers[0])
    assert torch.equal(loop.weights[0].grad, torch.ones(2, device=lane.device))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "value",
    [0.0, -1.0, float("inf"), float("nan"), 1e39, 1e-40, True, "much", torch.ones(2), torch.tensor(float("nan"))],
)
def test_what_it_may_not_be_set_to(value: Any, lane: Lane) -> None:
    scaler = xamp.GradScaler(init_scale=8.0)
    loop = Loop(scaler, lane)
    loop.backward()
    scaler.step(loop.optimizers[0])
    with pytest.raises(PolicyError, match=r"GradScaler(\.update)?\(new_scale"):
        scaler.update(value)
    with pytest.raises(PolicyError, match="needs no gradient"):
        scaler.update(torch.ones((), requires_grad=True))
    assert scaler.get_scale() == 8.0
    scaler.update()
    assert scaler._get_growth_tracker() == 1, "the iteration went on"


def test_a_start_above_the_ceiling_is_the_ceiling(lane: Lane) -> None:
    scaler = xamp.GradScaler()
    scaler.max_loss_scale = 1024.0
    assert scaler.get_scale() == 1024.0
    assert float(scaler.scale(torch.ones((), device=lane.device))) == 1024.0
    scaler.load_state_dict({**xamp.GradScaler().state_dict(), "scale": 4096.0})
    assert scaler.get_scale() == 1024.0


def test_growth_never_makes_the_scale_inf(lane: Lane) -> None:
    scaler = xamp.GradScaler(init_scale=1e38, growth_interval=1)
    loop = Loop(scaler, lane)
    found = [loop() for _ in range(4)]
    if lane.can.overflow == "inf":
        assert found == pytest.approx([2e38] * 4, rel=1e-6)
    else:  # a number between the loss and the gradients overflows, which the chip's flag tells
        assert max(found) == pytest.approx(2e38, rel=1e-6)
        assert min(found) == pytest.approx(1e38, rel=1e-6)
    assert lane.can.overflow == "flag" or scaler.last_step.name == "APPLIED"
    assert all(bool(w.isfinite().all()) for w in loop.weights)


@pytest.mark.parametrize("fused", [None, True])
def test_fifty_overflows_in_a_row_at_the_floor_raise_and_every_fifty_after(fused: bool | None, lane: Lane) -> None:
    scaler = xamp.GradScaler(init_scale=2.0)
    loop = Loop(scaler, lane, fused=fused)
    assert loop() == 2.0
    loop((0,))  # at 2: a smaller scale is left to try
    raised = []
    for index in range(1, 126):
        loop.backward((0,))
        try:
            scaler.step(loop.optimizers[0])
        except LossScaleCollapsed as error:
            raised.append((index, str(error)))
        scaler.update()
    late = steps_late(lane, loop.optimizers[0])
    assert [index for index, _ in raised] == [50 + late, 100 + late]
    assert "50 overflows in a row with the loss scale 1, at its floor" in raised[0][1]
    named = "a parameter of shape (2,)" if lane.can.overflow == "inf" else "unknown, for this chip tells"
    assert f"Gradients that are not finite: {named}" in raised[0][1]
    assert scaler.stats.skipped == 126
    before = loop.weights[0].detach().clone()
    assert loop() == 1.0
    assert not torch.equal(loop.weights[0].detach(), before), "and training may go on"


def test_a_clean_step_and_a_scale_above_the_floor_start_the_count_again(lane: Lane) -> None:
    loop = Loop(xamp.GradScaler(init_scale=1.0), lane)
    for _ in range(3):
        for _ in range(49):
            loop((0,))
        loop()
    for _ in range(49):
        loop((0,))
    loop.scaler.update(4.0)
    loop((0,))  # at 4
    for _ in range(50):
        loop((0,))  # at 2, then 49 at the floor
    with pytest.raises(LossScaleCollapsed):
        loop((0,))


def test_of_several_optimizers_the_one_that_collapses_raises(lane: Lane) -> None:
    needs_values(lane)
    loop = Loop(xamp.GradScaler(init_scale=1.0), lane, count=2)
    for _ in range(49):
        loop((1,))
    loop.backward((1,))
    loop.scaler.step(loop.optimizers[0])
    with pytest.raises(LossScaleCollapsed):
        loop.scaler.step(loop.optimizers[1])
    loop.scaler.update()
    assert (loop.scaler.stats.applied, loop.scaler.stats.skipped) == (50, 50)


def test_what_the_last_step_did(lane: Lane) -> None:
    scaler: Any = xamp.GradScaler()
    assert [scaler.last_step] == [None]
    assert (scaler.stats.applied, scaler.stats.skipped) == (0, 0)
    loop = Loop(scaler, lane)
    loop((0,))
    assert scaler.last_step == xamp.StepOutcome("skipped")
    loop()
    assert scaler.last_step == xamp.StepOutcome("applied")
    two = Loop(scaler, lane, count=2)
    two((1,))
    names = {found: outcome.name for found, outcome in scaler.last_step.items()}
    # Where a flag tells of an overflow it does not say whose gradient it was, and both skip.
    first = "APPLIED" if lane.can.overflow == "inf" else "SKIPPED"
    assert names == dict(zip([*loop.optimizers, *two.optimizers], ["APPLIED", first, "SKIPPED"], strict=True))
    assert (scaler.stats.applied, scaler.stats.skipped) == ((2, 2) if first == "APPLIED" else (1, 3))


@pytest.mark.parametrize("form", ["SGD", "Adam-fused"])
@pytest.mark.parametrize("off", [False, 0, None, "False"])
def test_disabled_everything_passes_through(form: str, off: Any, lane: Lane) -> None:
    scaler = xamp.GradScaler(enabled=off)
    model, plain = net(device=lane.device), net(device=lane.device)
    plain.load_state_dict(model.state_dict())
    optimizer, reference = FORMS[form](model.parameters()), FORMS[form](plain.parameters())
    outputs = [torch.ones(2), {"any": "thing"}]
    assert scaler.scale(outputs) is outputs
    for index in range(3):
        for net_, opt in ((model, optimizer), (plain, reference)):
            opt.zero_grad()
            loss = net_(data(index, lane.device)).square().mean()
            (scaler.scale(loss) if net_ is model else loss).backward()
        scaler.unscale_(optimizer)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scaler.update(2.0)
        reference.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert scaler.state_dict() == {}
    scaler.load_state_dict({})
    assert scaler.get_scale() == 1.0
    assert not scaler.is_enabled()
    assert scaler._scale is None
    assert scaler.last_step is None
    assert scaler.step(SGD([nn.Parameter(torch.ones(1))], lr=1.0), lambda: 3.0) == 3.0, "closures too"
    assert xamp.GradScaler(growth_factor=1.0, enabled=False).get_scale() == 1.0, "it looks at nothing"
    assert all(xamp.GradScaler(enabled=on).is_enabled() for on in (True, 1, "true"))


@pytest.mark.parametrize(
    ("arguments", "text", "as_torch"),
    [
        ({"growth_factor": 1.0}, "GradScaler(growth_factor=1.0): must be a number above 1.", AssertionError),
        (
            {"backoff_factor": 1.0},
            "GradScaler(backoff_factor=1.0): must be a number above 0 and below 1.",
            AssertionError,
        ),
        ({"backoff_factor": 0}, "GradScaler(backoff_factor=0): must be a number above 0 and below 1.", ValueError),
        ({"growth_interval": 0}, "GradScaler(growth_interval=0): must be a whole number above 0", ValueError),
        ({"growth_interval": 1.5}, "GradScaler(growth_interval=1.5): must be a whole number", ValueError),
        ({"init_scale": 0}, "GradScaler(init_scale=0): must be a number above 1.17549e-38", ValueError),
        ({"init_scale": 1e300}, "GradScaler(init_scale=1e+300): must be a number above", ValueError),
        ({"init_scale": 1e-300}, "GradScaler(init_scale=1e-300): must be a number above", ValueError),
        ({"init_scale": "cuda"}, "GradScaler(init_scale='cuda'): must be a number.", ValueError),
        ({"enabled": "yes"}, "GradScaler(enabled='yes'): must be True or False.", ValueError),
    ],
)
def test_arguments_out_of_range(arguments: dict[str, Any], text: str, as_torch: type[Exception]) -> None:
    with pytest.raises(PolicyError, match=re.escape(text)) as caught:
        xamp.GradScaler(**arguments)
    assert isinstance(caught.value, as_torch)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("growth_factor", 0.0), ("growth_factor", float("inf")), ("backoff_factor", -0.5)],
        *[("growth_interval", 0), ("growth_interval", 2**31)],
        *(
            (f"{end}_loss_scale", value)
            for end in ("min", "max")
            for value in (0, None, float("inf"), float("nan"), "low")
        ),
    ],
)
def test_what_is_set_out_of_range(name: str, value: Any) -> None:
    scaler: Any = xamp.GradScaler()
    method = getattr(scaler, f"set_{name}", None)
    before = (scaler.min_loss_scale, scaler.max_loss_scale, scaler.state_dict())
    said = f"GradScaler({name}" if method is None else f"GradScaler.set_{name}(new_{name.partition('_')[2]}"
    with pytest.raises(PolicyError, match=re.escape(f"{said}={value!r}): must be a")):
        setattr(scaler, name, value) if method is None else method(value)
    assert (scaler.min_loss_scale, scaler.max_loss_scale, scaler.state_dict()) == before
    assert before[:2] == (1.0, LARGEST)
