"""A backward in ``scale_loss`` and a step run outside of autocast regions around them; then weights are cast anew.

Covers: xamp.scaling.block, xamp.casting.outside.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from noting import noted_in_backward
from torch import nn

import xamp
from xamp.scaling.block import step_in, step_out


class Regions:
    """What stands for the regions of the code around."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def step_out(self) -> str:
        self.calls.append("out")
        return "left"

    def step_in(self, left: str) -> None:
        self.calls.append(f"in {left}")


def managed(level: str, kind: Any = torch.optim.SGD) -> Any:
    net: Any = nn.Linear(2, 2)
    return xamp.initialize(net, kind(net.parameters(), lr=0.1), level=level, init_scale=8.0, verbosity=0)


def first_of(x: torch.Tensor, weight: torch.Tensor) -> float:
    return (x @ weight)[0, 0].item()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_block_and_the_region_around(level: str) -> None:
    net, optimizer = managed(level)
    noted, seen = noted_in_backward(lambda: torch.is_autocast_enabled("cpu"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = noted(net(torch.ones(2, 2))).sum()
        with xamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
            assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cpu")
    assert seen == [False]


def test_a_block_whose_end_raises_leaves_the_region_as_it_was() -> None:
    net, optimizer = managed("O1")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(xamp.StateError), xamp.scale_loss(net(torch.ones(2, 2)).sum(), optimizer):  # noqa: PT012
            for _ in range(2):  # refused once; then the outer block is closed
                try:
                    xamp.scale_loss(torch.ones(()), optimizer).__enter__()
                except xamp.StateError:
                    continue
        assert torch.is_autocast_enabled("cpu")


class Steps(torch.optim.SGD):
    """An optimizer that notes whether autocast is on in its step, and fails if it is asked to."""

    seen: list[bool] = []
    fails = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        Steps.seen.append(torch.is_autocast_enabled("cpu"))
        if self.fails:
            raise ArithmeticError
        return super().step()


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_step_and_the_region_around(level: str, fails: bool) -> None:
    net, optimizer = managed(level, Steps)
    optimizer.fails = fails
    Steps.seen.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with xamp.scale_loss(net(torch.ones(2, 2)).sum(), optimizer) as scaled:
            scaled.backward()
        if fails:
            with pytest.raises(ArithmeticError):
                optimizer.step()
        else:
            optimizer.step()
        assert torch.is_autocast_enabled("cpu")
    assert Steps.seen == [False]


@pytest.mark.parametrize("what", ["scale_loss", "step", "a step with an argument"])
def test_a_weight_that_is_used_in_the_region_is_cast_anew_after(what: str) -> None:
    net, optimizer = managed("O1")
    x, weight = torch.ones(2, 2), nn.Parameter(torch.ones(2, 2))
    with xamp.scale_loss(net(x).sum(), optimizer) as scaled:
        scaled.backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        before = first_of(x, weight)
        with torch.no_grad():
            weight.mul_(2)
        assert first_of(x, weight) == before
        if what == "scale_loss":
            with xamp.scale_loss(torch.ones((), requires_grad=True), optimizer) as scaled:
                scaled.backward()
        else:
            optimizer.step(*[None] * (what != "step"))
        assert first_of(x, weight) == 2 * before


def test_nothing_is_asked_of_regions_where_there_is_none() -> None:
    regions = Regions()
    left = step_out(lambda: regions)
    step_in(lambda: regions, left)
    assert (left, regions.calls) == (None, [])
    with torch.autocast("cpu", enabled=False):
        left = step_out(lambda: regions)
        step_in(lambda: regions, left)
    assert (left, regions.calls) == ("left", ["out", "in left"])
    assert step_out(lambda: regions) is None, "the count of regions is as it was"


class Multiplies(torch.optim.SGD):
    """Multiplies matrices in its step."""

    dtypes: list[torch.dtype] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and param.dim() == 2:
                    Multiplies.dtypes.append((param.grad @ param.grad.t()).dtype)
                    param.data.add_(param.grad, alpha=-0.1)


@pytest.mark.parametrize("arguments", [(), (None,)])
def test_a_step_that_is_given_none_is_outside_too(arguments: Any) -> None:
    net, optimizer = managed("O1", Multiplies)
    Multiplies.dtypes.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with xamp.scale_loss(net(torch.ones(2, 2)).sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step(*arguments)
        assert torch.is_autocast_enabled("cpu")
    assert Multiplies.dtypes == [torch.float32]


class Unspeakable(RuntimeError):
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize("level", ["O1", "O2", "O4"])
@pytest.mark.parametrize("kind", [Unspeakable, KeyboardInterrupt])
def test_an_error_without_a_text_leaves_the_block_and_the_region(level: str, kind: type[BaseException]) -> None:
    net, optimizer = managed(level)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(kind), xamp.scale_loss(net(torch.ones(2, 2)).sum(), optimizer):
            raise kind  # of a dtype
        assert torch.is_autocast_enabled("cpu")
    with xamp.scale_loss(net(torch.ones(2, 2)).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
