"""Levels and overrides: what each request compiles to, what is refused, and what is said about it.

Covers: xamp.policy.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import xamp
from xamp.errors import PolicyError
from xamp.policy import LEVELS, Policy, Request, compile_policy, parse_level

HALF, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
NAMES = [(spelling, level.name) for level in LEVELS.values() for spelling in (level.name, *level.aliases)]


def compiled(level: str = "O1", **options: Any) -> Policy:
    row = parse_level(level)
    assert row is not None
    return compile_policy(Request(level=level, **options), row, ("portable", "native"))


# ---------------------------------------------------------------- levels


@pytest.mark.parametrize(
    ("level", "dtype", "casts", "autocast", "masters", "batchnorm", "scale", "checks"),
    [
        ("O0", FP32, False, False, False, True, 1.0, False),
        ("O1", HALF, False, True, False, None, "dynamic", True),
        ("O2", HALF, True, False, True, True, "dynamic", True),
        ("O3", HALF, True, False, False, False, 1.0, False),
        ("O4", BF16, False, True, False, None, 1.0, False),
        ("O5", BF16, True, False, True, True, 1.0, False),
    ],
)
def test_the_level_table_is_the_contracts(
    level: str,
    dtype: torch.dtype,
    casts: bool,
    autocast: bool,
    masters: bool,
    batchnorm: bool | None,
    scale: float | str,
    checks: bool,
) -> None:
    policy = compiled(level)
    assert (policy.level, policy.dtype) == (level, dtype)
    assert (policy.casts_parameters, policy.autocast, policy.master_weights) == (casts, autocast, masters)
    assert policy.keep_batchnorm_fp32 is batchnorm
    assert (policy.loss_scale, policy.checks, policy.scales) == (scale, checks, checks)
    assert policy.output_dtype is FP32


def test_the_aliases_are_the_contracts() -> None:
    aliases = {"O0": ("fp32",), "O1": ("amp-fp16",), "O2": (), "O3": ("fp16",), "O4": ("amp-bf16",), "O5": ()}
    assert {level.name: level.aliases for level in LEVELS.values()} == aliases


@pytest.mark.parametrize(("spelling", "name"), NAMES)
def test_each_spelling_names_its_level_in_any_case(spelling: str, name: str) -> None:
    for written in (spelling, spelling.upper(), spelling.lower(), f" {spelling} "):
        found = parse_level(written)
        assert found is not None
        assert found.name == name


@pytest.mark.parametrize("spelling", ["auto", "AUTO", " auto"])
def test_auto_is_left_to_the_device(spelling: str) -> None:
    assert parse_level(spelling) is None


@pytest.mark.parametrize("wrong", ["O6", "", "bf16", 1, None, True, ["O1"], b"O1"])
def test_an_unknown_level_is_refused_with_the_choices(wrong: object) -> None:
    with pytest.raises(PolicyError, match=r"no such level\. Choices: 'auto', 'O0', 'fp32', 'O1', 'amp-fp16'"):
        parse_level(wrong)


def test_a_zero_for_an_o_is_pointed_out() -> None:
    with pytest.raises(PolicyError, match=r"level='02'\).*letter O, not the digit zero"):
        parse_level("02")
    with pytest.raises(PolicyError) as other:
        parse_level("P2")
    assert "digit zero" not in str(other.value)


# ---------------------------------------------------------------- overrides

ACCEPTED: list[tuple[str, dict[str, Any], str, Any]] = [
    ("O1", {"loss_scale": "128.0"}, "loss_scale", 128.0),
    ("O1", {"loss_scale": 128}, "loss_scale", 128.0),
    ("O4", {"loss_scale": "dynamic"}, "loss_scale", "dynamic"),
    ("O4", {"loss_scale": " Dynamic "}, "loss_scale", "dynamic"),
    ("O2", {"loss_scale": "1e3"}, "static_scale", 1000.0),
    ("O2", {"loss_scale": "1"}, "checks", False),
    ("O1", {"loss_scale": 128.0}, "checks", True),
    ("O1", {"loss_scale": 128.0, "on_static_overflow": "step"}, "checks", False),
    ("O4", {"on_static_overflow": "skip"}, "checks", True),
    ("O1", {"on_static_overflow": "step"}, "checks", True),
    ("O1", {"dtype": "bfloat16"}, "dtype", BF16),
    ("O1", {"dtype": "torch.bfloat16"}, "dtype", BF16),
    ("O2", {"dtype": BF16}, "dtype", BF16),
    ("O5", {"dtype": "half"}, "dtype", HALF),
    ("O0", {"dtype": "fp32"}, "dtype", FP32),
    ("O2", {"keep_batchnorm_fp32": "False"}, "keep_batchnorm_fp32", False),
    ("O3", {"keep_batchnorm_fp32": "True"}, "keep_batchnorm_fp32", True),
    ("O3", {"keep_batchnorm_fp32": "true"}, "keep_batchnorm_fp32", True),
    ("O0", {"keep_batchnorm_fp32": True}, "keep_batchnorm_fp32", True),
    ("O2", {"keep_batchnorm_fp32": None}, "keep_batchnorm_fp32", True),
    ("O3", {"master_weights": "True"}, "master_weights", True),
    ("O2", {"master_weights": False}, "master_weights", False),
    ("O1", {"master_weights": "False"}, "master_weights", False),
    ("O2", {"cast_model_outputs": "bf16"}, "output_dtype", BF16),
    ("O2", {"cast_model_outputs": torch.float16}, "output_dtype", HALF),
    ("O2", {"cast_model_outputs": False}, "output_dtype", None),
    ("O2", {"cast_model_outputs": "False"}, "output_dtype", None),
    ("O2", {"cast_model_outputs": "false"}, "output_dtype", None),
    ("O2", {"cast_model_outputs": True}, "output_dtype", FP32),
    ("O2", {"cast_model_outputs": "True"}, "output_dtype", FP32),
    ("O1", {"keep_fp32": nn.LayerNorm}, "keep_fp32", (nn.LayerNorm,)),
    ("O1", {"keep_fp32": "head"}, "keep_fp32", ("head",)),
    ("O1", {"keep_fp32": ["head", nn.LayerNorm]}, "keep_fp32", ("head", nn.LayerNorm)),
    ("O1", {"keep_fp32": {"head"}}, "keep_fp32", ("head",)),
    ("O1", {"keep_fp32": None}, "keep_fp32", ()),
    ("O1", {"methods": "generate"}, "methods", ("forward", "generate")),
    ("O1", {"methods": ("generate", "forward")}, "methods", ("forward", "generate")),
    ("O1", {"methods": ()}, "methods", ("forward",)),
    ("O1", {"num_losses": "3"}, "num_losses", 3),
    ("O1", {"init_scale": "1024"}, "init_scale", 1024.0),
    ("O1", {"growth_factor": 4}, "growth_factor", 4.0),
    ("O1", {"backoff_factor": "0.25"}, "backoff_factor", 0.25),
    ("O1", {"growth_interval": 100.0}, "growth_interval", 100),
    ("O1", {"min_loss_scale": None}, "min_loss_scale", 1.0),
    ("O1", {"min_loss_scale": "128"}, "min_loss_scale", 128.0),
    ("O1", {"max_loss_scale": None}, "max_loss_scale", 2.0**24),
    ("O1", {"max_loss_scale": 2.0**15}, "max_loss_scale", 2.0**15),
    ("O1", {"fused": "auto"}, "fused", "auto"),
    ("O1", {"fused": "True"}, "fused", True),
    ("O1", {"fused": "false"}, "fused", False),
    ("O1", {"op_policy": "native"}, "op_policy", "native"),
]


@pytest.mark.parametrize(("level", "options", "name", "value"), ACCEPTED, ids=str)
def test_an_override_is_taken(level: str, options: dict[str, Any], name: str, value: object) -> None:
    found = getattr(compiled(level, **options), name)
    assert found == value
    assert type(found) is type(value)


def test_overrides_read_by_argparse_are_taken() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--level", "--loss-scale", "--keep-batchnorm-fp32"):
        parser.add_argument(name, default=None)
    given = parser.parse_args(["--level", "O2", "--loss-scale", "128.0", "--keep-batchnorm-fp32", "False"])
    model = nn.Linear(2, 2)
    xamp.initialize(model, **vars(given), verbosity=0)
    policy = xamp.session(model).policy
    assert (policy.loss_scale, policy.keep_batchnorm_fp32, policy.level) == (128.0, False, "O2")


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("O1", {"loss_scale": "much"}, r"loss_scale='much'\): a loss scale is 'dynamic' or a finite number above 0"),
    ("O1", {"loss_scale": 0}, r"loss_scale=0\): a loss scale"),
    ("O1", {"loss_scale": -1.0}, r"loss_scale=-1\.0\)"),
    ("O1", {"loss_scale": float("inf")}, r"loss_scale=inf\)"),
    ("O1", {"loss_scale": "nan"}, r"loss_scale='nan'\)"),
    ("O1", {"loss_scale": True}, r"loss_scale=True\)"),
    ("O1", {"loss_scale": []}, r"loss_scale=\[\]\)"),
    ("O1", {"dtype": "int8"}, r"dtype='int8'\): not a dtype that mixed precision works in\. Choices: torch\.float16"),
    ("O1", {"dtype": torch.float64}, r"dtype=torch\.float64\): not a dtype"),
    ("O1", {"dtype": 16}, r"dtype=16\): not a dtype"),
    ("O0", {"dtype": "fp16"}, r"level='O0', dtype='fp16'\): O0 is fp32 throughout\. Leave dtype out, or choose"),
    ("O1", {"dtype": "float32"}, r"O1 lowers to float16 or bfloat16\. For fp32 use level 'O0'"),
    ("O2", {"keep_batchnorm_fp32": "yes"}, r"keep_batchnorm_fp32='yes'\): must be True, False, 'True', 'False', or N"),
    ("O2", {"keep_batchnorm_fp32": 1}, r"keep_batchnorm_fp32=1\): must be True"),
    ("O1", {"keep_batchnorm_fp32": True}, r"at O1 all parameters are fp32 and the op policy chooses.*keep_fp32="),
    ("O4", {"keep_batchnorm_fp32": "False"}, r"keep_batchnorm_fp32='False'\): at O4 all parameters are fp32"),
    ("O2", {"master_weights": 0}, r"master_weights=0\): must be True"),
    ("O1", {"master_weights": "True"}, r"at O1 the parameters are fp32.*nothing to keep masters of.*use O2 or O5"),
    ("O0", {"master_weights": True}, r"at O0 the parameters are fp32"),
    ("O2", {"cast_model_outputs": "double"}, r"cast_model_outputs='double'\): not a dtype"),
    ("O2", {"cast_model_outputs": 0}, r"cast_model_outputs=0\): not a dtype"),
    ("O1", {"on_static_overflow": "raise"}, r"on_static_overflow='raise'\): no such choice\. Choices: 'skip', 'step'"),
    ("O1", {"op_policy": "mine"}, r"op_policy='mine'\): no such choice\. Choices: 'portable', 'native'"),
    ("O1", {"op_policy": None}, r"op_policy=None\): no such choice"),
    ("O1", {"fused": "maybe"}, r"fused='maybe'\): no such choice\. Choices: 'auto', 'one-pass', True, False"),
    ("O1", {"fused": 1}, r"fused=1\): no such choice"),
    ("O1", {"fused": None}, r"fused=None\): no such choice"),
    ("O1", {"keep_fp32": 3}, r"keep_fp32=3\): must be a list or tuple"),
    ("O1", {"keep_fp32": b"head"}, r"keep_fp32=b'head'\): must be a list or tuple"),
    ("O1", {"keep_fp32": [nn.Linear(1, 1)]}, r"is neither a module class, nor a qualified name such as"),
    ("O1", {"keep_fp32": ""}, r"'' is neither a module class"),
    ("O1", {"keep_fp32": [int]}, r"neither a module class"),
    ("O1", {"methods": ["no name"]}, r"'no name' is no method name\. Names look like \('forward', 'generate'\)"),
    ("O1", {"methods": 7}, r"methods=7\): must be a list or tuple"),
    ("O1", {"methods": [None]}, r"None is no method name"),
    ("O1", {"num_losses": 0}, r"num_losses=0\): must be a whole number above 0"),
    ("O1", {"num_losses": 1.5}, r"num_losses=1\.5\): must be a whole number"),
    ("O1", {"num_losses": "two"}, r"num_losses='two'\): must be a number"),
    ("O1", {"num_losses": None}, r"num_losses=None\): must be a number"),
    ("O1", {"num_losses": True}, r"num_losses=True\): must be a number"),
    ("O1", {"init_scale": 0}, r"init_scale=0\): must be a number above 1.17549e-38"),
    ("O1", {"init_scale": "inf"}, r"init_scale='inf'\): must be a number above 1.17549e-38"),
    ("O1", {"growth_factor": 1.0}, r"growth_factor=1\.0\): must be a number above 1"),
    ("O1", {"backoff_factor": 1.0}, r"backoff_factor=1\.0\): must be a number above 0 and below 1"),
    ("O1", {"growth_interval": 0.5}, r"growth_interval=0\.5\): must be a whole number above 0"),
    ("O1", {"min_loss_scale": 0.0}, r"min_loss_scale=0\.0\): must be a number above 1.17549e-38"),
    ("O1", {"max_loss_scale": float("nan")}, r"max_loss_scale=nan\): must be a number"),
    ("O1", {"min_loss_scale": 8, "max_loss_scale": 4}, r"the floor is above the ceiling\. Raise max_loss_scale"),
]


@pytest.mark.parametrize(("level", "options", "message"), REFUSED, ids=str)
def test_an_argument_that_cannot_be_right_is_refused(level: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        compiled(level, **options)
    with pytest.raises(PolicyError, match=message):  # and so it is by the call that users make
        xamp.initialize(nn.Linear(2, 2), level=level, verbosity=0, **options)


def test_level_and_opt_level_must_agree() -> None:
    model = nn.Linear(2, 2)
    xamp.initialize(model, opt_level="O4", verbosity=0)
    assert xamp.session(model).policy.level == "O4"
    xamp.initialize(other := nn.Linear(2, 2), level="O4", opt_level="O4", verbosity=0)
    assert xamp.session(other).policy.level == "O4"
    with pytest.raises(PolicyError, match=r"level='O1', opt_level='O2'\): two names for one thing"):
        xamp.initialize(nn.Linear(2, 2), level="O1", opt_level="O2")


# ---------------------------------------------------------------- the value


def test_a_policy_is_frozen_and_hashable() -> None:
    policy, same, other = compiled("O2"), compiled("O2"), compiled("O2", loss_scale=2.0)
    assert policy == same
    assert hash(policy) == hash(same)
    assert len({policy, same, other}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.level = "O3"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("level", "options", "line"),
    [
        ("O0", {}, "level O0, dtype fp32, op policy portable, loss scale static 1, outputs fp32"),
        ("O1", {}, "level O1, dtype fp16, op policy portable, loss scale dynamic from 65536, outputs fp32"),
        (
            "O5",
            {"keep_fp32": [nn.LayerNorm, "*.head"], "cast_model_outputs": False},
            "level O5, dtype bf16, parameters cast, fp32 master weights, batch norm fp32, kept fp32: LayerNorm, "
            "*.head, loss scale static 1, outputs as they come",
        ),
        (
            "O3",
            {"loss_scale": "128.0", "cast_model_outputs": "fp16"},
            "level O3, dtype fp16, parameters cast, loss scale static 128, outputs fp16",
        ),
    ],
)
def test_a_policy_says_itself_in_one_line(level: str, options: dict[str, Any], line: str) -> None:
    assert str(compiled(level, **options)) == line


@pytest.mark.parametrize("level", ["fp8", "amp-fp8", " FP8 "])
def test_fp8_is_a_spelling_of_o4(level: str) -> None:
    assert parse_level(level) is LEVELS["O4"]
    assert compiled(level).fp8 == "auto"
    assert compiled(level, fp8="MXFP8").fp8 == "mxfp8"
    assert dataclasses.replace(compiled(level), fp8=None) == compiled("O4")


def test_no_fp8_and_no_recipe() -> None:
    assert compiled("O4").fp8 is None
    assert compiled("O4", fp8="rowwise").fp8 == "rowwise"
    assert "fp8" not in str(compiled("O4"))
    assert "linear layers in fp8 (rowwise)" in str(compiled("O4", fp8="rowwise"))
    with pytest.raises(
        PolicyError, match=r"initialize\(fp8=8\): no such recipe. Choices: None, 'auto', 'tensorwise', "
    ):
        compiled("O4", fp8=8)


def test_what_stays_in_bf16() -> None:
    assert compiled("fp8").keep_bf16 is None
    assert compiled("fp8", keep_bf16=()).keep_bf16 == ()
    assert compiled("fp8", keep_bf16="head").keep_bf16 == ("head",)
    with pytest.raises(PolicyError, match=r"initialize\(keep_bf16=8\)"):
        compiled("fp8", keep_bf16=8)
    with pytest.raises(PolicyError, match=r"level='O4', keep_bf16='head'\).*Leave keep_bf16 out, or use level='fp8'"):
        compiled("O4", keep_bf16="head")


def test_fp8_needs_bf16_around_it() -> None:
    with pytest.raises(PolicyError, match=r"level='fp8', fp8='auto', dtype=.*fp16.*which is level 'O4'"):
        compiled("fp8", dtype="fp16")
    with pytest.raises(PolicyError, match=r"level='O1', fp8='auto', dtype=.*bf16.*which is level 'O4'"):
        compiled("O1", fp8="auto", dtype="bf16")


@pytest.mark.parametrize("name", ["keep_fp32", "keep_bf16", "methods"])
def test_what_can_be_read_once_only_is_refused(name: str) -> None:
    level = "fp8" if name == "keep_bf16" else "O1"
    wrong: Any = {name: iter(["head"])}
    with pytest.raises(PolicyError, match=rf"{name}=<list_iterator.*: must be a list or tuple"):
        xamp.initialize(nn.Linear(2, 2), level=level, verbosity=0, **wrong)
