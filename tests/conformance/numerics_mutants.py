"""What the clauses of tier ``numerics`` must notice."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from half_layers import half_layers
from mutants import Breaks, Mutant, also, patched, registered
from probe_mutants import Untried

from xamp import policy
from xamp.backends.cpu import CpuBackend
from xamp.casting import active, forward, node_numbers
from xamp.scaling import block, engine, masters
from xamp.sessions import pickles
from xamp.testing import recurrent
from xamp.values import arguments
from xamp.values.containers import cast_floats


class ForgetsTheLast(Untried):
    """Unscales all gradients but the last."""

    def unscale_(self, grads: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
        super().unscale_(grads[:-1], found_inf, inv_scale)


class UnscalesInBf16(CpuBackend):
    """Gradients come out of the scale through a shorter dtype."""

    def unscale_(self, grads: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
        super().unscale_(grads, found_inf, inv_scale)
        for grad in grads:
            grad.copy_(grad.bfloat16())


def another_level(name: str, **fields: Any) -> Breaks:
    """A row of the level table, with other fields."""
    row = dataclasses.replace(policy.LEVELS[name], **fields)
    return lambda: mock.patch.dict(policy._BY_ALIAS, {name.lower(): row})


@contextlib.contextmanager
def casts_kept_without_gradients() -> Iterator[None]:
    """Weights that were cast while gradients were off are used again where they are on."""
    kept: dict[int, torch.Tensor] = {}
    linear = torch.nn.functional.linear

    def cached(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if torch.is_autocast_enabled(x.device.type):
            if not torch.is_grad_enabled():
                kept[id(weight)] = weight.to(torch.get_autocast_dtype(x.device.type), copy=True)
            weight = kept.get(id(weight), weight)
        return linear(x, weight, bias)

    with mock.patch.object(torch.nn.functional, "linear", cached):
        yield


def shallow(value: Any, dtype: torch.dtype) -> Any:
    """Casts an output that is a tensor, and looks into no container."""
    if dtype is torch.float32:
        return value.float() if isinstance(value, torch.Tensor) else value
    return cast_floats(value, dtype)


@contextlib.contextmanager
def recomputed_outside_of_the_region() -> Iterator[None]:
    """What backward runs again does not find the region that it ran in."""
    with (
        mock.patch.object(active, "replay", return_value=None),
        mock.patch.object(active, "restore", return_value=None),
        mock.patch.object(node_numbers, "find", return_value=None),
    ):
        yield


@contextlib.contextmanager
def compared_before() -> Iterator[None]:
    """The references of the first seeds are computed before the fault is there, and no others are."""
    for seed in recurrent.SEEDS:
        recurrent._by_hand(recurrent.Stacked, seed)
    with mock.patch.object(recurrent, "MORE_SEEDS", range(0)):
        yield


def without_policy(made: Any, region: object, *, is_deep: bool) -> Any:
    """What puts a copy under the policy."""
    return made


def unscaled(self: Any) -> torch.Tensor:
    """Enters ``scale_loss`` and hands the loss through."""
    enter(self)
    return self._loss  # type: ignore[no-any-return]


enter = block.ScaledLoss.__enter__


def broken(name: str) -> Breaks:
    """By registering a class of this module."""
    return registered(f"{__name__}:{name}")


MUTANTS = [
    Mutant(
        "one gradient stays scaled", "numerics.gradients_near_fp64", registered(f"{__name__}:ForgetsTheLast"), "mutant"
    ),
    Mutant("unscales in bf16", "numerics.no_worse_than_by_hand", registered(f"{__name__}:UnscalesInBf16"), "mutant"),
    Mutant(
        "masters do not reach the parameters",
        "numerics.training_follows_fp32",
        patched(masters, "copy_back", lambda *_: None),
    ),
    Mutant("O0 has a loss scale", "numerics.o0_is_plain_torch", another_level("O0", loss_scale=1000.0)),
    Mutant(
        "backward recomputes outside of the region",
        "numerics.checkpointing_is_exact",
        recomputed_outside_of_the_region,
    ),
    Mutant("a cache of casts without gradients", "numerics.no_grad_then_grad", casts_kept_without_gradients),
    Mutant("a cache of casts without gradients", "numerics.validation_between_steps", casts_kept_without_gradients),
    Mutant("O1 is bf16", "numerics.inference", another_level("O1", dtype="bfloat16")),
    Mutant(
        "containers are not looked into",
        "numerics.outputs_are_fp32",
        patched(engine.Engine, "caster", staticmethod(lambda: shallow)),
    ),
    Mutant(
        "outputs are always fp32",
        "numerics.outputs_as_asked",
        patched(arguments, "output_dtype", lambda value: torch.float32),
    ),
    Mutant(
        "recurrent layers in fp16 under bf16, whose gradients vanish",
        "numerics.recurrent_training",
        also(compared_before, registered("operators_mutants:KeepsHalf"), half_layers),
        "mutant",
    ),
    Mutant(
        "recurrent layers in fp16 under bf16",
        "numerics.recurrent_dtypes",
        also(registered("operators_mutants:KeepsHalf"), half_layers),
        "mutant",
    ),
    Mutant("forward alone", "numerics.more_methods", patched(arguments, "methods", lambda value: ("forward",))),
    Mutant("copies are plain", "numerics.copies_run_the_policy", patched(forward, "_put_under_policy", without_policy)),
    Mutant("pickles are rounded", "numerics.pickles_are_plain", patched(pickles, "_in_fp32", lambda tensor: tensor)),
    Mutant(
        "the loss is not scaled",
        "numerics.vanishing_gradients",
        patched(block.ScaledLoss, "__enter__", unscaled),
    ),
]
