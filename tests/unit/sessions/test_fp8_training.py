"""A small GPT at O4 and in fp8, by each recipe: it learns as well.

Covers: xamp.casting.fp8_linear, xamp.values.recipes.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import small_gpt
import torch

from xamp.values.recipes import RECIPES


@functools.cache
def losses(steps: int, recipe: str | None) -> torch.Tensor:
    fp8: Any = {} if recipe is None else {"fp8": recipe, "keep_bf16": ()}
    return small_gpt.losses(steps, level="O4", **fp8)


def check(steps: int, recipe: str) -> None:
    wanted, found = (losses(steps, each)[-50:].mean().item() for each in (None, recipe))
    assert wanted < 0.4 * losses(steps, None)[0].item()  # it has learned
    assert abs(found / wanted - 1) <= 0.01
    assert not torch.equal(losses(steps, recipe), losses(steps, None))


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_hundred_steps(recipe: str) -> None:
    check(100, recipe)


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", RECIPES)
def test_six_hundred_steps(recipe: str) -> None:
    check(600, recipe)
