"""Gradients of several backwards add up to what fp32 gives, however the scale moves in between.

Covers: xamp.scaling.gradients, xamp.scaling.backwards, xamp.scaling.unscale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lanes import Lane
from stepping import (
    SCALED,
    Dot,
    assert_follows,
    assert_lowered_follow,
    assert_same,
    at,
    inputs,
    iterate,
    outcome,
    picture,
    plain_iterate,
    run_backward,
    twin,
)
from stepping import (
    start_beside as start,
)
from torch import nn
from torch.optim import SGD

import xamp
from xamp.testing.measure import Storages

SCALES: list[dict[str, Any]] = [
    {"init_scale": 256.0},
    {"loss_scale": 1000.0},
    {"loss_scale": 0.3},
    {"init_scale": 1000.0},
]
each_level = pytest.mark.parametrize("level", SCALED)
each_scale = pytest.mark.parametrize(
    "scale", SCALES, ids=lambda scale: "-".join(f"{k}={v:g}" for k, v in scale.items())
)


def tolerance(scale: dict[str, Any], level: str) -> float:
    """Of the sums: none is lost under a power of two; other scales round each fp16 gradient once."""
    exact = scale.get("loss_scale", scale.get("init_scale")) == 256.0
    return 1e-6 if exact or level == "O1" else 2e-3


@pytest.mark.parametrize("level", ["O0", *SCALED, "O4", "O5"])
@each_scale
def test_any_number_of_micro_batches_add_up(lane: Lane, level: str, scale: dict[str, Any]) -> None:
    options = scale if level in SCALED else {}
    model, optimizer, reference, plain = start(lane, level, **options)
    batches = inputs(9, lane)
    for some in (batches[:1], batches[1:4], batches[4:]):
        optimizer.zero_grad()
        for x in some:
            run_backward(model(x), optimizer)
        optimizer.step()
        plain_iterate(reference, plain, *some)
    assert_follows(optimizer, reference, rtol=tolerance(scale, level), atol=tolerance(scale, level))
    assert_lowered_follow(model, optimizer)


@each_level
@pytest.mark.parametrize("scale", [256.0, 1000.0])
def test_they_add_up_when_another_optimizer_backs_the_scale_off(lane: Lane, level: str, scale: float) -> None:
    models = [Dot().to(lane.device), Dot().to(lane.device)]
    reference = twin(models[0])
    plain = SGD(reference.parameters(), lr=0.125)
    made: Any = [SGD(m.parameters(), lr=0.125) for m in models]
    models, (mine, other) = xamp.initialize(models, made, init_scale=scale, **at(level))
    first, second, third = inputs(3, lane)
    run_backward(models[0](first), mine)
    run_backward(models[1](second), other, lane, [models[1].a])
    other.step()
    assert xamp.loss_scale(mine) == scale / 2
    run_backward(models[0](third), mine)
    mine.step()
    plain_iterate(reference, plain, first, third)
    assert (outcome(mine), outcome(other)) == ("APPLIED", "SKIPPED")
    rough = 1e-6 if scale == 256.0 or level == "O1" else 2e-3
    assert_follows(mine, reference, rtol=rough, atol=rough)


@each_level
@each_scale
def test_delay_unscale_adds_up(lane: Lane, level: str, scale: dict[str, Any]) -> None:
    model, optimizer, reference, plain = start(lane, level, growth_interval=1, **scale)
    batches = inputs(7, lane)
    for count, x in enumerate(batches):
        was = xamp.loss_scale(optimizer)
        run_backward(model(x), optimizer, delay_unscale=count not in (2, 6))
        if count not in (2, 6):
            assert xamp.loss_scale(optimizer) == was
    optimizer.step()
    plain_iterate(reference, plain, *batches)
    # Sums of scaled fp16 gradients are rounded to fp16.
    rough = 1e-6 if level == "O1" else 4e-3
    assert_follows(optimizer, reference, rtol=rough, atol=rough)


@each_level
def test_delay_unscale_adds_up_across_scales_of_several_losses(lane: Lane, level: str) -> None:
    model, optimizer, reference, plain = start(lane, level, init_scale=64.0, num_losses=3, growth_interval=1)
    batches = inputs(6, lane)
    run_backward(model(batches[0]), optimizer, loss_id=0)
    run_backward(model(batches[1]), optimizer, loss_id=0, delay_unscale=True)
    run_backward(model(batches[2]), optimizer, loss_id=1, delay_unscale=True)
    run_backward(model(batches[3]), optimizer, loss_id=2)
    run_backward(model(batches[4]), optimizer, loss_id=0, delay_unscale=True)
    run_backward(model(batches[5]), optimizer, loss_id=1)
    optimizer.step()
    assert [xamp.loss_scale(optimizer, i) for i in range(3)] == [128.0, 128.0, 128.0]
    plain_iterate(reference, plain, *batches)
    assert_follows(optimizer, reference)


@each_level
def test_a_delayed_loss_that_overflows_gets_a_smaller_scale(lane: Lane, level: str) -> None:
    """Also one that is never unscaled by a ``scale_loss`` of its own: another's check sees the overflow."""
    model, optimizer, _, _ = start(lane, level, init_scale=1024.0, num_losses=2)
    outcomes = []
    for x in inputs(9, lane):
        optimizer.zero_grad()
        too_large = xamp.loss_scale(optimizer, 0) > 32.0
        run_backward(model(x), optimizer, lane, [model.a] if too_large else (), loss_id=0, delay_unscale=True)
        run_backward(model(x), optimizer, loss_id=1)
        optimizer.step()
        outcomes.append(outcome(optimizer))
    assert outcomes == ["SKIPPED"] * 5 + ["APPLIED"] * 4
    assert xamp.loss_scale(optimizer, 0) == 32.0


@each_level
def test_losses_with_own_scales_add_up(lane: Lane, level: str) -> None:
    model, optimizer, reference, plain = start(lane, level, init_scale=64.0, num_losses=2, growth_interval=2)
    batches = inputs(9, lane)
    for step in range(3):
        some = batches[3 * step : 3 * step + 3]
        optimizer.zero_grad()
        for x, loss_id in zip(some, (0, 1, 0), strict=True):
            run_backward(model(x), optimizer, loss_id=loss_id)
        optimizer.step()
        plain_iterate(reference, plain, *some)
    assert [xamp.loss_scale(optimizer, i) for i in range(2)] == [128.0, 128.0]
    assert_follows(optimizer, reference)


@each_level
@each_scale
def test_a_plain_backward_before_scale_loss_counts_as_it_is(lane: Lane, level: str, scale: dict[str, Any]) -> None:
    model, optimizer, reference, plain = start(lane, level, **scale)
    batches = inputs(3, lane)
    for x in batches[:2]:
        model(x).backward()
    run_backward(model(batches[2]), optimizer)
    optimizer.step()
    plain_iterate(reference, plain, *batches)
    assert_follows(optimizer, reference, rtol=tolerance(scale, level), atol=tolerance(scale, level))


@each_level
@pytest.mark.parametrize("zero", ["a", "b"])
def test_a_plain_backward_between_two_scale_loss_counts_as_it_is(lane: Lane, level: str, zero: str) -> None:
    """Also where its gradient is zero in some parameter (but not in all that are lowered: that looks like zero_())."""
    zero = "b" if level == "O2-second-fp32" else zero
    model, optimizer, reference, plain = start(lane, level, init_scale=64.0)
    batches = inputs(3, lane)
    batches[1][slice(0, 4) if zero == "a" else slice(4, 7)] = 0.0
    run_backward(model(batches[0]), optimizer)
    model(batches[1]).backward()
    run_backward(model(batches[2]), optimizer)
    optimizer.step()
    plain_iterate(reference, plain, *batches)
    assert_follows(optimizer, reference)


def drop_gradients(model: Any) -> None:
    for param in model.parameters():
        param.grad = None


CLEAR: dict[str, Callable[[Any, Any], object]] = {
    "optimizer.zero_grad()": lambda _, o: o.zero_grad(),
    "optimizer.zero_grad(set_to_none=True)": lambda _, o: o.zero_grad(set_to_none=True),
    "optimizer.zero_grad(set_to_none=False)": lambda _, o: o.zero_grad(set_to_none=False),
    "model.zero_grad()": lambda m, _: m.zero_grad(),
    "model.zero_grad(set_to_none=False)": lambda m, _: m.zero_grad(set_to_none=False),
    "p.grad = None": lambda m, _: drop_gradients(m),
    "p.grad.zero_()": lambda m, _: [p.grad.zero_() for p in m.parameters() if p.grad is not None],
}
each_clear = pytest.mark.parametrize("clear", CLEAR.values(), ids=CLEAR.keys())


@each_level
@each_clear
def test_every_way_to_clear_gradients_clears_them(lane: Lane, level: str, clear: Callable[[Any, Any], object]) -> None:
    model, optimizer, reference, plain = start(lane, level, init_scale=64.0)
    batches = inputs(8, lane)
    for first, second in zip(batches[::2], batches[1::2], strict=True):
        clear(model, optimizer)
        run_backward(model(first), optimizer)
        run_backward(model(second), optimizer)
        optimizer.step()
        plain_iterate(reference, plain, first, second)
    assert_follows(optimizer, reference)


@each_level
@each_clear
def test_gradients_can_be_cleared_halfway(lane: Lane, level: str, clear: Callable[[Any, Any], object]) -> None:
    model, optimizer, reference, plain = start(lane, level, init_scale=64.0)
    first, second = inputs(2, lane)
    run_backward(model(first), optimizer)
    clear(model, optimizer)
    run_backward(model(second), optimizer)
    optimizer.step()
    plain_iterate(reference, plain, second)
    assert_follows(optimizer, reference)


@each_level
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("scale", [{"init_scale": 64.0}, {"loss_scale": 1000.0}], ids=["64", "1000"])
def test_zero_grad_of_the_optimizer_inside_the_block_clears_gradients(
    lane: Lane, level: str, set_to_none: bool, scale: dict[str, Any]
) -> None:
    model, optimizer, reference, plain = start(lane, level, **scale)
    first, second = inputs(2, lane)
    run_backward(model(first), optimizer)
    optimizer.step()
    plain_iterate(reference, plain, first)
    with xamp.scale_loss(model(second), optimizer) as scaled:
        optimizer.zero_grad(set_to_none=set_to_none)
        scaled.backward()
    optimizer.step()
    plain_iterate(reference, plain, second)
    assert_follows(optimizer, reference, rtol=tolerance(scale, level), atol=tolerance(scale, level))


@each_level
def test_a_step_after_gradients_were_cleared_does_nothing(lane: Lane, level: str) -> None:
    model, optimizer, _, _ = start(lane, level, init_scale=64.0)
    first, second = inputs(2, lane)
    iterate(model, optimizer, first)
    run_backward(model(second), optimizer)
    still = picture(model, optimizer)
    drop_gradients(model)
    optimizer.step()
    assert_same(picture(model, optimizer), still)


@each_level
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("scale", [{"init_scale": 64.0}, {"loss_scale": 1000.0}], ids=["64", "1000"])
def test_gradients_made_with_create_graph_add_up(lane: Lane, level: str, scale: dict[str, Any]) -> None:
    """Then torch does not add in place."""
    model, optimizer, reference, plain = start(lane, level, **scale)
    batches = inputs(3, lane)
    for x in batches:
        with xamp.scale_loss(model(x), optimizer) as scaled:
            scaled.backward(create_graph=True)
    optimizer.step()
    plain_iterate(reference, plain, *batches)
    assert_follows(optimizer, reference, rtol=tolerance(scale, level), atol=tolerance(scale, level))
    drop_gradients(model)


@each_level
@pytest.mark.parametrize("whose", ["optimizer", "model"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_in_the_block_of_a_second_backward_clears_both(
    lane: Lane, level: str, whose: str, set_to_none: bool
) -> None:
    model, optimizer, reference, plain = start(lane, level, init_scale=64.0)
    first, second, third = inputs(3, lane)
    run_backward(model(first), optimizer)
    with xamp.scale_loss(model(second), optimizer) as scaled:
        scaled.backward()
        (optimizer if whose == "optimizer" else model).zero_grad(set_to_none=set_to_none)
        (model(third) * 64.0).backward()
    optimizer.step()
    plain_iterate(reference, plain, third)
    assert_follows(optimizer, reference)


@each_level
@pytest.mark.parametrize("whose", ["optimizer", "model"])
def test_an_overflow_whose_gradients_the_block_clears_is_none(lane: Lane, level: str, whose: str) -> None:
    model, optimizer, reference, plain = start(lane, level, init_scale=64.0)
    first, second = inputs(2, lane)
    run_backward(model(first), optimizer)
    loss = model(second)
    with xamp.scale_loss(loss, optimizer) as scaled:
        scaled.backward(retain_graph=True)
        lane.overflow_(next(p.grad for p in model.parameters() if p.grad is not None))
        (optimizer if whose == "optimizer" else model).zero_grad()
        scaled.backward()
    optimizer.step()
    assert outcome(optimizer) == ("APPLIED" if lane.can.overflow == "inf" else "SKIPPED")
    if lane.can.overflow == "inf":
        assert xamp.loss_scale(optimizer) == 64.0
        plain_iterate(reference, plain, second)
        assert_follows(optimizer, reference)


@each_level
def test_a_step_after_the_block_cleared_all_gradients_does_nothing(lane: Lane, level: str) -> None:
    model, optimizer, _, _ = start(lane, level, init_scale=64.0)
    first, second = inputs(2, lane)
    run_backward(model(first), optimizer)
    with xamp.scale_loss(model(second), optimizer) as scaled:
        scaled.backward()
        optimizer.zero_grad()
    still = picture(model, optimizer)
    optimizer.step()
    assert_same(picture(model, optimizer), still)
    assert xamp.session(optimizer).stats.applied == 0


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_two_micro_batches_take_20_8_bytes_a_parameter_at_most(level: str) -> None:
    """With Adam 2 + 4 + 8 bytes are always there, 4 while gradients are, and 2 until those of the second have moved."""
    width = 128
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(24)))
    size = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    xamp.initialize(model, optimizer, level, fused="auto", op_policy="native", verbosity=0)
    x, peaks = torch.randn(1, width), []
    with Storages("cpu") as storages:
        storages.note([*model.parameters(), *xamp.master_params(optimizer), x])
        for _ in range(3):
            optimizer.zero_grad()
            storages.lap()
            for _ in range(2):
                loss = model(x).float().square().mean()
                with xamp.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
                del loss, scaled
            optimizer.step()
            peaks.append(storages.lap() / size)
    assert peaks[-1] <= 20.8, peaks
