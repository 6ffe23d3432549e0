"""What other libraries wrap around models and optimizers, and those of them that do part of xamp's work.

They are known by the modules that their classes come from; nothing is imported. A user's subclass counts too.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from xamp.errors import UnsupportedPolicy
from xamp.policy import Policy, levels_where, listed

__all__ = ["keeps_own_state", "optimizer_in", "refuse", "refuse_inside", "refuse_optimizer", "unwrap"]


class _Library(NamedTuple):
    """Classes of one library, whose full names, with their modules, begin with one of ``paths``."""

    name: str
    paths: tuple[str, ...]
    why: str  # what such an object does that xamp would do too; the end of "it ..."
    cure: str


_ENGINES = (
    _Library(
        "DeepSpeed",
        ("deepspeed.runtime.", "accelerate.utils.deepspeed"),
        "casts the model, scales the loss and keeps fp32 masters by itself",
        'Choose the precision in its config ("fp16" or "bf16": {"enabled": true}) and leave xamp.initialize out; or '
        "leave deepspeed.initialize out, and shard with torch's fully_shard",
    ),
    _Library(
        "Megatron",
        (
            *("megatron.core.optimizer", "megatron.optimizer", "megatron.core.distributed"),
            *("megatron.model.distributed", "megatron.legacy.model.distributed", "accelerate.utils.megatron_lm"),
            *("megatron.core.transformer.module.Float16Module", "megatron.model.module.Float16Module"),
        ),
        "scales the loss, unscales gradients of its own buffers and keeps fp32 masters by itself",
        "Choose the precision with its --fp16 or --bf16 and leave xamp.initialize out; or give xamp a plain "
        "torch.optim.Optimizer over the model",
    ),
    _Library(
        "ColossalAI",
        ("colossalai.zero.", "colossalai.amp.", "colossalai.booster.", "colossalai.interface."),
        "scales the loss and keeps fp32 masters by itself",
        "Choose the precision in its Booster and leave xamp.initialize out; or give xamp the plain model and optimizer",
    ),
)
"""Never taken: at no level would only one of the two do the work."""

_STEPS_COPIES = (
    _Library(
        "torchao's CPUOffloadOptimizer",
        ("torchao.optim.cpu_offload", "torchao.prototype.low_bit_optim.cpu_offload"),
        "moves each gradient to the host during the backward, before xamp unscales it",
        "Use another optimizer",
    ),
    _Library(
        "apex's DistributedFusedAdam",
        ("apex.contrib.optimizers.distributed_fused_adam", "apex.contrib.optimizers.distributed_fused_lamb"),
        "reduces and keeps gradients in buffers of its own, where xamp does not unscale them",
        "Use torch's AdamW with fully_shard or ZeroRedundancyOptimizer",
    ),
)
"""Taken where xamp neither scales nor makes masters."""

_LOW_BITS = ("bitsandbytes.optim.", "torchao.optim.", "torchao.prototype.low_bit_optim.")
"""Optimizers that keep their state in 8 or 4 bits, with scales in fp32 beside it."""


def _is_from(found: object, paths: tuple[str, ...]) -> bool:
    """Return whether the class of ``found``, or one that it derives from, has a full name that begins so."""
    return _derives(type(found), paths)


def _derives(kind: type, paths: tuple[str, ...]) -> bool:
    return any(f"{cls.__module__}.{cls.__qualname__}".startswith(paths) for cls in kind.__mro__)


def _library_of(found: object, libraries: Iterable[_Library]) -> _Library | None:
    return next((library for library in libraries if _is_from(found, library.paths)), None)


def refuse(argument: str, found: object) -> None:
    """Raise an UnsupportedPolicy where another mixed-precision engine has made ``found``, given as ``argument``."""
    library = _library_of(found, _ENGINES)
    if library is not None:
        raise UnsupportedPolicy(
            f"initialize({argument}=...): {type(found).__name__} is an object of {library.name}, which {library.why}. "
            f"Two engines would do this twice. {library.cure}."
        )


def refuse_inside(models: Iterable[nn.Module]) -> None:
    """Raise an UnsupportedPolicy where another mixed-precision engine holds a model, as DeepSpeed's ``engine.module``.

    An engine leaves no trace in its module that all its releases share, so this looks for engines among all objects.
    """
    kinds: list[Any] = [nn.Module]
    for kind in kinds:  # which grows
        kinds += type.__subclasses__(kind)
    paths = tuple(path for library in _ENGINES for path in library.paths)
    engines = [kind for kind in kinds if _derives(kind, paths)]
    inside = {id(module) for model in models for module in model.modules()}
    for found in gc.get_referrers(*engines) if engines else ():  # an object refers to its class
        if isinstance(found, nn.Module) and any(id(part) in inside for part in found.children()):
            refuse("models", found)


def refuse_optimizer(optimizer: Optimizer, policy: Policy) -> None:
    """Raise an UnsupportedPolicy where an optimizer would not step the gradients that xamp unscales, or its masters."""
    library = _library_of(optimizer, _STEPS_COPIES)
    if library is not None and policy.manages_gradients:
        takes = listed(levels_where(lambda row: not row.manages_gradients and not row.casts_parameters), "and")
        raise UnsupportedPolicy(
            f"initialize(level={policy.level!r}): {library.name} {library.why}. {library.cure}; {takes} take it."
        )
    if policy.casts_parameters and not policy.master_weights and keeps_own_state(optimizer) and optimizer.state:
        fp32 = levels_where(lambda row: row.master_weights)
        raise UnsupportedPolicy(
            f"initialize(level={policy.level!r}): {type(optimizer).__name__} has stepped, and keeps its state in 8 or "
            "4 bits with scales in fp32, which cannot be cast with the parameters. Call initialize before its first "
            f"step, or use a level at which it steps fp32 ({', '.join(fp32)})."
        )


def keeps_own_state(optimizer: object) -> bool:
    """Return whether ``optimizer`` keeps state in 8 or 4 bits, whose parts must stay in the dtypes that it chose."""
    return _is_from(optimizer, _LOW_BITS)


# ---------------------------------------------------------------- inside of what they wrap

_MODELS = ("_orig_mod", "_forward_module")  # of torch.compile, and of Lightning Fabric
_OPTIMIZERS = ("optimizer", "_optimizer")  # of accelerate, and of Lightning and Fabric


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel, DataParallel, torch.compile and Fabric's module."""
    while True:
        names = () if isinstance(model, torch.jit.ScriptModule) else _MODELS
        inner = next((found for name in names if (found := model._modules.get(name)) is not None), None)
        if isinstance(model, (DistributedDataParallel, DataParallel)):
            inner = model.module
        if inner is None:
            return model
        model = inner


def optimizer_in(wrapper: Any) -> Optimizer | None:
    """The optimizer that ``wrapper`` keeps in an attribute of one of the usual names; None where there is none."""
    held = getattr(wrapper, "__dict__", {}) if hasattr(wrapper, "zero_grad") else {}
    return next((held[name] for name in _OPTIMIZERS if isinstance(held.get(name), Optimizer)), None)
