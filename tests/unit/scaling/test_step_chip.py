"""A chip that saturates: what its flag said of a backward whose unscaling waits is not lost when the next clears it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from saturating_chip import SATURATING, SaturatingBackend
from stepping import SCALED, Dot, assert_same, at, outcome, picture
from torch.optim import SGD

import xamp
from xamp.registry import registry


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
