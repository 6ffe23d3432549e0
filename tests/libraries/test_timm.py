"""timm: five families of models, its averages of weights, its optimizers.

Covers: xamp.casting.forward, xamp.averages, xamp.scaling.optimizer.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from library_loop import LEVELS, Case, by_hand, check, distance, library
from torch import nn
from torch.nn.functional import cross_entropy

import xamp

timm = library("timm")
optimizers = library("timm.optim")
averages = library("timm.utils")

SMALL = {"num_classes": 4}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("vit_tiny_patch16_224", {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 2}),
    "swin": (
        "swin_tiny_patch4_window7_224",
        {"img_size": 32, "embed_dim": 16, "depths": (1, 2), "num_heads": (1, 2), "window_size": 4},
    ),
    "resnet": ("resnet18", {"layers": (1, 1, 1, 1), "channels": (8, 8, 16, 16)}),
    "convnext": ("convnext_atto", {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)}),
    "efficientnet": ("tinynet_e", {}),
}


def make(family: str) -> nn.Module:
    name, options = FAMILIES[family]
    made: nn.Module = timm.create_model(name, **SMALL, **options)
    return made


def images() -> dict[str, Any]:
    return {"x": torch.randn(4, 3, 32, 32)}


def loss(output: Any, batch: dict[str, Any]) -> torch.Tensor:
    return cross_entropy(output.float(), torch.tensor([0, 1, 2, 3]))


CASES = [
    # A scale from which four steps need not first come down.
    Case("timm", family, lambda family=family: make(family), images, loss, options={"init_scale": 64.0})  # type: ignore[misc]
    for family in FAMILIES
]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "case",
    [case if str(case) in ("vit", "resnet") else pytest.param(case, marks=pytest.mark.thorough) for case in CASES],
    ids=str,
)
def test_trains_as_by_hand_and_resumes(case: Case, level: str) -> None:
    check(case, level)


@pytest.mark.parametrize("level", LEVELS)
def test_an_average_made_before_initialize(level: str) -> None:
    case = CASES[0]
    model, optimizer = case.start()
    average = averages.ModelEmaV2(model, decay=0.5)
    xamp.initialize(model, optimizer, level, verbosity=0, op_policy="native")
    for step in range(3):
        batch = case.inputs(step)
        optimizer.zero_grad()
        with xamp.scale_loss(case.loss(model(**batch), batch), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        average.update(model)
    start, _ = case.start()
    expected = {name: p.detach().clone() for name, p in start.named_parameters()}
    for weights in by_hand(case, level, steps=3):
        expected = {name: 0.5 * expected[name] + 0.5 * weights[name] for name in expected}
    assert distance(dict(average.module.named_parameters()), expected) < 1e-5
    assert average.module(**batch).dtype is torch.float32


def tiny() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


SAMPLE = ("adabelief", "adopt", "lamb", "lion", "nadamw", "rmsproptf", "sgdw")
COMPILED = "kron"  # it compiles its steps, which takes a minute


def names() -> list[str]:
    """All but those that other libraries, or a GPU, are needed for."""
    found = {name for name in optimizers.list_optimizers() if not name.startswith(("bnb", "fused", "apex"))}
    return sorted(found - {COMPILED})


@pytest.mark.parametrize(
    "name", [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.thorough) for name in names()]
)
def test_an_optimizer_trains_as_by_hand(name: str) -> None:
    def optimizer(params: Any) -> Any:
        return optimizers.create_optimizer_v2(list(params), opt=name, lr=0.01)

    def squares(output: Any, batch: dict[str, Any]) -> torch.Tensor:
        return output.float().square().mean()  # type: ignore[no-any-return]

    case = Case("timm", f"optimizer {name}", tiny, lambda: {"input": torch.randn(5, 6)}, squares, optimizer)
    try:
        by_hand(case, "O0", steps=2)
    except Exception as error:
        pytest.skip(f"does not train in fp32: {type(error).__name__}: {error}")
    for level in ("O1", "O2", "O4", "O5"):
        check(case, level)
