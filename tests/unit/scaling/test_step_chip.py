"""A chip that saturates: what its flag said of a backward whose unscaling waits is not lost when the next clears it.

Covers: xamp.scaling.overflow_flag.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from saturating_chip import SATURATING, SaturatingBackend
from stepping import SCALED, Dot, assert_same, at, outcome, picture
from torch.optim import SGD

import xamp
from xamp.registry import registry
from xamp.scaling.overflow_flag import FlagWatch, read_flag


@pytest.fixture
def chip(monkeypatch: pytest.MonkeyPatch) -> SaturatingBackend:
    """The backend that serves the CPU in this test."""
    monkeypatch.setattr(registry, "REGISTRY", registry.Registry((SATURATING,), group=None))
    found = registry.resolve("auto", "cpu")
    assert isinstance(found, SaturatingBackend)
    return found


def start(level: str, **options: Any) -> tuple[Any, Any]:
    model = Dot()
    optimizer = SGD(model.parameters(), lr=0.125, momentum=0.9)
    xamp.initialize(model, optimizer, init_scale=64.0, **at(level), **options)
    return model, optimizer


def backward(model: Any, optimizer: Any, chip: SaturatingBackend | None = None, **options: Any) -> None:
    with xamp.scale_loss(model(torch.ones(7)), optimizer, **options) as scaled:
        scaled.backward()
        if chip is not None:
            chip.make_overflow_(model.a.grad)


@pytest.mark.parametrize("level", SCALED)
@pytest.mark.parametrize("spoilt", [0, 1, 2])
@pytest.mark.parametrize("last_loss", [0, 1], ids=["same-scale", "another-scale"])
def test_an_overflow_under_delay_unscale_is_found(
    chip: SaturatingBackend, level: str, spoilt: int, last_loss: int
) -> None:
    model, optimizer = start(level, num_losses=2)
    still = picture(model, optimizer)
    for index in range(3):
        last = {"loss_id": last_loss} if index == 2 else {"delay_unscale": True}
        backward(model, optimizer, chip if index == spoilt else None, **last)
    optimizer.step()
    assert outcome(optimizer) == "SKIPPED"
    assert_same(picture(model, optimizer), still)
    assert xamp.loss_scale(optimizer, last_loss) == 32.0
    optimizer.zero_grad()
    backward(model, optimizer, delay_unscale=True)
    backward(model, optimizer)
    optimizer.step()
    assert outcome(optimizer) == "APPLIED"


@pytest.mark.parametrize("level", SCALED)
def test_it_goes_with_the_gradients(chip: SaturatingBackend, level: str) -> None:
    model, optimizer = start(level)
    backward(model, optimizer, chip, delay_unscale=True)
    optimizer.zero_grad()
    backward(model, optimizer)
    optimizer.step()
    assert (outcome(optimizer), xamp.loss_scale(optimizer)) == ("APPLIED", 64.0)


@pytest.mark.parametrize("level", SCALED)
def test_a_static_scale_that_is_not_checked_asks_for_nothing(chip: SaturatingBackend, level: str) -> None:
    model, optimizer = start(level, loss_scale=128, on_static_overflow="step")
    backward(model, optimizer, chip, delay_unscale=True)
    backward(model, optimizer)
    assert "unscale_" not in chip.calls
    optimizer.step()
    assert outcome(optimizer) == "APPLIED"


class Overflowing(Dot):
    """Raises the chip's flag in its next forwards, as an operator does whose result it saturates."""

    chip: Any = None
    times = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.times:
            self.times -= 1
            self.chip.overflowed = True
        return super().forward(x)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("forwards", [1, 2])
@pytest.mark.parametrize("assigned", [False, True], ids=["of the class", "assigned to the object"])
def test_an_overflow_in_a_forward_skips_one_step(
    chip: SaturatingBackend, level: str, forwards: int, assigned: bool
) -> None:
    """Also where another forward comes between it and the backward; the steps after it are none of its business."""
    model = Overflowing()
    if assigned:
        model.forward = functools.partial(Overflowing.forward, model)  # type: ignore[method-assign]
    optimizer = SGD(model.parameters(), lr=0.125)
    xamp.initialize(model, optimizer, init_scale=64.0, **at(level))
    model.chip, found = chip, []
    for spoilt in (True, False, False):
        model.times = int(spoilt)
        losses = [model(torch.ones(7)) for _ in range(forwards)]
        optimizer.zero_grad()
        with xamp.scale_loss(losses[-1], optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        found.append(outcome(optimizer))
    assert found == ["SKIPPED", "APPLIED", "APPLIED"]


def test_a_forward_inside_another_is_a_part_of_it(chip: SaturatingBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """It neither lowers the flag that the outer one raised nor reads it, and each forward begins with a flag down."""
    reads: list[torch.Tensor] = []
    begun: list[int] = []
    watch = FlagWatch(chip, torch.device("cpu"), (), lambda: begun.append(1), lambda: [0])

    def counted(*args: Any) -> torch.Tensor:
        reads.append(read_flag(*args))
        return reads[-1]

    monkeypatch.setattr("xamp.scaling.overflow_flag.read_flag", counted)

    def told() -> float:
        found = torch.zeros(1)
        watch.take(0, found)
        return float(found)

    def inner() -> None:
        assert chip.overflowed

    def outer() -> None:
        chip.overflowed = True
        watch.run(inner, (), {})

    watch.run(outer, (), {})
    assert len(reads) == 1
    assert len(begun) == 2, "the inner one asks too"
    assert told() == 1.0
    watch.run(lambda: None, (), {})
    assert told() == 0.0
    with pytest.raises(ZeroDivisionError):
        watch.run(lambda: 1 / 0, (), {})
    chip.overflowed = True
    watch.run(lambda: None, (), {})
    assert told() == 0.0
    assert len(begun) == 5


@pytest.mark.parametrize("level", SCALED)
@pytest.mark.parametrize("raises", [False, True])
def test_the_flag_of_dropped_gradients_skips_nothing(chip: SaturatingBackend, level: str, raises: bool) -> None:
    model, optimizer = start(level)
    backward(model, optimizer, chip, delay_unscale=True)
    if raises:
        with pytest.raises(ZeroDivisionError), xamp.scale_loss(model(torch.ones(7)), optimizer) as scaled:  # noqa: PT012
            scaled.backward()
            raise ZeroDivisionError
    else:
        optimizer.zero_grad()
    backward(model, optimizer)
    optimizer.step()
    assert outcome(optimizer) == "APPLIED"


@pytest.mark.parametrize("level", SCALED)
def test_after_a_block_that_was_abandoned_forwards_are_watched(chip: SaturatingBackend, level: str) -> None:
    model: Any = Overflowing()
    optimizer = SGD(model.parameters(), lr=0.125)
    xamp.initialize(model, optimizer, init_scale=64.0, **at(level))
    xamp.scale_loss(model(torch.ones(7)), optimizer).__enter__()
    model.chip, model.times = chip, 1
    backward(model, optimizer)
    optimizer.step()
    assert outcome(optimizer) == "SKIPPED"


@pytest.mark.parametrize("level", SCALED)
def test_a_block_inside_another_leaves_the_flag_that_the_outer_one_raised(chip: SaturatingBackend, level: str) -> None:
    (outer, optimizer), (inner, other) = start(level), start(level)
    still = picture(outer, optimizer)
    with xamp.scale_loss(outer(torch.ones(7)), optimizer) as scaled:
        scaled.backward()
        chip.make_overflow_(outer.a.grad)
        backward(inner, other)
    optimizer.step()
    assert outcome(optimizer) == "SKIPPED"
    assert_same(picture(outer, optimizer), still)
