"""Which recipes of fp8 a device is found to have: those whose products are right, by its own methods.

Covers: xamp.registry.fp8_trials.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from xamp.backend_kit import fp8_recipes
from xamp.contract import Backend, BackendSpec
from xamp.registry import fp8_trials
from xamp.torch_compat import scaled
from xamp.values.recipes import RECIPES

CPU = torch.device("cpu")


class Device(Backend):
    """A device with one fault: in the products or casts of some scaling."""

    def __init__(self, spoil: Any = None, refuse: Any = None) -> None:
        super().__init__(BackendSpec("device", ("cpu",), "tests:Device"))
        self.spoil, self.refuse = spoil, refuse

    def to_fp8(self, matrix: torch.Tensor, kind: str, scaling: str, axis: int) -> Any:
        if self.refuse is not None and self.refuse(kind, scaling):
            raise OSError("no such kernel")
        return super().to_fp8(matrix, kind, scaling, axis)

    def scaled_mm(self, left: Any, right: Any, dtype: torch.dtype, fast: bool) -> torch.Tensor:
        made: torch.Tensor = (left.wide() @ right.wide()).to(dtype)
        return made * 1.1 if self.spoil is not None and self.spoil(left, right, fast) else made


def test_a_right_device_has_all() -> None:
    assert fp8_recipes(Device(), CPU) == tuple(RECIPES)


@pytest.mark.parametrize(
    ("refuse", "left"),
    [
        (lambda kind, scaling: kind == "e5m2", ("rowwise", "rowwise_gw_hp", "mxfp8")),
        (lambda kind, scaling: scaling == "row", ("tensorwise", "mxfp8")),
        (lambda kind, scaling: scaling == "block", ("tensorwise", "rowwise", "rowwise_gw_hp")),
        (lambda kind, scaling: True, ()),
    ],
    ids=["e5m2", "rows", "blocks", "all"],
)
def test_a_recipe_that_is_refused_is_not_there(refuse: Any, left: tuple[str, ...]) -> None:
    assert fp8_recipes(Device(refuse=refuse), CPU) == left


@pytest.mark.parametrize(
    ("spoil", "left"),
    [
        (lambda left, right, fast: fast, ()),
        (lambda left, right, fast: right.scaling == "tensor_power", ("tensorwise", "rowwise", "mxfp8")),
        (lambda left, right, fast: left.values.shape[0] == 96, ("rowwise_gw_hp",)),
        (lambda left, right, fast: left.scaling == "block" and left.values.shape[1] == 96, tuple(RECIPES)[:3]),
    ],
    ids=["forward", "rowwise_gw_hp's second", "gradients of weights", "gradients of inputs"],
)
def test_a_recipe_with_a_wrong_product_is_not_there(spoil: Any, left: tuple[str, ...]) -> None:
    assert fp8_recipes(Device(spoil=spoil), CPU) == left


def test_what_is_multiplied_in_fp32_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Backend(BackendSpec("plain", ("cpu",), "tests:Device"))
    fp8 = scaled.tried(CPU)
    assert fp8_recipes(plain, CPU) == (tuple(RECIPES)[:3] if fp8["tensor"] and fp8["row"] else ())
    monkeypatch.setattr(scaled, "tried", lambda *_: None)
    monkeypatch.setitem(scaled._runs, ("cpu", "row"), False)
    assert fp8_recipes(plain, CPU) == (("tensorwise",) if fp8["tensor"] else ())
    monkeypatch.setitem(scaled._runs, ("cpu", "tensor"), False)
    assert fp8_recipes(plain, CPU) == ()


def test_a_device_without_memory_says_nothing() -> None:
    def full(*_: object) -> bool:
        raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        fp8_recipes(Device(refuse=full), CPU)


def test_the_numbers_are_exact_in_both_formats() -> None:
    for shape in ((32, 64), (96, 64), (32, 96)):
        made = fp8_trials._numbers(*shape, CPU)
        for axis in (0, 1):
            blocks = made.unflatten(axis, (-1, 32)).abs().amax(axis + 1)
            assert torch.equal(blocks, torch.full_like(blocks, 7.0))
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            assert torch.equal((made * 64).to(dtype).float(), made.float() * 64)


class CastsBoth(Device):
    """A device with one operator that casts along both dimensions, which may be wrong along one of them."""

    def __init__(self, wrong: int | None = None) -> None:
        super().__init__()
        self.wrong = wrong

    def to_fp8_both(self, matrix: torch.Tensor, kind: str, scaling: str) -> Any:
        pair = [self.to_fp8(matrix, kind, scaling, axis) for axis in (1, 0)]
        if self.wrong is not None:
            pair[self.wrong] = pair[self.wrong]._replace(scale=pair[self.wrong].scale * 0 + 1)
        return tuple(pair)


@pytest.mark.parametrize("wrong", [0, 1])
def test_an_operator_that_casts_along_both_dimensions_is_tried(wrong: int) -> None:
    assert fp8_recipes(CastsBoth(), CPU) == tuple(RECIPES)
    assert fp8_recipes(CastsBoth(wrong), CPU) == ("tensorwise", "rowwise_gw_hp")  # they do not ask it
