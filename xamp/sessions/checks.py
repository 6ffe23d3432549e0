"""The checks of ``initialize``. A check changes nothing, and its error names the remedy.

Most raise a PolicyError where an argument cannot be right, an UnsupportedPolicy where this device or object cannot do
what was asked, and a StateError where something came too early or twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from xamp.casting.forward import is_under_policy
from xamp.casting.inputs import check_names
from xamp.contract import Backend
from xamp.distributed import ddp as ddps
from xamp.distributed.fsdp import is_sharded, sharded_params
from xamp.distributed.ranks import is_dtensor, is_part, is_running, is_shard
from xamp.errors import PolicyError, StateError, UnsupportedPolicy
from xamp.policy import Policy, levels_where, listed
from xamp.registry.plugins import ALIASES
from xamp.scaling.engine import Engine
from xamp.scaling.masters import LOWER, is_low_precision
from xamp.scaling.optimizer import state_of
from xamp.scaling.param_groups import is_zero
from xamp.sessions import foreign
from xamp.sessions.session import find_session
from xamp.torch_compat.torch_private.modules import default_to_fused_or_foreach
from xamp.values.shown import said

__all__ = [
    "as_list",
    "check_capabilities",
    "check_models",
    "check_not_initialized",
    "check_not_inside",
    "check_not_sharded_since",
    "check_op_policy",
    "check_optimizers",
    "check_stepped_rightly",
    "device_of",
    "has_usual_format",
]

_Kind = TypeVar("_Kind")
_UNCAST = levels_where(lambda row: not row.casts_parameters)
_WITH_MASTERS = levels_where(lambda row: row.master_weights)


def as_list(name: str, given: object, kind: type[_Kind]) -> list[_Kind]:
    """Return ``given`` as a list. It may be one ``kind``, or a list or tuple of them, each once.

    Raises:
        PolicyError: ``given`` is anything else.
        UnsupportedPolicy: another mixed-precision engine has made one of them.
    """
    try:
        items: list[Any] = list(given) if isinstance(given, (list, tuple)) else [given]
    except Exception as error:  # of a class derived from list
        raise PolicyError(f"initialize({name}=...): {type(given).__name__} cannot be read: {said(error)}.") from error
    for item in items:
        foreign.refuse(name, item)
        if not isinstance(item, kind):
            raise PolicyError(
                f"initialize({name}=...): {type(item).__name__} is no {kind.__module__}.{kind.__name__}. Pass one, or "
                "a list or tuple of them."
            )
    if len({id(item) for item in items}) < len(items):
        raise PolicyError(f"initialize({name}=...): the same object stands in the list twice. Give each once.")
    return items


def device_of(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> torch.device | None:
    """Return the device of the first parameter; None where there is no parameter.

    Raises:
        PolicyError: the parameters are on two device types, or have no memory.
    """
    owners = [*(m.parameters() for m in models), *(g["params"] for o in optimizers for g in o.param_groups)]
    devices = [p.device for params in owners for p in params]
    types = sorted({d.type for d in devices})
    if "meta" in types:
        raise PolicyError(
            "initialize: parameters are on meta, where they have no values. Give them memory with "
            "model.to_empty(device=...) and fill them, as with model.load_state_dict(...), before the call."
        )
    if len(types) > 1:
        raise PolicyError(
            f"initialize: the parameters are on two device types, {' and '.join(types)}, and xamp never moves a model. "
            "Move all of it to one with model.to(device) before making the optimizer."
        )
    return devices[0] if devices else None


def check_not_initialized(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> Engine | None:
    """Refuse models and optimizers that a session manages already.

    Returns:
        None; or an engine, if all ``models`` were given to it without an optimizer: ``optimizers`` are added to it.

    Raises:
        StateError: a model or optimizer is in a session, or a model is a copy or a part of one that is.
    """
    for optimizer in optimizers:
        if state_of(optimizer) is not None:
            raise StateError(
                f"initialize: this {type(optimizer).__name__} was given to initialize before. Each optimizer is given "
                "once; call xamp.session(optimizer).close() first to start over."
            )
    owners = [None if (found := find_session(model)) is None else found.engine for model in models]
    first = owners[0]
    open_to_more = first and first.enabled and not (first.states or first.is_handed_over())
    if optimizers and open_to_more and all(owner is first for owner in owners):
        return first
    for model, owner in zip(models, owners, strict=True):
        if owner is not None and owner.enabled:
            over = "make a new model" if owner.is_handed_over() else "call xamp.session(model).close() first"
            raise StateError(
                f"initialize: this {type(model).__name__} was given to initialize before"
                f"{', and a real apex.amp has it now' if owner.is_handed_over() else ''}. Give all optimizers in one "
                f"call, or {over} to start over."
            )
        if is_under_policy(model):
            raise StateError(
                f"initialize: this {type(model).__name__} is a copy or a part of a model that initialize has set up, "
                "and runs under its policy. Initialize a plain model."
            )
    return None


def check_capabilities(backend: Backend, device: torch.device, policy: Policy) -> None:
    """Raise an UnsupportedPolicy, which names what the device can do, where it cannot run ``policy``."""
    can = backend.capabilities(device)
    dtype = str(policy.dtype).removeprefix("torch.")
    if policy.level not in can.levels:
        raise UnsupportedPolicy(
            f"initialize(level={policy.level!r}): backend {backend.name!r} cannot run it on {device}. Levels there: "
            f"{', '.join(can.levels) or 'none'}.{can.why_not('float32') or can.why_not(dtype)}"
        )
    if dtype not in (*can.dtypes, "float32"):
        raise UnsupportedPolicy(
            f"initialize(dtype={policy.dtype}): backend {backend.name!r} cannot compute in it on {device}. Lower "
            f"dtypes there: {', '.join(can.dtypes) or 'none'}.{can.why_not(dtype)}"
        )


def check_op_policy(backend: Backend, device: torch.device, policy: Policy) -> None:
    """Raise an UnsupportedPolicy where the backend does not have the op policy.

    A backend has those that it declares. An alias of a backend, such as ``"apex"``, has only the one that it means.
    """
    own = ALIASES.get(backend.name)
    there = backend.capabilities(device).op_policies if own is None else (own,)
    if policy.op_policy not in there:
        raise UnsupportedPolicy(
            f"initialize(op_policy={policy.op_policy!r}): backend {backend.name!r} has {', '.join(there)}."
            + ("" if own is None else f" The name of that backend stands for these lists; leave backend={own!r} out.")
        )


def check_models(models: Sequence[nn.Module], given: Sequence[nn.Module], policy: Policy) -> None:
    """Refuse models, of which ``given`` are the wrappers, that cannot be put under ``policy``."""
    foreign.refuse_inside(models)
    if policy.excluded_inputs:
        found = (getattr(model, name, None) for model in models for name in policy.methods)
        check_names([method for method in found if callable(method)], policy.excluded_inputs)
    for model, outer in zip(models, given, strict=True):
        for name, param in model.named_parameters():
            _check_parameter(param, name, type(model).__name__, policy)
        if policy.casts_parameters:
            _check_castable(model, outer, policy)
    if policy.casts_parameters:
        check_not_inside(models, policy)


def _check_parameter(param: torch.Tensor, name: str, model: str, policy: Policy) -> None:
    named = f"parameter {name!r} of {model}"
    if isinstance(param, nn.parameter.UninitializedParameter):
        raise PolicyError(f"initialize: {named} has no shape yet. Run one batch through the model first.")
    if is_low_precision(param):
        raise StateError(
            f"initialize: {named} belongs to another session, which has cast it. Give all models that share it to one "
            "initialize call, or close that session first."
        )
    if getattr(param, "_in_backward_optimizers", None) and policy.manages_gradients:
        takes = listed(levels_where(lambda row: not row.manages_gradients), "and")
        raise UnsupportedPolicy(
            f"initialize(level={policy.level!r}): {named} has an optimizer that steps in the backward (torch's "
            f"_apply_optimizer_in_backward), where gradients are still scaled. Step it after the backward, or use "
            f"{takes}."
        )
    if param.dtype in LOWER and not (policy.master_weights and param.dtype == policy.dtype):
        short = str(param.dtype).removeprefix("torch.")
        takes = listed(levels_where(lambda row: row.master_weights and row.dtype == short))
        raise PolicyError(
            f"initialize(level={policy.level!r}): parameter {name!r} of {model} is {param.dtype}, and this level "
            "starts from fp32. Leave out .half() or .bfloat16(), or load the model with dtype=torch.float32, or call "
            f"model.float() before making the optimizer; the level casts. {takes or 'No level'} takes a model in "
            f"{short} as it is."
        )


def _check_castable(model: nn.Module, outer: nn.Module, policy: Policy) -> None:
    level, name = policy.level, type(model).__name__
    if any(isinstance(module, DistributedDataParallel) for module in outer.modules()):
        raise _wrapped(model, policy)
    for module in model.modules():
        if ddps.has_replicated(module):
            raise StateError(
                f"initialize(level={level!r}): replicate() has run this {name} already and has laid its buckets out "
                "for fp32. Call initialize before the first forward, or before replicate(); "
                f"{listed(_UNCAST, 'and')} take it as it is."
            )
        if is_sharded(module) and not policy.master_weights:
            raise StateError(
                f"initialize(level={level!r}): FSDP shards this {name} in fp32, and here the optimizer would step "
                f"{policy.dtype} parameters. Use {listed(_WITH_MASTERS)}: the fp32 shards are the masters, "
                "and FSDP gathers them in the lower precision."
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedPolicy(
                f"initialize(level={level!r}): {type(module).__name__} in this model is a ScriptModule, whose "
                f"parameters cannot be cast. Levels for it: {', '.join(_UNCAST)}. Or initialize the model before "
                "torch.jit.script."
            )
        if module is not model and is_under_policy(module):
            raise StateError(
                f"initialize(level={level!r}): a part of this {name} ({type(module).__name__}) was given to initialize "
                f"before. Close that session first, or give both models in one call at {listed(_UNCAST)}."
            )


def _wrapped(model: nn.Module, policy: Policy, from_before: str = "") -> StateError:
    cure = f"Give initialize the bare model and wrap what it returns{from_before}"
    if any(is_part(p) and not is_dtensor(p) for p in model.parameters()):  # it cannot be wrapped afterwards either
        cure = "With tensor parallelism use fully_shard(model, mesh=...) over its device_mesh in its place"
    return StateError(
        f"initialize(level={policy.level!r}): DistributedDataParallel already wraps this {type(model).__name__} and "
        f"has laid its buckets out for fp32. {cure}; {listed(_UNCAST, 'and')} take a wrapped one."
    )


def check_not_inside(models: Sequence[nn.Module], policy: Policy) -> None:
    """Raise a StateError where models lie in a wrapper that was not given itself.

    DDP and FSDP1 leave no module of theirs in them: a DDP reduces a parameter, or FSDP1 shards one and is in no model.
    """
    found = ddps.around(p for model in models for p in model.parameters()) if is_running() else {}
    reduced: set[int] = set().union(*found.values())
    known = {id(p) for p in sharded_params(module for model in models for module in model.modules())}
    for model in models:
        for name, param in model.named_parameters():
            if id(param) in reduced:
                raise _wrapped(model, policy, ", and delete a wrapper that was made before (del ddp)")
            if is_shard(param) and id(param) not in known:
                raise StateError(
                    f"initialize(level={policy.level!r}): FSDP shards parameter {name!r} of this "
                    f"{type(model).__name__} from outside, which initialize does not reach. Give xamp.initialize the "
                    f"FullyShardedDataParallel module itself; {listed(_UNCAST, 'and')} take what is inside too."
                )


def check_optimizers(optimizers: Sequence[Optimizer], models: Sequence[nn.Module], policy: Policy) -> None:
    """Refuse optimizers that cannot be right, or that ``policy`` cannot serve."""
    known = {id(p) for model in models for p in model.parameters()}
    held = [[p for group in optimizer.param_groups for p in group["params"]] for optimizer in optimizers]
    for optimizer, params in zip(optimizers, held, strict=True):
        if not any(id(p) in known for p in params):
            raise PolicyError(
                f"initialize: this {type(optimizer).__name__} holds no parameter of the models given. Make it from "
                "model.parameters() of the very model, after moving that to its device."
            )
    if policy.manages_gradients:
        _check_not_shared(held, policy)
    for optimizer, params in zip(optimizers, held, strict=True):
        foreign.refuse_optimizer(optimizer, policy)
        inner: Sequence[Optimizer] = ()
        if is_zero(optimizer) and policy.manages_gradients:
            _check_zero(optimizer, policy)
        elif not type(optimizer).__module__.startswith("torch.optim."):
            from xamp.sessions import inner_optimizers  # what is torch's holds none

            inner = inner_optimizers.check(optimizer, policy, known, optimizers)
        if any(p.dtype in LOWER for p in params if id(p) not in known):
            raise PolicyError(
                f"initialize: this {type(optimizer).__name__} holds a half-precision parameter that is in no model "
                "given. Keep it fp32."
            )
        if policy.casts_parameters and not policy.master_weights:
            for each in (optimizer, *inner):
                _check_eps(each, policy)


def _check_not_shared(held: Sequence[Sequence[torch.Tensor]], policy: Policy) -> None:
    """Refuse a parameter that two optimizers hold: each would unscale its gradient and step its master."""
    holder: dict[int, int] = {}
    for index, params in enumerate(held):
        for param in params:
            other = holder.setdefault(id(param), index)
            if other != index:
                unmanaged = levels_where(lambda row: not row.manages_gradients)
                raise PolicyError(
                    f"initialize(level={policy.level!r}): optimizers[{other}] and optimizers[{index}] hold the same "
                    f"parameter, of shape {tuple(param.shape)}, and two would unscale its gradient. Give each "
                    "parameter to one optimizer, or use a level without loss scaling and masters "
                    f"({', '.join(unmanaged)})."
                )


def check_not_sharded_since(optimizers: Sequence[Optimizer], policy: Policy) -> None:
    """Raise a StateError where a model was cast by ``initialize`` without its optimizer, and then sharded.

    A parameter is in the lower dtype, and no master can have the digits that it lost.
    """
    for param in (p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]):
        sharded = is_dtensor(param) or is_shard(param)
        if policy.casts_parameters and sharded and param.dtype in LOWER and not is_low_precision(param):
            raise StateError(
                f"initialize(level={policy.level!r}): the model was cast by an earlier initialize and sharded since, "
                "so that its parameters are new ones, and rounded. Shard first, then make the optimizer from "
                "model.parameters(), then give both to one initialize call."
            )


def check_stepped_rightly(optimizer: Optimizer, backend: Backend, policy: Policy) -> None:
    """Raise an UnsupportedPolicy where the step of ``optimizer`` would be wrong on the backend.

    The level makes wrong the copies that an optimizer of the device's framework keeps of its parameters; or a fused
    kernel does not take the parameters' storage format; or it steps lists of parameters of which some are DTensors.
    """
    name = type(optimizer).__name__
    if why := backend.optimizer_refusal(optimizer, casts=policy.casts_parameters) or _list_refusal(optimizer):
        raise UnsupportedPolicy(f"initialize(level={policy.level!r}): {name} {why}")
    if any(group.get("fused") is True for group in optimizer.param_groups) and not has_usual_format(optimizer, backend):
        raise UnsupportedPolicy(
            f"initialize(level={policy.level!r}): {name} was made with fused=True, whose kernel takes no parameter in "
            "a storage format of the device's own, as this one holds. Make it without fused=True, or cast the "
            "parameters to the usual format first."
        )


def _list_refusal(optimizer: Optimizer) -> str:
    """Return why the optimizer's step on lists of tensors would fail: not all are DTensors; empty if it would not.

    torch steps lists by itself on most devices, and on a CPU where it is told to.
    """
    for group in optimizer.param_groups:
        count = sum(map(is_dtensor, group["params"]))
        if 0 < count < len(group["params"]) and _steps_lists(group):
            return (
                f"steps lists of parameters, and {count} of {len(group['params'])} in one group are DTensors, which "
                "torch's operators on lists refuse beside plain tensors. Make it with foreach=False, and not fused."
            )
    return ""


def _steps_lists(group: dict[str, Any]) -> bool:
    if group.get("fused") or group.get("foreach") is not None or "foreach" not in group:
        return bool(group.get("fused") or group.get("foreach"))
    return bool(default_to_fused_or_foreach(group["params"], bool(group.get("differentiable")), use_fused=False)[1])


def has_usual_format(optimizer: Optimizer, backend: Backend) -> bool:
    """Return whether all parameters of ``optimizer`` are in the storage format that every operator takes."""
    return all(backend.plain(p) is p for group in optimizer.param_groups for p in group["params"])


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
                f"level with fp32 master weights ({', '.join(_WITH_MASTERS)})."
            )
