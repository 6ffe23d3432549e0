"""Tries the recipes of fp8 on a device: are the products of a linear layer right, by its backend's own methods?"""

from __future__ import annotations

import torch

from xamp.contract import Backend
from xamp.registry.device_trials import finds_nothing
from xamp.torch_compat import scaled
from xamp.torch_compat.scaled import Scaled
from xamp.values.recipes import RECIPES, Recipe

__all__ = ["right_recipes"]

_ROWS, _INPUTS, _OUTPUTS = 32, 64, 96
_LARGEST = 7
"""The whole numbers up to this are exact in both formats, and so are their products with a scale of 448 / 7."""


def right_recipes(backend: Backend, device: torch.device) -> tuple[str, ...]:
    """Return the names of the recipes that ``device`` runs rightly, the fastest first.

    Raises:
        Exception: the device had no memory left, or was busy. That says nothing about what it has.
    """
    scaled.tried(device, backend.fp8_formats)
    return tuple(name for name, recipe in RECIPES.items() if _is_right(backend, recipe, device))


def _is_right(backend: Backend, recipe: Recipe, device: torch.device) -> bool:
    try:
        with scaled.only_torchs():
            return all(_products(backend, recipe, device))
    except Exception as error:  # a device may refuse by any type of error
        if finds_nothing(error):
            raise
        return False


def _products(backend: Backend, recipe: Recipe, device: torch.device) -> list[bool]:
    """Return of each of the recipe's products in fp8 whether it is right."""
    rows, weight, out = (
        _numbers(*shape, device) for shape in ((_ROWS, _INPUTS), (_OUTPUTS, _INPUTS), (_ROWS, _OUTPUTS))
    )

    def is_right(one: Scaled, other: Scaled, left: torch.Tensor, right: torch.Tensor, fast: bool = False) -> bool:
        found = backend.scaled_mm(one, other, torch.bfloat16, fast)
        exact = left.float().cpu() @ right.float().cpu()
        return bool(((found.float().cpu() - exact).abs() <= 2.0**-6 * exact.abs() + 0.5).all())

    def product(left: torch.Tensor, right: torch.Tensor, kind: str, scaling: str, fast: bool = False) -> bool:
        one, other = backend.to_fp8(left, kind, recipe.scaling, 1), backend.to_fp8(right, "e4m3", scaling, 0)
        return is_right(one, other, left, right, fast)

    found = [product(rows, weight.t(), "e4m3", recipe.scaling, True)]
    found.append(product(out, weight, recipe.gradient, recipe.weight_again))
    if recipe.weight_gradient:
        found.append(product(out.t(), rows, recipe.gradient, recipe.scaling))
    if recipe.casts_alike:
        given = (rows, "e4m3"), (weight, "e4m3"), (out, recipe.gradient)
        both = [pair for each, kind in given if (pair := backend.to_fp8_both(each, kind, recipe.scaling))]
        if both:
            (rows_1, rows_0), (weight_1, weight_0), (out_1, out_0) = both
            found.append(is_right(rows_1, weight_1.turned(), rows, weight.t(), True))
            found.append(is_right(out_1, weight_0, out, weight))
            found.append(is_right(out_0.turned(), rows_0, out.t(), rows))
    return found


def _numbers(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """Whole numbers of which each 32 in a row or a column hold the largest, or its negative."""
    places = torch.arange(rows)[:, None] * 4 + torch.arange(columns)[None, :]
    made = (places * 2 % (2 * _LARGEST + 1) - _LARGEST).to(torch.bfloat16)
    return made.to(device)
