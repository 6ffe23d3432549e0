"""A linear layer whose three products run in fp8, as an autograd function. Loaded only where fp8 is asked for.

The forward casts input and weight and multiplies them; the backward casts the gradient of the output, and multiplies
twice. What the backward needs is saved as the recipe has it: the fp8 values where one scale serves both layouts, or one
operator casts along both dimensions; else the input in bf16 and the weight itself, which are cast again along the other
dimension. Nothing outlives the backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from xamp.contract import Backend
from xamp.errors import StateError
from xamp.torch_compat.scaled import Scaled
from xamp.torch_compat.torch_private.autocast import DisableAutocast
from xamp.values.recipes import Recipe

__all__ = ["How", "linear"]


_CURE = "Name the layers in initialize(keep_bf16=...), or use level 'O4'."


class How(NamedTuple):
    """How a linear layer runs.

    Attributes:
        recipe: the recipe.
        backend: casts and multiplies.
        dtype: that of input, output and gradients.
    """

    recipe: Recipe
    backend: Backend
    dtype: torch.dtype

    def cast(self, matrix: torch.Tensor, axis: int, scaling: str = "", kind: str = "e4m3") -> Scaled:
        """Cast a matrix to fp8, with the recipe's own scaling unless another one is given."""
        return self.backend.to_fp8(matrix, kind, scaling or self.recipe.scaling, axis)

    def cast_both(self, matrix: torch.Tensor, needed: bool, kind: str = "e4m3") -> tuple[Scaled, Scaled] | None:
        """Cast along dimension 1 and along 0, if the second is ``needed`` and one operator does; else None."""
        if not (needed and self.recipe.casts_alike):
            return None
        return self.backend.to_fp8_both(matrix, kind, self.recipe.scaling)

    def multiply(self, left: Scaled, right: Scaled, *, fast: bool = False) -> torch.Tensor:
        """Multiply two matrices in fp8."""
        return self.backend.scaled_mm(left, right, self.dtype, fast)


def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, how: How) -> torch.Tensor:
    """Return what ``torch.nn.functional.linear`` does, by the recipe of ``how``, in its dtype."""
    try:
        with DisableAutocast():
            output: torch.Tensor = _Linear.apply(input, weight, bias, how, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
        return output
    except RuntimeError as error:
        if "functorch" not in str(error):
            raise
        raise StateError(
            "torch.func (grad, vjp, jvp, ...) through a linear layer in fp8: these transforms see no product in fp8. "
            f"{_CURE}"
        ) from error


class _Linear(torch.autograd.Function):
    """See :func:`linear`. The input is a matrix (M, K), maybe with more dimensions, the weight (N, K)."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, how: How, recorded: bool
    ) -> Any:
        rows = input.to(how.dtype).reshape(-1, weight.shape[1])
        ctx.how, ctx.shapes = how, (input.shape, weight.shape)
        needs = ctx.needs_input_grad[:2] if recorded else (False, False)  # which does not know of no_grad
        if rows.numel():
            of_rows, of_weight = how.cast_both(rows, needs[1]), how.cast_both(weight, needs[0])
            left = of_rows[0] if of_rows else how.cast(rows, 1)
            right = of_weight[0].turned() if of_weight else how.cast(weight.t(), 0)
            output = how.multiply(left, right, fast=True)
            kept: list[torch.Tensor | None]
            if how.recipe.casts_again:
                kept = [*_kept(ctx, rows, of_rows), *_kept(ctx, weight, of_weight)]
            else:
                kept = [*left[:2], *right[:2]]
        else:  # there is no largest value
            output, kept = rows.new_zeros(0, weight.shape[0]), []
        ctx.save_for_backward(*_needed(kept, needs))
        if bias is not None:
            output += bias.to(how.dtype)
        return output.reshape(*input.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise StateError(
                f"backward(create_graph=True) through a linear layer in fp8: its gradient has no gradient. {_CURE}"
            )
        out = grad.reshape(-1, grad.shape[-1])
        with DisableAutocast():  # this may run in a region, whose autocast would cast the products
            into_bias = out.sum(0) if ctx.needs_input_grad[2] else None
            saved = ctx.saved_tensors  # asked once: a checkpoint computes them for each time
            found = _gradients(ctx, saved, out) if saved else [out.new_zeros(shape) for shape in ctx.shapes]
        return (*found, into_bias, None, None)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:  # noqa: ARG004
        raise StateError(f"forward-mode derivatives through a linear layer in fp8: it has none. {_CURE}")


def _needed(kept: Sequence[torch.Tensor | None], needs: Sequence[bool]) -> list[torch.Tensor | None]:
    """Leave out of ``kept``, first of the input, then of the weight, what no gradient needs: each needs the other."""
    half = len(kept) // 2
    return [*(t if needs[1] else None for t in kept[:half]), *(t if needs[0] else None for t in kept[half:])]


def _kept(ctx: Any, matrix: torch.Tensor, both: tuple[Scaled, Scaled] | None) -> list[torch.Tensor | None]:
    """Return what the backward reads of an operand: its cast along dimension 0, or the matrix, which it casts."""
    if both is None:
        return [matrix, None]
    kind, rest = type(both[1]), both[1][2:]
    ctx.made = lambda values, scale: kind(values, scale, *rest)
    return [*both[1][:2]]


def _gradients(ctx: Any, saved: Sequence[Any], out: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of input and weight, of what the forward saved and the gradient of the output (M, N)."""
    how, recipe = ctx.how, ctx.how.recipe
    for_input, for_weight = ctx.needs_input_grad[:2]
    into_input = into_weight = None
    once = None if recipe.casts_again else how.cast(out, 1, kind=recipe.gradient)
    both = how.cast_both(out, for_input and for_weight, recipe.gradient)
    if for_input:
        left = once or (both[0] if both else how.cast(out, 1, kind=recipe.gradient))
        right = (
            Scaled(saved[2], saved[3], recipe.scaling, 0).turned()
            if once
            else _again(ctx, saved[2:], recipe.weight_again)
        )
        into_input = how.multiply(left, right).reshape(ctx.shapes[0])
    if for_weight and not recipe.weight_gradient:
        into_weight = torch.mm(out.t(), saved[0])
    elif for_weight:
        turned = once or (both[1] if both else None)
        left = turned.turned() if turned else how.cast(out.t(), 1, kind=recipe.gradient)
        right = Scaled(saved[0], saved[1], recipe.scaling, 0) if once else _again(ctx, saved[:2], recipe.scaling)
        into_weight = how.multiply(left, right)
    return into_input, into_weight


def _again(ctx: Any, kept: Sequence[Any], scaling: str) -> Scaled:
    """Return an operand cast along dimension 0, of what :func:`_kept` has kept of it."""
    matrix, scale = kept
    made: Scaled = ctx.how.cast(matrix, 0, scaling) if scale is None else ctx.made(matrix, scale)
    return made
