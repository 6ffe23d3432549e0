"""FSDP's own mixed precision: fp32 shards that are gathered, and computed with, in 16 bits.

Where FSDP shards a parameter, its fp32 shard is the master, and the optimizer holds the shards themselves. FSDP casts
the shard while it gathers, so half the bytes move, and gives it an fp32 gradient. So at O2 and O5 no second copy is
made, and a checkpoint sees fp32 parameters under their own names.

A :class:`Unit` is what FSDP gathers in one call: a ``fully_shard``, or a ``FullyShardedDataParallel``. Units hold their
modules weakly, for undo lists keep them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from xamp.distributed.ranks import fsdp1_handle, local
from xamp.errors import StateError

__all__ = [
    "Unit",
    "hidden_gradients",
    "is_in_backward",
    "is_sharded",
    "mixed_precision",
    "postpones",
    "reshard",
    "sharded_params",
    "units_of",
]

Undo = Callable[[], None]


class Unit(NamedTuple):
    """Parameters that FSDP gathers together. They have one dtype.

    Attributes:
        name: the qualified name of the module, for messages.
        owners: the modules that have a parameter in it.
        dtype: the dtype of the shards.
        computes_in: the dtype that the user asked FSDP to gather them in; None: their own.
        compute_in: sets that dtype (None: the shards' own) and returns what sets it back. Its second argument switches
            off what casts inputs and outputs.
    """

    name: str
    owners: Sequence[nn.Module]
    dtype: torch.dtype
    computes_in: torch.dtype | None
    compute_in: Callable[[torch.dtype | None, bool], Undo]


def units_of(model: nn.Module) -> list[Unit]:
    """Return the units of ``model``, and of its parts, with their parameters sharded."""
    found: list[Unit] = []
    seen: set[int] = set()
    for name, module in model.named_modules():
        for state, make in ((_state2(module), _unit2), (fsdp1_handle(module), _unit1)):
            if state is not None and id(state) not in seen:
                seen.add(id(state))
                found += make(name, module)
    return found


def sharded_params(modules: Iterable[nn.Module]) -> Iterator[torch.Tensor]:
    """Yield the sharded parameters of FSDP in ``modules``, also while whole ones stand in their place."""
    for module in modules:
        for group in _groups2(module):
            yield from (param.sharded_param for param in group.fsdp_params)
        handle = fsdp1_handle(module)
        if handle is not None:
            yield handle.flat_param
            yield from getattr(handle.flat_param, "_params", None) or ()


def reshard(modules: Iterable[nn.Module]) -> None:
    """Let FSDP drop the whole weights that it still has: the root keeps them after a forward without backward.

    Raises:
        StateError: ``summon_full_params`` has gathered weights, and would write them back from storage that is gone.
    """
    modules = list(modules)
    states = (getattr(fsdp1_handle(module), "_training_state", None) for module in modules)
    if any(getattr(state, "name", "") == "SUMMON_FULL_PARAMS" for state in states):
        raise StateError(
            "FSDP has gathered the parameters for summon_full_params, and an average has this rank's shards. Make it, "
            "update it and swap it outside of the block."
        )
    for module in modules:
        _reshard(module)


def _reshard(module: Any) -> None:
    if _groups2(module):
        module.reshard()
    handle = fsdp1_handle(module)
    if _is_used1(handle):
        handle.reshard(handle.uses_sharded_strategy)
        handle.post_reshard()


def is_sharded(module: nn.Module) -> bool:
    """Return whether FSDP1 or FSDP2 manages ``module``."""
    return hasattr(module, "_sync_gradients") or hasattr(module, "_get_fsdp_state")


def is_in_backward(module: nn.Module) -> bool:
    """Return whether FSDP has begun a backward through ``module`` and not ended it, because it raised."""
    state = _state2(module)
    if state is not None:
        return bool(state._state_ctx.post_backward_final_callback_queued)
    return bool(getattr(module, "_post_backward_callback_queued", False))


def postpones(module: Any) -> bool:
    """Return whether an FSDP module leaves the gradients of its next backward to a later one to reduce."""
    if hasattr(module, "_sync_gradients"):  # FSDP1
        return not module._sync_gradients
    groups = _groups2(module)  # FSDP2, which waits for what it reduces at the end of the last backward only
    if groups and not module._get_fsdp_state()._state_ctx.is_last_backward:
        return True
    return not all(group.reduce_grads and _adds_copies_up(group) for group in groups)


def _adds_copies_up(group: Any) -> bool:
    """Return whether a group of HSDP reduces between the copies too; see FSDP2's ``set_requires_all_reduce``."""
    return bool(group.all_reduce_grads) or not hasattr(group.mesh_info, "replicate_process_group")


def hidden_gradients(
    modules: Iterable[nn.Module], own_params: Iterable[torch.Tensor], others_params: Iterable[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the local gradients of an optimizer that FSDP2 keeps outside of any ``.grad`` until it reduces them.

    HSDP keeps one tensor for all parameters of a group. That tensor belongs to the first optimizer that has a parameter
    of the group: ``others_params`` are the parameters of the other optimizers.
    """
    groups = [group for module in modules for group in _groups2(module)]
    groups = [g for g in groups if g._partial_reduce_output is not None or any(map(_kept, g.fsdp_params))]
    if not groups:  # mostly
        return []
    own, found = {id(p) for p in own_params}, []
    known = {id(p) for p in others_params} | own
    for group in groups:
        held = (id(param.sharded_param) for param in group.fsdp_params)
        if group._partial_reduce_output is not None and next(filter(known.__contains__, held), None) in own:
            found.append(group._partial_reduce_output)
        found += [local(g) for param in group.fsdp_params if id(param.sharded_param) in own for g in _kept(param)]
    return found


def _kept(param: Any) -> list[torch.Tensor]:
    unsharded = getattr(param, "_unsharded_param", None)
    found = param.unsharded_accumulated_grad, None if unsharded is None else unsharded.grad
    return list({id(grad): grad for grad in found if grad is not None}.values())  # torch 2.15 gives one tensor as both


def mixed_precision(dtype: torch.dtype | None, **others: Any) -> Any:
    """Return torch's policy for ``fully_shard``: compute in ``dtype``, add gradients up in fp32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    reduced = None if dtype is None else torch.float32
    return MixedPrecisionPolicy(param_dtype=dtype, **{"reduce_dtype": reduced, **others})


def _switch(put: Callable[..., None], before: Sequence[Any], after: Sequence[Any]) -> Undo:
    """Call ``put`` with ``after``; return what calls it with ``before``, which is called here where that raises."""
    undo = functools.partial(put, *before)
    try:
        put(*after)
    except BaseException:
        undo()
        raise
    return undo


# ---------------------------------------------------------------- fully_shard


def _state2(module: nn.Module) -> Any:
    return module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None  # type: ignore[operator]


def _groups2(module: nn.Module) -> Sequence[Any]:
    """Return the parameter groups of a module of ``fully_shard``, each of which is gathered and reduced in one call."""
    state = _state2(module)
    if state is None:
        return ()
    found = getattr(state, "_fsdp_param_groups", None)
    return [g for g in ([state._fsdp_param_group] if found is None else found) if g is not None]


def _unit2(name: str, module: Any) -> list[Unit]:
    groups = [group for group in _groups2(module) if group.fsdp_params]
    if not groups:
        return []
    module.reshard()  # the root stays gathered after a forward without backward
    infos = [param._module_info for group in groups for param in group.fsdp_params]
    owners = [owner for info in infos for owner in (info.module, *info.shared_modules)]
    floating = (param.sharded_param.dtype for group in groups for param in group.fsdp_params)
    dtype = next((d for d in floating if d.is_floating_point), torch.float32)
    compute_in = functools.partial(_compute_in2, weakref.ref(module))
    specified = groups[0].fsdp_params[0].mp_policy.param_dtype
    return [Unit(name, owners, dtype, specified, compute_in)]


def _compute_in2(ref: weakref.ref[Any], dtype: torch.dtype | None, is_root: bool) -> Undo:
    module: Any = ref()
    own = _state2(module)._mp_policy
    given = own.param_dtype is not None
    reduced = own.reduce_dtype if given else None
    others = {"reduce_dtype": reduced} if reduced is not None and dtype is not None else {}
    casts = given and own.cast_forward_inputs and not is_root
    made = mixed_precision(dtype, output_dtype=None, cast_forward_inputs=casts, **others)
    inner = [holder.mp_policy for holder in _holders2(module)]
    return _switch(functools.partial(_set2, ref), (own, inner), (made, [made for _ in inner]))


def _holders2(module: nn.Module) -> list[Any]:
    """Return the objects that hold a policy: the parameters, and before torch 2.15 their groups that have one."""
    groups = _groups2(module)
    held = [param for group in groups for param in group.fsdp_params]
    return [*(group for group in groups if hasattr(group, "mp_policy")), *held]


def _set2(ref: weakref.ref[Any], outer: Any, inner: Sequence[Any]) -> None:
    module = ref()
    if module is None:
        return
    _reshard(module)
    _state2(module)._mp_policy = outer
    for holder, policy in zip(_holders2(module), inner, strict=True):
        holder.mp_policy = policy
    for group in _groups2(module):
        for param in group.fsdp_params:
            param.all_gather_outputs = []  # of the other dtype; both are made again at the next forward
            param.__dict__.pop("_unsharded_param", None)
        if any(hasattr(param, "orig_dtype") for param in group.fsdp_params):  # a forward has run: torch asks no more
            group._init_mp_dtypes()


# ---------------------------------------------------------------- FullyShardedDataParallel


def _unit1(name: str, module: Any) -> list[Unit]:
    handle = module._handle
    flat = handle.flat_param
    infos = [*flat._param_infos, *getattr(flat, "_shared_param_infos", ())]
    owners = [info.module for info in infos]
    specified = handle._fwd_bwd_param_dtype if handle._low_prec_param_dtype_specified else None
    return [Unit(name, owners, flat.dtype, specified, functools.partial(_compute_in1, weakref.ref(module)))]


def _compute_in1(ref: weakref.ref[Any], dtype: torch.dtype | None, _: bool) -> Undo:
    module: Any = ref()
    handle = module._handle
    chosen = handle._low_prec_reduce_dtype_specified
    reduced = handle._reduce_dtype if chosen else torch.float32
    low = handle._fwd_bwd_param_dtype if handle._low_prec_param_dtype_specified else None
    before = low, handle._reduce_dtype if chosen else None
    return _switch(functools.partial(_set1, ref), before, (dtype, None if dtype is None else reduced))


def _set1(ref: weakref.ref[Any], dtype: torch.dtype | None, reduced: torch.dtype | None) -> None:
    module = ref()
    if module is None:
        return
    _reshard(module)
    module._handle._init_param_reduce_dtypes(dtype, reduced)
    if _is_used1(module._handle):  # what it is gathered into has the other dtype
        module._handle.init_flat_param_attributes()


def _is_used1(handle: Any) -> bool:
    """Return whether a forward of FSDP1's has run."""
    return handle is not None and hasattr(handle.flat_param, "_local_shard")
