"""The recipes of fp8, as data: which operand of a linear layer's three products is scaled how, and in which format.

Loaded only where fp8 is asked for. It imports no torch.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from typing import Any

from xamp.errors import PolicyError
from xamp.values import arguments
from xamp.values.shown import shown

__all__ = ["GAINS_FROM", "RECIPES", "Recipe", "for_autocast", "named", "read"]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One way to run a linear layer in fp8.

    A scaling is ``"tensor"`` (one scale for all values), ``"tensor_power"`` (the same, a power of two), ``"row"`` (a
    scale, a power of two, for each row of the left operand and each column of the right one) or ``"block"`` (one for
    each 32 values along the dimension that the product sums over, of format e8m0).

    Attributes:
        name: what ``fp8=`` takes.
        scaling: of the input and of the weight in the forward, and of the output's gradient.
        weight_again: scaling of the weight where the gradient of the input is computed.
        gradient: format of the output's gradient, ``"e4m3"`` or ``"e5m2"``; all others are e4m3.
        weight_gradient: whether the gradient of the weight is a product in fp8 too; else it is one in bf16.
        multiple: a layer runs in fp8 where both dimensions of its weight are multiples of this.
        said: what it is, in a few words.
    """

    name: str
    scaling: str
    weight_again: str
    gradient: str
    weight_gradient: bool
    multiple: int
    said: str

    @property
    def casts_again(self) -> bool:
        """Whether the backward casts input and weight again, along the other dimension, and not only transposes."""
        return self.scaling != "tensor"

    @property
    def casts_alike(self) -> bool:
        """Whether each matrix is cast along both dimensions by the same scaling, which one operator may do."""
        return self.casts_again and self.weight_again == self.scaling and self.weight_gradient


RECIPES: Mapping[str, Recipe] = types.MappingProxyType(
    {
        recipe.name: recipe
        for recipe in (
            Recipe("tensorwise", "tensor", "tensor", "e5m2", True, 16, "one scale a tensor: the fastest"),
            Recipe("rowwise", "row", "row", "e4m3", True, 16, "a scale a row: for values of very different sizes"),
            Recipe("rowwise_gw_hp", "row", "tensor_power", "e4m3", False, 16, "rowwise, weights' gradients in bf16"),
            Recipe("mxfp8", "block", "block", "e4m3", True, 32, "a scale for each 32 values, by the OCP's MX format"),
        )
    }
)
"""By name, the fastest first. So is what a backend declares."""

GAINS_FROM: Mapping[str, int] = types.MappingProxyType(dict.fromkeys(RECIPES, 4096))
"""By recipe: the width of a square layer from which fp8 is faster than bf16, forward and backward, compiled.

Measured on an H100 with torch 2.11, tensorwise: 1.38 times as fast at 4096, 1.49 times at 8192, no gain at 2048 and
below. The other recipes cast more often, so they gain no earlier; nobody has measured them for this table.
"""


def read(request: Any, is_spelt: bool, fits: bool) -> tuple[str | None, tuple[type | str, ...] | None]:
    """Return ``fp8`` and ``keep_bf16`` of a policy.

    Args:
        request: the arguments of ``initialize`` that shape a policy.
        is_spelt: the level is a spelling of O4 with ``fp8="auto"``.
        fits: the level runs operators in bf16 over parameters in fp32.

    Raises:
        PolicyError: they cannot be right, alone or together with the others.
    """
    given = f"initialize(level={shown(request.level)}, "
    if request.fp8 is None and not is_spelt:
        raise PolicyError(
            f"{given}keep_bf16={shown(request.keep_bf16)}): names what stays in bf16 where linear layers run in fp8, "
            "and here none does. Leave keep_bf16 out, or use level='fp8'."
        )
    recipe = named("auto" if request.fp8 is None else request.fp8)
    if not fits:
        also = "" if request.dtype is None else f", dtype={shown(request.dtype)}"
        raise PolicyError(
            f"{given}fp8={recipe!r}{also}): fp8 needs fp32 parameters and operators in bfloat16, which is level 'O4', "
            "and 'auto' never means it. level='fp8' is O4 with fp8='auto'."
        )
    if request.op_policy == "apex":
        raise PolicyError(
            f"{given}fp8={recipe!r}, op_policy='apex'): Apex's lists know no fp8. Leave op_policy='apex' and "
            "backend='apex' out."
        )
    return recipe, None if request.keep_bf16 is None else arguments.keep("keep_bf16", request.keep_bf16)


def for_autocast(value: object, dtype: object) -> str:
    """Return the name of the recipe that ``xamp.autocast`` was given with ``dtype``, or raise a PolicyError."""
    if str(dtype) == "torch.float16":
        raise PolicyError(
            f"autocast(dtype=torch.float16, fp8={shown(value)}): around layers in fp8 operators run in bfloat16. Leave "
            "dtype out."
        )
    return named(value, call="autocast")


def named(value: object, *, call: str = "initialize") -> str:
    """Return the name of a recipe, or ``"auto"``.

    Raises:
        PolicyError: there is no such recipe.
    """
    name = value.strip().lower() if isinstance(value, str) else ""
    if name != "auto" and name not in RECIPES:
        choices = ", ".join(map(repr, RECIPES))
        raise PolicyError(f"{call}(fp8={shown(value)}): no such recipe. Choices: None, 'auto', {choices}.")
    return name
