"""Parameters that are frozen, unused, of other dtypes, or join while training.

Covers: xamp.scaling.parameters, xamp.scaling.param_groups.
"""

from __future__ import annotations

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
    step_alike,
    stepped,
    twin,
)
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import xamp

each_level = pytest.mark.parametrize("level", SCALED)
each_fused = pytest.mark.parametrize("fused", [False, "auto"])
OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda params: SGD(params, lr=0.125, momentum=0.9),
    "Adam": lambda params: Adam(params, lr=0.125),
}
each_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


def initialize(model: Any, optimizer: Any, level: str, **options: Any) -> Any:
    return xamp.initialize(model, optimizer, **{"init_scale": 64.0, **at(level), **options})


@each_level
@each_fused
@each_optimizer
@pytest.mark.parametrize("frozen", ["a", "b"])
def test_a_frozen_parameter_stays_and_trains_once_unfrozen(
    lane: Lane, level: str, fused: str | bool, make: Any, frozen: str
) -> None:
    model = Dot().to(lane.device)
    model.get_parameter(frozen).requires_grad_(False)
    reference = twin(model)
    plain = make(reference.parameters())
    model, optimizer = initialize(model, make(model.parameters()), level, fused=fused)
    step_alike(plain, optimizer)
    batches = inputs(6, lane)
    before = model.get_parameter(frozen).clone()
    for x in batches[:3]:
        iterate(model, optimizer, x)
        plain_iterate(reference, plain, x)
    assert torch.equal(model.get_parameter(frozen), before)
    model.get_parameter(frozen).requires_grad_(True)
    reference.get_parameter(frozen).requires_grad_(True)
    for x in batches[3:]:
        iterate(model, optimizer, x)
        plain_iterate(reference, plain, x)
    assert_follows(optimizer, reference)
    assert_lowered_follow(model, optimizer)
    model.get_parameter(frozen).requires_grad_(False)
    reference.get_parameter(frozen).requires_grad_(False)
    for x in inputs(2, lane, seed=2):
        iterate(model, optimizer, x)
        plain_iterate(reference, plain, x)
    assert_follows(optimizer, reference)


class Branches(nn.Module):
    """Two models of which each forward uses one or both."""

    def __init__(self) -> None:
        super().__init__()
        self.left = Dot()
        self.right = Dot()

    def forward(self, x: torch.Tensor, use: str) -> torch.Tensor:
        losses = [getattr(self, name)(x) for name in use.split("+")]
        return torch.stack(losses).sum()


@each_level
@each_fused
@each_optimizer
def test_parameters_without_gradients_stay(lane: Lane, level: str, fused: str | bool, make: Any) -> None:
    model = Branches().to(lane.device)
    reference = twin(model)
    plain = make(reference.parameters())
    model, optimizer = initialize(model, make(model.parameters()), level, fused=fused)
    step_alike(plain, optimizer)
    for x, use in zip(inputs(5, lane), ("left", "left+right", "right", "left", "left+right"), strict=True):
        for under, steps in ((model, optimizer), (reference, plain)):
            steps.zero_grad()
            loss = under(x, use)
            run_backward(loss, steps) if under is model else loss.backward()
            steps.step()
        assert outcome(optimizer) == "APPLIED"
        assert_follows(optimizer, reference)
    assert_lowered_follow(model, optimizer)


@each_level
@each_fused
@each_optimizer
@pytest.mark.parametrize("spoilt", ["left.first.weight", "right.second.weight"])
def test_an_overflow_where_some_have_no_gradient_moves_none(
    lane: Lane, level: str, fused: str | bool, make: Any, spoilt: str
) -> None:
    model = Branches().to(lane.device)
    model, optimizer = initialize(model, make(model.parameters()), level, fused=fused)
    first, second = inputs(2, lane)
    use = spoilt.partition(".")[0]
    run_backward(model(first, "left"), optimizer)
    optimizer.step()
    optimizer.zero_grad()
    still = picture(model, optimizer)
    run_backward(model(second, use), optimizer, lane, [model.get_parameter(spoilt)])
    optimizer.step()
    assert_same(picture(model, optimizer), still)


@each_level
@each_fused
@each_optimizer
def test_a_group_added_while_training_joins_and_the_momentum_of_the_others_stays(
    lane: Lane, level: str, fused: str | bool, make: Any
) -> None:
    model = Dot().to(lane.device)
    reference = twin(model)
    plain = make([reference.a])
    model, optimizer = initialize(model, make([model.a]), level, fused=fused)
    step_alike(plain, optimizer)
    batches = inputs(7, lane)

    def step(x: torch.Tensor, spoil: Any = ()) -> None:
        model.zero_grad()
        reference.zero_grad()
        run_backward(model(x), optimizer, lane, spoil)
        optimizer.step()
        reference(x).backward()
        if not spoil:
            plain.step()

    for x in batches[:3]:
        step(x)
    optimizer.add_param_group({"params": model.b, "lr": 0.5})
    plain.add_param_group({"params": reference.b, "lr": 0.5})
    for x in batches[3:5]:
        step(x)
    step(batches[5], [model.b])
    assert outcome(optimizer) == "SKIPPED"
    step(batches[6])
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.5]
    assert_follows(optimizer, reference)
    assert_lowered_follow(model, optimizer)


@each_level
@pytest.mark.parametrize("event", ["add_param_group", "load_state_dict"])
@pytest.mark.parametrize("when", ["after backward", "after step"])
def test_gradients_outlive_a_change_of_the_groups_and_are_still_cleared_by_the_model(
    lane: Lane, level: str, event: str, when: str
) -> None:
    model = Dot().to(lane.device)
    reference = twin(model)
    first, second = inputs(2, lane)
    made: list[Optimizer] = [SGD([m.a], lr=0.125, momentum=0.9) for m in (model, reference)]
    model, optimizer = initialize(model, made[0], level)
    for under, steps in ((model, optimizer), (reference, made[1])):
        run_backward(under(first), steps) if under is model else under(first).backward()
        extra: list[torch.Tensor] = [torch.zeros(2, device=lane.device, requires_grad=True)]
        for part in ("after backward", "step", "after step"):
            if part == "step":
                steps.step()
            elif part == when and event == "add_param_group":
                steps.add_param_group({"params": extra})
            elif part == when:
                steps.load_state_dict(twin(steps.state_dict()))
        under.zero_grad()
        run_backward(under(second), steps) if under is model else under(second).backward()
        steps.step()
    torch.testing.assert_close(stepped(optimizer), stepped(made[1]), rtol=1e-6, atol=1e-7)


@each_level
def test_a_group_may_hold_a_parameter_of_no_model(lane: Lane, level: str) -> None:
    model = Dot().to(lane.device)
    gain = nn.Parameter(torch.ones((), device=lane.device))
    reference, plain_gain = twin(model), nn.Parameter(torch.ones((), device=lane.device))
    plain = SGD([*reference.parameters(), plain_gain], lr=0.125)
    model, optimizer = initialize(model, SGD(model.parameters(), lr=0.125), level)
    optimizer.add_param_group({"params": [gain]})
    for x in inputs(3, lane):
        optimizer.zero_grad()
        run_backward(model(x) + gain, optimizer)
        assert gain.grad is not None
        assert float(gain.grad) == 1.0
        optimizer.step()
        plain.zero_grad()
        (reference(x) + plain_gain).backward()
        plain.step()
    torch.testing.assert_close(stepped(optimizer), stepped(plain), rtol=1e-6, atol=1e-7)


@each_level
def test_a_group_with_a_parameter_that_is_there_already_is_refused_and_changes_nothing(lane: Lane, level: str) -> None:
    model = Dot().to(lane.device)
    model, optimizer = initialize(model, AdamW(model.parameters(), lr=0.125), level)
    iterate(model, optimizer, inputs(1, lane)[0])
    still = picture(model, optimizer)
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [model.b]})
    assert_same(picture(model, optimizer), still)
    iterate(model, optimizer, inputs(1, lane)[0])


@each_level
def test_a_group_that_torch_refuses_changes_nothing(lane: Lane, level: str) -> None:
    model = Dot().to(lane.device)
    model, optimizer = initialize(model, SGD([model.a], lr=0.125), level)
    still = picture(model, optimizer)
    with pytest.raises(TypeError):
        optimizer.add_param_group({"params": ["b"]})
    with pytest.raises(TypeError):
        optimizer.add_param_group({"params": {model.b}})
    assert_same(picture(model, optimizer), still)
    optimizer.add_param_group({"params": (p for p in [model.b])})
    run_backward(model(inputs(1, lane)[0]), optimizer)
    optimizer.step()
    assert outcome(optimizer) == "APPLIED"


class Other(nn.Module):
    """One parameter in fp32 and one in another dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.usual = nn.Parameter(torch.ones(3))
        self.other = nn.Parameter(torch.ones(3, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        other = (self.other * x.to(self.other.dtype)).sum()
        return (self.usual * x).sum() + (other.real if other.is_complex() else other).float()


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64], ids=str)
@each_optimizer
def test_parameters_in_other_dtypes_train_too(lane: Lane, level: str, dtype: torch.dtype, make: Any) -> None:
    try:
        model: Any = Other(dtype).to(lane.device)
    except (TypeError, RuntimeError) as error:
        pytest.skip(f"{lane} has no {dtype}: {error}")
    reference = twin(model)
    plain = make(reference.parameters())
    model, optimizer = initialize(model, make(model.parameters()), level)
    step_alike(plain, optimizer)
    for count, x in enumerate(inputs(4, lane)):
        spoil = count == 2 and lane.can.overflow == "inf"
        optimizer.zero_grad()
        for half in (x[:3], x[3:6]):
            run_backward(model(half), optimizer, lane, [model.other] if spoil else ())
        optimizer.step()
        assert outcome(optimizer) == ("SKIPPED" if spoil else "APPLIED")
        if not spoil:
            plain_iterate(reference, plain, x[:3], x[3:6])
    assert_follows(optimizer, reference)
