"""The recipes of fp8 as data, and how arguments name them.

Covers: xamp.values.recipes.
"""

from __future__ import annotations

from typing import Any

import pytest

from xamp.errors import PolicyError
from xamp.policy import Request
from xamp.values import recipes
from xamp.values.recipes import GAINS_FROM, RECIPES


def test_each_recipe_is_what_the_guide_says() -> None:
    rows = {name: (r.scaling, r.weight_again, r.gradient, r.weight_gradient, r.multiple) for name, r in RECIPES.items()}
    assert rows == {
        "tensorwise": ("tensor", "tensor", "e5m2", True, 16),
        "rowwise": ("row", "row", "e4m3", True, 16),
        "rowwise_gw_hp": ("row", "tensor_power", "e4m3", False, 16),
        "mxfp8": ("block", "block", "e4m3", True, 32),
    }
    assert [name for name, recipe in RECIPES.items() if not recipe.casts_again] == ["tensorwise"]
    assert {recipe.name: 4096 for recipe in RECIPES.values()} == GAINS_FROM


@pytest.mark.parametrize("value", ["auto", " Rowwise ", "MXFP8"])
def test_names_are_read_as_people_write_them(value: str) -> None:
    assert recipes.named(value) == value.strip().lower()


@pytest.mark.parametrize("value", ["", "fp8", True, 8, None, b"rowwise"])
def test_what_is_no_recipe(value: Any) -> None:
    choices = "Choices: None, 'auto', 'tensorwise', 'rowwise', 'rowwise_gw_hp', 'mxfp8'."
    with pytest.raises(PolicyError) as error:
        recipes.named(value, call="here")
    assert str(error.value) == f"here(fp8={value!r}): no such recipe. {choices}"


def test_what_a_request_comes_to() -> None:
    assert recipes.read(Request("fp8"), True, True) == ("auto", None)
    assert recipes.read(Request("fp8", fp8="mxfp8", keep_bf16=["a", "b"]), True, True) == ("mxfp8", ("a", "b"))
    assert recipes.read(Request("O4", fp8="rowwise", keep_bf16=()), False, True) == ("rowwise", ())


@pytest.mark.parametrize(
    ("request_", "spelt", "fits", "said"),
    [
        (Request("O4", keep_bf16="a"), False, True, "initialize(level='O4', keep_bf16='a'): names what stays in bf16"),
        (Request("O2", fp8="auto"), False, False, "initialize(level='O2', fp8='auto'): fp8 needs fp32 parameters"),
        (Request("fp8", dtype="fp16"), True, False, "initialize(level='fp8', fp8='auto', dtype='fp16'): fp8 needs"),
        (Request("fp8", op_policy="apex"), True, True, "initialize(level='fp8', fp8='auto', op_policy='apex'): Apex's"),
    ],
)
def test_what_does_not_fit_is_refused(request_: Request, spelt: bool, fits: bool, said: str) -> None:
    with pytest.raises(PolicyError) as error:
        recipes.read(request_, spelt, fits)
    assert str(error.value).startswith(said)


def test_what_autocast_takes() -> None:
    assert recipes.for_autocast("rowwise", None) == "rowwise"
    assert recipes.for_autocast("auto", "torch.bfloat16") == "auto"
    with pytest.raises(PolicyError, match=r"autocast\(dtype=torch.float16, fp8='auto'\): around layers in fp8"):
        recipes.for_autocast("auto", "torch.float16")
    with pytest.raises(PolicyError, match=r"autocast\(fp8='e4m3'\): no such recipe"):
        recipes.for_autocast("e4m3", None)
