"""Tier fp8: linear layers in fp8, by each recipe that the device runs or rehearses.

A product is compared with the one in fp64 of the values as they were. Its error may be that of rounding both operands
exactly, by the recipe written out here in fp64, and of the sum and the result beyond that. So a device may round and
scale otherwise than xamp's defaults, but not worse.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim import SGD

import xamp
from xamp.testing.lane import Lane
from xamp.testing.tier import Tier
from xamp.values.recipes import RECIPES, Recipe

__all__ = ["Fp8"]

ROWS, INPUTS, OUTPUTS = 64, 128, 96
SUM = 2.0**-6
"""What a sum and its result may lose, as a part of the norm: bf16's rounding is 2^-9, fast sums are coarser."""
ROUNDED = 1.02
"""How much more than the exact rounding of both operands a product may lose: a scale may be rounded."""
LEARNED = 0.05
"""Allowed difference of the mean of the last losses from O4's, as a part of it. Measured on a CPU: 0.004."""
STEPS, LAST = 40, 10

each_recipe = pytest.mark.parametrize("recipe", RECIPES)


class Fp8(Tier):
    """Linear layers in fp8."""

    tier = "fp8"

    @each_recipe
    def test_products_run_in_fp8(self, lane: Lane, recipe: str) -> None:
        """A forward and its backward call the backend for each product that the recipe has in fp8, and for no other."""
        layer, x, out = _layer(lane, recipe)
        with _counted(lane) as products:
            layer(x).backward(out)
        assert products == [(ROWS, OUTPUTS), (ROWS, INPUTS), (OUTPUTS, INPUTS)][: 2 + RECIPES[recipe].weight_gradient]

    @each_recipe
    def test_products_near_fp64(self, lane: Lane, recipe: str) -> None:
        """Output and gradients are as near to fp64 as operands that are rounded exactly."""
        layer, x, out = _layer(lane, recipe)
        made = layer(x)
        made.backward(out)
        row, weight, found = RECIPES[recipe], layer.weight.detach(), layer.weight.grad
        near(lane, row, made, x.detach(), weight.t(), row.scaling, "e4m3")
        near(lane, row, x.grad, out, weight, row.weight_again, row.gradient)
        if row.weight_gradient:
            near(lane, row, found, out.t(), x.detach(), row.scaling, row.gradient)
        else:
            exact = _wide(out.t()) @ _wide(x)
            assert (_wide(found) - exact).norm() <= SUM * exact.norm()

    @each_recipe
    def test_weights_are_cast_anew(self, lane: Lane, recipe: str) -> None:
        """A weight that was doubled gives twice the output, and twice the gradient of the input."""
        layer, x, out = _layer(lane, recipe)
        found = []
        for _ in range(2):
            made = layer(x)
            made.backward(out)
            found.append((made.detach(), x.grad))
            x.grad = None
            with torch.no_grad():
                layer.weight.mul_(2)
        assert torch.equal(2 * found[0][0], found[1][0])
        assert torch.equal(2 * found[0][1], found[1][1])

    @each_recipe
    def test_no_largest_value(self, lane: Lane, recipe: str) -> None:
        """Zeros give zeros, no rows give none, and an inf gives nan in its row."""
        layer, x, _ = _layer(lane, recipe)
        for rows in (x.detach() * 0, x.detach()[:0]):
            made = layer(rows.requires_grad_())
            made.sum().backward()
            assert torch.equal(made.float(), torch.zeros(len(rows), OUTPUTS, device=lane.device))
            assert torch.equal(layer.weight.grad, torch.zeros_like(layer.weight))
            layer.weight.grad = None
        spoilt = x.detach().clone()
        spoilt[3, 5] = float("inf")
        assert layer(spoilt)[3].isnan().all()

    @each_recipe
    def test_learns_as_in_bf16(self, lane: Lane, recipe: str) -> None:
        """A small network ends at the loss that it has at O4."""
        _need(lane, recipe)
        wanted, found = (_losses(lane, **settings) for settings in ({}, {"fp8": recipe, "keep_bf16": ()}))
        assert wanted[-LAST:].mean() < 0.5 * wanted[:LAST].mean()
        assert abs(found[-LAST:].mean() / wanted[-LAST:].mean() - 1) <= LEARNED
        assert not torch.equal(found, wanted)


def _need(lane: Lane, recipe: str) -> None:
    lane.need("fp8", "O4")
    if recipe not in (*lane.can.fp8, *lane.can.fp8_rehearsed):
        lane.lacks(f"fp8 by the recipe {recipe}")


def _layer(lane: Lane, recipe: str) -> tuple[Any, Any, torch.Tensor]:
    """A layer in fp8, an input that wants a gradient, and a gradient of the output; values of very different sizes."""
    _need(lane, recipe)
    made = torch.Generator().manual_seed(5)

    def numbers(*shape: int) -> torch.Tensor:
        sizes = torch.exp2(torch.randint(-6, 7, (shape[0], 1), generator=made).float())
        return (torch.randn(*shape, generator=made) * sizes).to(lane.device)

    layer = nn.Linear(INPUTS, OUTPUTS, bias=False).to(lane.device)
    with torch.no_grad():
        layer.weight.copy_(numbers(OUTPUTS, INPUTS))
    settings: Any = {"level": "O4", "fp8": recipe, "keep_bf16": (), "cast_model_outputs": False, "verbosity": 0}
    xamp.initialize(layer, backend=str(lane), **settings)
    x, out = numbers(ROWS, INPUTS).bfloat16().requires_grad_(), numbers(ROWS, OUTPUTS).bfloat16()
    return layer, x, out


@contextlib.contextmanager
def _counted(lane: Lane) -> Iterator[list[tuple[int, ...]]]:
    """Note the shape of each product in fp8."""
    shapes: list[tuple[int, ...]] = []
    multiply = lane.backend.scaled_mm

    def counting(*args: Any) -> torch.Tensor:
        made = multiply(*args)
        shapes.append(tuple(made.shape))
        return made

    with mock.patch.object(lane.backend, "scaled_mm", counting):
        yield shapes


def _wide(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.detach().cpu().double()


def near(
    lane: Lane, recipe: Recipe, made: Any, left: torch.Tensor, right: torch.Tensor, scaling: str, kind: str
) -> None:
    """Assert that ``made`` is the product of ``left``, of format ``kind``, and ``right``, scaled by ``scaling``."""
    formats = {name: getattr(torch, dtype) for name, dtype in lane.backend.fp8_formats.items()}
    exact = _wide(left) @ _wide(right)
    rounded = (
        rounding(_wide(left), formats[kind], recipe.scaling) @ rounding(_wide(right).t(), formats["e4m3"], scaling).t()
    )
    allowed = ROUNDED * (rounded - exact).norm() + SUM * exact.norm()
    assert (_wide(made) - exact).norm() <= allowed, f"{tuple(left.shape)} by {tuple(right.shape)}: error"


def rounding(matrix: torch.Tensor, dtype: torch.dtype, scaling: str) -> torch.Tensor:
    """What is left of ``matrix``, in fp64, after a cast by ``scaling`` along its rows and back."""
    most = torch.finfo(dtype).max
    if scaling == "block":
        blocks = matrix.unflatten(1, (-1, 32))
        largest = torch.exp2(torch.floor(torch.log2(blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30))))
        unit = largest / 2.0 ** int(torch.tensor(most).log2())
        made: torch.Tensor = (blocks / unit).clamp(-most, most).float().to(dtype).double() * unit
        return made.flatten(1)
    largest = matrix.abs().amax(1, keepdim=True) if scaling == "row" else matrix.abs().amax()
    scale = most / largest.clamp(min=1e-12)
    if scaling != "tensor":
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    return (matrix * scale).clamp(-most, most).float().to(dtype).double() / scale


def _losses(lane: Lane, **settings: Any) -> torch.Tensor:
    """The losses of a small network at O4 under ``settings``, from the same weights and data each time."""
    made = torch.Generator().manual_seed(7)
    x = torch.randn(128, 64, generator=made)
    target = torch.tanh(x @ torch.randn(64, 32, generator=made) / 8)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=made) / 12)
    model.to(lane.device)
    optimizer = SGD(model.parameters(), lr=0.5, momentum=0.9)
    xamp.initialize(model, optimizer, "O4", backend=str(lane), verbosity=0, **settings)
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = (model(x.to(lane.device)) - target.to(lane.device)).square().mean()
        with xamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        found.append(loss.item())
    return torch.tensor(found)
