"""The checks of ``initialize`` on optimizers. Like those of :mod:`xamp.sessions.checks`, each changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from xamp.contract import Backend
from xamp.errors import PolicyError, StateError, UnsupportedPolicy
from xamp.policy import Policy, levels_where
from xamp.scaling.fused import list_refusal
from xamp.scaling.masters import LOWER, is_lowered
from xamp.scaling.optimizer import is_zero
from xamp.scaling.ranks import is_dtensor, is_shard
from xamp.sessions import foreign

__all__ = [
    "check_not_sharded_since",
    "check_not_shared",
    "check_optimizers",
    "check_owned",
    "check_stepped_rightly",
    "is_plain",
]


def check_optimizers(optimizers: Sequence[Optimizer], models: Sequence[nn.Module], policy: Policy) -> None:
    """Refuse optimizers that cannot be right.

    Raises:
        PolicyError: an optimizer holds none of the models' parameters, or fp16 or bf16 parameters of no model; or its
            ``eps`` rounds to zero; or two optimizers share a parameter.
        UnsupportedPolicy: an optimizer wraps another one whose groups masters cannot enter, or works on copies.
    """
    check_owned(optimizers, models)
    if policy.manages_gradients:
        check_not_shared(optimizers, policy)
    known = {id(p) for model in models for p in model.parameters()}
    for optimizer in optimizers:
        foreign.refuse_optimizer(optimizer, policy)
        params = [p for group in optimizer.param_groups for p in group["params"]]
        if is_zero(optimizer) and policy.manages_gradients:
            _check_zero(optimizer, policy)
        elif policy.master_weights:
            _check_no_inner_optimizer(optimizer, policy)
        if any(p.dtype in LOWER for p in params if id(p) not in known):
            raise PolicyError(
                f"initialize: this {type(optimizer).__name__} holds a half-precision parameter that is in no model "
                "given. Keep it fp32."
            )
        if policy.casts_parameters and not policy.master_weights:
            _check_eps(optimizer, policy)


def check_not_shared(optimizers: Sequence[Optimizer], policy: Policy) -> None:
    """Refuse a parameter that two optimizers hold, because each would unscale its gradient and step its master.

    Raises:
        PolicyError: two optimizers hold the same parameter.
    """
    holder: dict[int, int] = {}
    for index, optimizer in enumerate(optimizers):
        for param in (p for group in optimizer.param_groups for p in group["params"]):
            other = holder.setdefault(id(param), index)
            if other != index:
                unmanaged = levels_where(lambda row: not row.manages_gradients)
                raise PolicyError(
                    f"initialize(level={policy.level!r}): optimizers[{other}] and optimizers[{index}] hold the same "
                    f"parameter, of shape {tuple(param.shape)}, and two would unscale its gradient. Give each "
                    "parameter to one optimizer, or use a level without loss scaling and masters "
                    f"({', '.join(unmanaged)})."
                )


def check_owned(optimizers: Sequence[Optimizer], models: Sequence[nn.Module]) -> None:
    """Refuse an optimizer that belongs to another model.

    Raises:
        PolicyError: it holds none of the models' parameters.
    """
    known = {id(p) for model in models for p in model.parameters()}
    for optimizer in optimizers:
        if not any(id(p) in known for group in optimizer.param_groups for p in group["params"]):
            raise PolicyError(
                f"initialize: this {type(optimizer).__name__} holds no parameter of the models given. Make it from "
                "model.parameters() of the very model, after moving that to its device."
            )


def check_not_sharded_since(optimizers: Sequence[Optimizer], policy: Policy) -> None:
    """Refuse optimizers of a model that was cast by ``initialize`` without them, and then sharded.

    Raises:
        StateError: a parameter is in the lower dtype, and no master can have the digits that it lost.
    """
    for param in (p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]):
        sharded = is_dtensor(param) or is_shard(param)
        if policy.casts_parameters and sharded and param.dtype in LOWER and not is_lowered(param):
            raise StateError(
                f"initialize(level={policy.level!r}): the model was cast by an earlier initialize and sharded since, "
                "so that its parameters are new ones, and rounded. Shard first, then make the optimizer from "
                "model.parameters(), then give both to one initialize call."
            )


def check_stepped_rightly(optimizer: Optimizer, backend: Backend, policy: Policy) -> None:
    """Refuse an optimizer whose step would be wrong on the backend.

    Raises:
        UnsupportedPolicy: the device's framework made the optimizer, and the level makes the copies wrong that it keeps
            of its parameters; or the optimizer is fused, and its kernel does not take the parameters' storage format;
            or it steps lists of parameters of which some are DTensors.
    """
    name = type(optimizer).__name__
    if why := backend.optimizer_refusal(optimizer, casts=policy.casts_parameters) or list_refusal(optimizer):
        raise UnsupportedPolicy(f"initialize(level={policy.level!r}): {name} {why}")
    if any(group.get("fused") is True for group in optimizer.param_groups) and not is_plain(optimizer, backend):
        raise UnsupportedPolicy(
            f"initialize(level={policy.level!r}): {name} was made with fused=True, whose kernel takes no parameter in "
            "a storage format of the device's own, as this one holds. Make it without fused=True, or cast the "
            "parameters to the usual format first."
        )


def is_plain(optimizer: Optimizer, backend: Backend) -> bool:
    """Return whether all parameters of ``optimizer`` are in the storage format that every operator takes."""
    return all(backend.plain(p) is p for group in optimizer.param_groups for p in group["params"])


def _check_no_inner_optimizer(optimizer: Optimizer, policy: Policy) -> None:
    """Refuse an optimizer around one with groups of its own, which would keep the lowered parameters and never move."""
    outer = {id(group["params"]) for group in optimizer.param_groups}
    for name, inner in vars(optimizer).items():
        if isinstance(inner, Optimizer) and any(id(group["params"]) not in outer for group in inner.param_groups):
            without = levels_where(lambda row: not row.master_weights)
            raise UnsupportedPolicy(
                f"initialize(level={policy.level!r}): {type(optimizer).__name__}.{name} is another optimizer with "
                "parameter groups of its own, in which masters cannot take the parameters' places. Levels for it: "
                f"{', '.join(without)}."
            )


def _check_zero(optimizer: Any, policy: Policy) -> None:
    """Refuse a ZeroRedundancyOptimizer that steps in the backward, or keeps the parameters in buckets of its own."""
    if optimizer._overlap_with_ddp:
        raise UnsupportedPolicy(
            f"initialize(level={policy.level!r}): ZeroRedundancyOptimizer(overlap_with_ddp=True) steps in the "
            "backward, where gradients are still scaled. Make it without overlap_with_ddp."
        )
    if optimizer.parameters_as_bucket_view and policy.master_weights:
        raise UnsupportedPolicy(
            f"initialize(level={policy.level!r}): ZeroRedundancyOptimizer(parameters_as_bucket_view=True) lays the "
            "model's parameters out for fp32, and this level casts them. Make it without parameters_as_bucket_view."
        )


def _check_eps(optimizer: Optimizer, policy: Policy) -> None:
    if getattr(optimizer, "steps_in_fp32", False):
        return
    for group in optimizer.param_groups:
        eps = group.get("eps")
        if isinstance(eps, float) and eps > 0 and float(torch.tensor(eps, dtype=policy.dtype)) == 0.0:
            raise PolicyError(
                f"initialize(level={policy.level!r}): {type(optimizer).__name__}(eps={eps:g}) steps {policy.dtype} "
                "parameters, where that eps is zero, and would divide by zero. Pass eps=1e-4 or larger, use SGD, or a "
                f"level with fp32 master weights ({', '.join(levels_where(lambda row: row.master_weights))})."
            )
