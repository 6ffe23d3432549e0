"""An exception in the body of ``scale_loss`` leaves a clean state.

Covers: xamp.scaling.block, xamp.scaling.gradients.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lanes import Lane
from stepping import (
    SCALED,
    assert_follows,
    assert_same,
    inputs,
    iterate,
    picture,
    plain_iterate,
    run_backward,
)
from stepping import (
    start_beside as start,
)
from torch.optim import Optimizer

import xamp
from xamp.errors import StateError

each_level = pytest.mark.parametrize("level", SCALED)
each_scale = pytest.mark.parametrize("scale", [{"init_scale": 256.0}, {"loss_scale": 1000.0}], ids=["256", "1000"])


def tolerance(scale: dict[str, Any], level: str) -> float:
    """Of the sums: none is lost under a power of two; other scales round each fp16 gradient once."""
    return 1e-6 if "init_scale" in scale or level == "O1" else 2e-3


class BodyError(Exception):
    """Raised in the body of a ``scale_loss``."""


def fail(when: str, model: Any, optimizer: Optimizer, x: torch.Tensor, **options: Any) -> None:
    """A ``scale_loss`` whose body raises."""
    with pytest.raises(BodyError), xamp.scale_loss(model(x), optimizer, **options) as scaled:  # noqa: PT012
        if when == "before backward":
            raise BodyError
        if when == "inside backward":

            def refuse(_: torch.Tensor) -> None:
                raise BodyError

            handle = model.b.register_hook(refuse)
            try:
                scaled.backward()
            finally:
                handle.remove()
        scaled.backward()
        raise BodyError


each_failure = pytest.mark.parametrize("when", ["before backward", "inside backward", "after backward"])


@each_level
@each_scale
@each_failure
@pytest.mark.parametrize("delay_unscale", [False, True])
def test_after_an_exception_in_the_body_the_next_iteration_is_right(
    lane: Lane, level: str, scale: dict[str, Any], when: str, delay_unscale: bool
) -> None:
    model, optimizer, reference, plain = start(lane, level, **scale)
    first, second, third = inputs(3, lane)
    iterate(model, optimizer, first)
    plain_iterate(reference, plain, first)
    still, was = picture(model, optimizer), xamp.loss_scale(optimizer)
    optimizer.zero_grad()
    fail(when, model, optimizer, second, delay_unscale=delay_unscale)
    assert_same(picture(model, optimizer), still)
    assert xamp.loss_scale(optimizer) == was
    optimizer.step()  # nothing is left of the failed backward
    assert_same(picture(model, optimizer), still)
    iterate(model, optimizer, third)
    plain_iterate(reference, plain, third)
    assert_follows(optimizer, reference, rtol=tolerance(scale, level), atol=tolerance(scale, level))


@each_level
@each_scale
@pytest.mark.parametrize("delay_unscale", [False, True])
def test_an_exception_before_backward_keeps_what_was_accumulated(
    lane: Lane, level: str, scale: dict[str, Any], delay_unscale: bool
) -> None:
    model, optimizer, reference, plain = start(lane, level, **scale)
    first, second, third = inputs(3, lane)
    run_backward(model(first), optimizer, delay_unscale=delay_unscale)
    fail("before backward", model, optimizer, second)
    run_backward(model(third), optimizer)
    optimizer.step()
    plain_iterate(reference, plain, first, third)
    assert_follows(optimizer, reference, rtol=tolerance(scale, level), atol=tolerance(scale, level))


@each_level
@each_failure
def test_an_exception_never_leaves_half_a_gradient(lane: Lane, level: str, when: str) -> None:
    """Accumulated gradients come through whole, or all of them go."""
    model, optimizer, reference, plain = start(lane, level, init_scale=64.0)
    first, second, third = inputs(3, lane)
    run_backward(model(first), optimizer)
    fail(when, model, optimizer, second)
    kept = any(p.grad is not None for p in xamp.master_params(optimizer))
    run_backward(model(third), optimizer)
    optimizer.step()
    plain_iterate(reference, plain, *([first, third] if kept else [third]))
    assert_follows(optimizer, reference)


@each_level
def test_a_failure_of_scale_loss_itself_leaves_the_block_closed(lane: Lane, level: str) -> None:
    model, optimizer, reference, plain = start(lane, level, init_scale=64.0)
    first, second = inputs(2, lane)
    with xamp.scale_loss(model(first), optimizer) as scaled:
        with pytest.raises(StateError, match="another scale_loss"), xamp.scale_loss(model(first), optimizer):
            pass
        scaled.backward()
    run_backward(model(second), optimizer)
    optimizer.step()
    plain_iterate(reference, plain, first, second)
    assert_follows(optimizer, reference)
