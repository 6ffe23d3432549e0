"""Where a parameter lives: this rank's part of it, and the process groups whose ranks have it too, or the rest of it.

The answer is in the parameter itself for a ``DTensor`` (FSDP2, tensor parallel, and both at once) and for what DDP
makes of one; for FSDP1 it is in the module that manages it. Who decides together, whose norms are added up and who
compares settings follows from it (:mod:`xamp.distributed.wrappers`, :mod:`xamp.distributed.rank_settings`).

A ``DTensor`` is a shell around the local tensor. ``_foreach`` calls do not take the shells, and some in-place calls
change the local tensor alone. So masters and their parameters, which are placed alike, are copied part by part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from xamp.torch_compat import kernels

__all__ = [
    "Layout",
    "align",
    "copy",
    "fsdp1_handle",
    "fsdp1_layouts",
    "is_divided",
    "is_dtensor",
    "is_part",
    "is_running",
    "is_shard",
    "layout_of",
    "local",
    "ranks_of",
    "set_data",
    "share_from_rank_zero",
    "share_overflow",
    "whole_sum",
    "widest",
]

is_running: Callable[[], bool] = dist.is_initialized if dist.is_available() else lambda: False
"""Returns whether there is a default process group. Each step asks, so this is torch's function itself."""


def is_dtensor(tensor: object) -> bool:
    """Return whether ``tensor`` is a ``DTensor``. Does not import its module."""
    return hasattr(tensor, "placements")


def is_part(tensor: object) -> bool:
    """Return whether ``tensor`` is a ``DTensor``, or a local tensor of one, of which DDP has taken the shell off."""
    return is_dtensor(tensor) or hasattr(tensor, "_st_info")


def is_shard(param: torch.Tensor | None) -> bool:
    """Return whether ``param`` is FSDP1's flat parameter or a view of it, which holds one rank's part only."""
    return hasattr(param, "_fsdp_flattened") or hasattr(param, "_is_flat_param")


def is_divided(params: Iterable[torch.Tensor]) -> bool:
    """Return whether any of ``params`` may lie on several ranks, so that a norm needs all of them."""
    return is_running() and any(is_part(p) or is_shard(p) for p in params)


def local(tensor: Any) -> torch.Tensor:
    """Return this rank's part of ``tensor``; itself where it is no ``DTensor``. Writing to it writes to ``tensor``."""
    if not is_dtensor(tensor):
        return tensor  # type: ignore[no-any-return]
    part: Any = tensor._local_tensor
    return part.wait() if hasattr(part, "wait") else part  # type: ignore[no-any-return]  # a collective may still run


def align(tensor: Any, like: Any) -> torch.Tensor:
    """Return ``tensor`` placed as ``like`` is: a gradient may be replicated, or a sum of parts, where that is sharded.

    All ranks of the mesh must call this.
    """
    if not is_dtensor(tensor) or not is_dtensor(like) or tuple(tensor.placements) == tuple(like.placements):
        return tensor  # type: ignore[no-any-return]
    return tensor.redistribute(placements=like.placements)  # type: ignore[no-any-return]


def whole_sum(tensor: Any) -> Any:
    """Return ``tensor``; a ``DTensor`` of which each rank has one summand (``Partial``) is added up.

    All ranks of the mesh must call this.
    """
    if not any(place.is_partial() for place in getattr(tensor, "placements", ())):
        return tensor
    from torch.distributed.tensor import Replicate

    return tensor.redistribute(placements=[Replicate() if p.is_partial() else p for p in tensor.placements])


@torch.no_grad()
def copy(targets: Sequence[torch.Tensor], sources: Iterable[torch.Tensor]) -> None:
    """Copy each of ``sources``, which is placed as its target, into it; each target gets a new version."""
    if not targets:
        return
    kernels.copy_([local(t) for t in targets], [local(s) for s in sources])
    for target in targets:
        if is_dtensor(target):
            torch.autograd.graph.increment_version(target)


def set_data(param: Any, values: Any) -> None:
    """Give ``param`` other values, of another dtype perhaps, as ``param.data = values`` does for an ordinary tensor."""
    param.data = values  # of a DTensor that is the shell's dtype, and makes autograd expect gradients of it
    if is_dtensor(param):
        param._local_tensor, param._spec = values._local_tensor, values._spec


class Layout(NamedTuple):
    """How the elements of a parameter lie on the ranks.

    Attributes:
        holders: process groups whose ranks hold the parameter, whole or in parts.
        shards: those of ``holders`` between whose ranks its elements are divided.
        unknown: why nobody can say which ranks have which elements, for an error; empty: it is known.
    """

    holders: tuple[Any, ...] = ()
    shards: tuple[Any, ...] = ()
    unknown: str = ""


_WHOLE = Layout()  # DDP may hold the parameter all the same: it leaves no trace in one
_NOT_GIVEN = Layout(
    unknown="FSDP shards a parameter of this optimizer, and its module is not in a model that initialize was given, so "
    "the ranks that hold the rest are unknown. Give xamp.initialize the FullyShardedDataParallel module itself."
)
_FLATTENED = (
    "FSDP has flattened parameters that tensor parallelism divides and others that it does not into one, and the norm "
    "of that would count the latter several times. Make FullyShardedDataParallel with use_orig_params=True."
)


def layout_of(param: Any) -> Layout:
    """Return the layout of a parameter, or of its gradient where that is a DTensor.

    A parameter that FSDP1 shards does not tell; see :func:`fsdp1_layouts`.
    """
    if is_part(param):  # DDP with a device_mesh keeps the placements in the local parameter
        return _layout_on(param if is_dtensor(param) else param._st_info)
    return _NOT_GIVEN if is_shard(param) else _WHOLE


def _layout_on(spec: Any) -> Layout:
    """Return the layout of what is placed as ``spec``, a DTensor or its spec, is."""
    groups = tuple(spec.device_mesh.get_all_groups())
    divided = (not place.is_replicate() and not place.is_partial() for place in spec.placements)
    return Layout(groups, tuple(group for group, is_divided in zip(groups, divided, strict=True) if is_divided))


def fsdp1_handle(module: nn.Module) -> Any:
    """Return the handle of the parameters that FSDP1 shards in ``module``; None where it shards none."""
    return getattr(module, "_handle", None) if hasattr(module, "_sync_gradients") else None


def fsdp1_layouts(modules: Iterable[nn.Module]) -> dict[torch.Tensor, Layout]:
    """Return the layouts of all parameters that the FSDP1 modules among ``modules`` manage."""
    found: dict[torch.Tensor, Layout] = {}
    for module in modules:
        if (handle := fsdp1_handle(module)) is not None:
            across = getattr(module, "_inter_node_pg", None)  # of HSDP: between the copies
            holders = tuple(group for group in (handle.process_group, across) if group is not None)
            outer = Layout(holders, (handle.process_group,) if handle.uses_sharded_strategy else ())
            flat, each = handle.flat_param, []
            for spec in flat._param_extensions:  # of parameters that were DTensors: FSDP1 divides their local tensors
                inner = _layout_on(spec) if hasattr(spec, "placements") else _WHOLE
                each.append(Layout((*outer.holders, *inner.holders), (*outer.shards, *inner.shards)))
            found[flat] = _flattened(outer, each)
            found.update(zip(flat._params or (), each, strict=False))
    return found


def _flattened(outer: Layout, each: Sequence[Layout]) -> Layout:
    """Return the layout of a flat parameter that is made of parameters with the layouts ``each``."""
    alike = all(layout.shards == each[0].shards for layout in each)
    holders = dict.fromkeys(group for layout in (outer, *each) for group in layout.holders)
    return Layout(tuple(holders), each[0].shards if alike and each else outer.shards, "" if alike else _FLATTENED)


def ranks_of(group: Any) -> frozenset[int]:
    """Return the global ranks in ``group`` (None: the default group)."""
    return frozenset(dist.get_process_group_ranks(dist.group.WORLD if group is None else group))


def widest(groups: Iterable[Any]) -> Sequence[Any]:
    """Return ``groups`` without those of one rank, and without those whose ranks are all in another one of them.

    The order stays: collective calls over several groups must come in the same order on all their ranks.
    """
    kept: list[tuple[frozenset[int], Any]] = []
    for group in groups:
        ranks = ranks_of(group)
        if len(ranks) > 1 and not any(ranks <= other for other, _ in kept):
            kept = [pair for pair in kept if not pair[0] < ranks]
            kept.append((ranks, group))
    return [group for _, group in kept]


def share_overflow(flags: torch.Tensor, group: Any) -> None:
    """Raise ``flags`` (1.0: overflow) to their maximum over the ranks of ``group``."""
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)


def share_from_rank_zero(tensors: Iterable[torch.Tensor], group: Any) -> None:
    """Broadcast ``tensors`` in place from the first rank of ``group``."""
    source = dist.get_global_rank(group, 0)
    for tensor in tensors:
        dist.broadcast(local(tensor), source, group=group)
