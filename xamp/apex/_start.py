"""Starts an engine under Apex's properties, for ``amp.initialize`` and for the handles of ``amp.init``."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from xamp.apex._engine import ApexEngine, ApexPolicy
from xamp.apex._properties import Properties
from xamp.casting.forward import is_under_policy
from xamp.errors import StateError
from xamp.policy import LARGEST_SCALE, SMALLEST_SCALE
from xamp.registry import device_in_use, registry
from xamp.sessions import checks
from xamp.sessions.session import find_session
from xamp.sessions.set_up import Arguments, set_up

__all__ = ["Scaling", "start_engine"]


@dataclasses.dataclass(frozen=True)
class Scaling:
    """The settings of the loss scales."""

    num_losses: int = 1
    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_loss_scale: float = SMALLEST_SCALE
    max_loss_scale: float = 2.0**24

    @classmethod
    def of(cls, given: dict[str, Any]) -> Scaling:
        return cls(
            given["num_losses"],
            given["dynamic_init_scale"],
            given["scale_growth_factor"],
            given["scale_backoff_factor"],
            given["scale_window"],
            given["min_loss_scale"] or SMALLEST_SCALE,
            given["max_loss_scale"] or LARGEST_SCALE,
        )


def start_engine(
    arguments: Arguments, properties: Properties, scaling: Scaling, output_dtype: torch.dtype | None = None
) -> ApexEngine:
    """Put models and optimizers under ``properties``. A call that raises changes none of them."""
    device = checks.device_of(arguments.models, arguments.optimizers) or device_in_use.device()
    backend = registry.resolve("auto", device.type)
    policy = _policy(properties, scaling, output_dtype)
    checks.check_capabilities(backend, device, policy)
    arguments = dataclasses.replace(arguments, given=[m for m in arguments.given if not _is_already_under(m, policy)])
    if policy.casts_parameters:
        checks.check_not_inside(arguments.given, policy)
    undo = arguments.undo
    try:
        engine = set_up(policy, backend, device, arguments, ApexEngine)
        assert isinstance(engine, ApexEngine)
        return (engine, undo.before.clear())[0]  # type: ignore[func-returns-value]  # see xamp.initialize
    except BaseException:
        undo.unwind()
        raise


def _is_already_under(model: nn.Module, policy: ApexPolicy) -> bool:
    """Whether an earlier call put ``model`` under exactly this policy.

    Raises:
        StateError: ``model`` is under another policy, or is a copy of a model that is under one.
    """
    if not is_under_policy(model):
        return False
    found = find_session(model)
    if found is None or found.policy != policy:
        raise StateError(
            f"amp.initialize(opt_level={policy.level!r}): this {type(model).__name__} was given to amp.initialize "
            "before, or is a copy of a model that was, and runs under another policy. Call xamp.session(model).close() "
            "first, or pass a plain model."
        )
    return True


def _policy(properties: Properties, scaling: Scaling, output_dtype: torch.dtype | None) -> ApexPolicy:
    cast: torch.dtype | None = properties.cast_model_type or None
    lower = cast in (torch.float16, torch.bfloat16)
    patched = properties.patch_type if properties.patch_torch_functions else torch.float32
    dynamic = properties.loss_scale == "dynamic"
    if cast is not None and output_dtype is None:
        output_dtype = torch.float32
    return ApexPolicy(
        level=properties.opt_level,
        dtype=cast if cast is not None and lower else patched,
        casts_parameters=lower,
        autocast=False,
        input_dtype=cast,
        master_weights=bool(properties.master_weights),
        keep_batchnorm_fp32="affine" if properties.keep_batchnorm_fp32 else False,
        keep_fp32=(),
        output_dtype=output_dtype,
        methods=("forward",),
        dynamic=dynamic,
        static_scale=1.0 if dynamic else properties.loss_scale,
        checks=dynamic,
        op_policy="native",
        fused=False,
        patches=bool(properties.patch_torch_functions),
        **dataclasses.asdict(scaling),
    )
