"""torchao: its Float8Linear gives the same bits for the same recipe, and runs under xamp where it swapped layers.

Covers: xamp.sessions.fp8_layers, xamp.torch_compat.scaled.
"""

from __future__ import annotations

import importlib
import logging
import random
from typing import Any

import pytest
import torch
from torch import nn

import xamp

logging.getLogger("torchao").setLevel(logging.CRITICAL)  # of kernels for cards that are not there
float8: Any = pytest.importorskip("torchao.float8")
Float8Linear: Any = importlib.import_module("torchao.float8.float8_linear").Float8Linear
RECIPES = {"tensorwise": "tensorwise", "rowwise": "rowwise", "rowwise_gw_hp": "rowwise_with_gw_hp"}
SHAPES = 200


def config(recipe: str) -> Any:
    return float8.Float8LinearConfig.from_recipe_name(RECIPES[recipe])


def drawn(seed: int) -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    """A layer, an input and a gradient of the output, of shapes and sizes by chance."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    inputs, outputs = (16 * chance.randint(1, 12) for _ in range(2))
    rows = chance.choice([(chance.randint(1, 70),), (chance.randint(1, 5), chance.randint(1, 20)), (32,)])
    layer = nn.Linear(inputs, outputs, bias=False)
    with torch.no_grad():
        layer.weight.mul_(10 ** chance.uniform(-3, 3))
    x = torch.randn(*rows, inputs) * 10 ** chance.uniform(-3, 3)
    return layer, x.bfloat16(), (torch.randn(*rows, outputs) * 10 ** chance.uniform(-6, 3)).bfloat16()


def results(layer: Any, x: torch.Tensor, out: torch.Tensor) -> list[Any]:
    x = x.clone().requires_grad_()
    made = layer(x)
    made.backward(out)
    return [made.detach(), x.grad, layer.weight.grad.clone()]


@pytest.mark.parametrize("recipe", RECIPES)
def test_output_and_gradients_are_the_same_bits(recipe: str) -> None:
    for seed in range(SHAPES):
        layer, x, out = drawn(seed)
        wanted = results(Float8Linear.from_float(layer, config=config(recipe)), x, out)
        layer.weight.grad = None
        settings: Any = {"fp8": recipe, "keep_bf16": (), "cast_model_outputs": False, "verbosity": 0}
        made = results(xamp.initialize(layer, level="fp8", **settings), x, out)
        assert all(map(torch.equal, made, wanted)), (seed, tuple(x.shape), tuple(layer.weight.shape))


def losses(level: str, *, swapped: bool) -> list[float]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 16))
    if swapped:
        model = float8.convert_to_float8_training(model, config=config("tensorwise"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    xamp.initialize(model, optimizer, level, verbosity=0)
    made, found = torch.Generator().manual_seed(1), []
    for _ in range(60):
        x = torch.randn(32, 32, generator=made)
        optimizer.zero_grad()
        loss = (model(x) - x[:, :16].sin()).square().mean()
        with xamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_a_model_that_it_swapped_trains(level: str) -> None:
    plain, swapped = (losses(level, swapped=each) for each in (False, True))
    assert swapped != plain
    assert sum(swapped[-10:]) < 0.75 * sum(swapped[:10])
    assert sum(swapped[-10:]) == pytest.approx(sum(plain[-10:]), rel=0.02)


def test_layers_that_it_swapped_stay_its_own() -> None:
    model: Any = float8.convert_to_float8_training(
        nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), config=config("tensorwise")
    )
    xamp.initialize(model, level="fp8", keep_bf16=(), verbosity=0)
    assert {layer.why for layer in xamp.session(model).fp8} == {"torchao runs it"}
