"""How a loss scale moves, against a loop that moves it.

Covers: xamp.scaling.scale.
"""

from __future__ import annotations

import pytest
import torch

from xamp.policy import Request, compile_policy, parse_level
from xamp.scaling.scale import DeviceState, LossScaler, ScaleRules


def rules(**changes: float) -> ScaleRules:
    numbers = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 100, "floor": 1.0, "ceiling": 2.0**24}
    return ScaleRules(dynamic=bool(changes.pop("dynamic", True)), **{**numbers, **changes})  # type: ignore[arg-type]


def moves_of(one: ScaleRules, scale: float) -> int:
    """How many updates cannot move it out: the most that all grow, or all back off, and leave it within."""
    lowest = highest = scale
    for moves in range(1000):
        lowest, highest = lowest * one.backoff_factor, highest * one.growth_factor
        if lowest < one.floor or highest > one.ceiling:
            return moves
    return 1000


@pytest.mark.parametrize("growth", [2.0, 1.5, 5.0])
@pytest.mark.parametrize("backoff", [0.5, 0.9, 0.1])
@pytest.mark.parametrize("scale", [3.0, 700.0, 2.0**23 + 1.0, 0.5, 2.0**25])
def test_how_many_updates_stay_within_the_bounds(scale: float, backoff: float, growth: float) -> None:
    one = rules(backoff_factor=backoff, growth_factor=growth)
    assert one.moves_before_bound(scale) == moves_of(one, scale)


def test_a_factor_of_one_never_moves_it_out() -> None:
    assert rules(growth_factor=1.0).moves_before_bound(2.0**10) == 10
    assert rules(backoff_factor=1.0).moves_before_bound(2.0**10) == 14


def test_what_an_overflow_makes_of_a_scale() -> None:
    assert [rules().after_overflow(scale) for scale in (8.0, 1.5, 1.0)] == [4.0, 1.0, 1.0]
    assert rules(floor=3.0).after_overflow(4.0) == 3.0
    assert rules(dynamic=False).after_overflow(8.0) == 8.0
    # Above its ceiling, where a state that was loaded may put it, one that never falls stays.
    assert rules(backoff_factor=1.0, ceiling=4.0).after_overflow(8.0) == 8.0


def scaler_of(memory: DeviceState, index: int, init_scale: float) -> LossScaler:
    row = parse_level("O1")
    assert row is not None
    request = Request(level="O1", init_scale=init_scale)
    return LossScaler(compile_policy(request, row, ("portable", "native")), memory, index, lambda: False)


@pytest.mark.parametrize("index", [0, 1])
def test_the_inverse_follows_the_scale_whichever_loss_it_is_of(index: int) -> None:
    """The host has read the scale after an overflow, and its inverse of before."""
    memory = DeviceState(2, 1, torch.device("cpu"))
    scaler = scaler_of(memory, index, 2.0)
    assert scaler.inverse.item() == 0.5
    scaler.update(torch.ones(1))
    values = memory.values.tolist()
    scaler.know(values[index], values[len(memory.scales) + index])
    assert (scaler.scale.item(), scaler.inverse.item()) == (1.0, 1.0)
