"""Which ranks hold a parameter, and between which of them its elements are divided.

The answer is in the parameter itself for a ``DTensor`` (FSDP2, tensor parallel, and both at once) and for what DDP
makes of one; for FSDP1 it is in the module that manages it. :mod:`xamp.scaling.distributed` asks for the ranks that
hold the parameters, to decide together with them; :mod:`xamp.scaling.norms` asks for those that divide them, to add
their norms up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from xamp.scaling.shards import spec_of

__all__ = ["WHOLE", "Layout", "fsdp1_layouts", "is_shard", "layout_of", "ranks_of", "widest"]


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the elements of a parameter lie on the ranks.

    Attributes:
        holders: process groups whose ranks hold the parameter, whole or in parts.
        shards: those of ``holders`` between whose ranks its elements are divided.
        unknown: why nobody can say which ranks have which elements, for an error; empty: it is known.
    """

    holders: tuple[Any, ...] = ()
    shards: tuple[Any, ...] = ()
    unknown: str = ""


WHOLE = Layout()
"""The layout of a parameter that nobody shards. DDP may hold it all the same: DDP leaves no trace in a parameter."""

_NOT_GIVEN = Layout(
    unknown="FSDP shards a parameter of this optimizer, and its module is not in a model that initialize was given, so "
    "the ranks that hold the rest are unknown. Give xamp.initialize the FullyShardedDataParallel module itself."
)
_FLATTENED = (
    "FSDP has flattened parameters that tensor parallelism divides and others that it does not into one, and the norm "
    "of that would count the latter several times. Make FullyShardedDataParallel with use_orig_params=True."
)


def is_shard(param: torch.Tensor | None) -> bool:
    """Return whether ``param`` is FSDP1's flat parameter or a view of it, which holds one rank's part only."""
    return hasattr(param, "_fsdp_flattened") or hasattr(param, "_is_flat_param")


def layout_of(param: Any, fsdp1: Mapping[int, Layout]) -> Layout:
    """Return the layout of a parameter, or of its gradient where that is a DTensor.

    Args:
        param: the tensor.
        fsdp1: what :func:`fsdp1_layouts` found.
    """
    if (spec := spec_of(param)) is not None:
        return _layout_on(spec.device_mesh, spec.placements)
    if is_shard(param):
        return fsdp1.get(id(param), _NOT_GIVEN)
    return WHOLE


def _layout_on(mesh: Any, placements: Iterable[Any]) -> Layout:
    groups = tuple(mesh.get_all_groups())
    divided = (not place.is_replicate() and not place.is_partial() for place in placements)
    return Layout(groups, tuple(group for group, is_divided in zip(groups, divided, strict=True) if is_divided))


def fsdp1_layouts(modules: Iterable[nn.Module]) -> dict[int, Layout]:
    """Return the layouts of all parameters that the FSDP1 modules among ``modules`` manage, by id."""
    found: dict[int, Layout] = {}
    for module in modules:
        handle: Any = getattr(module, "_handle", None) if hasattr(module, "_sync_gradients") else None
        if handle is None:
            continue
        across = getattr(module, "_inter_node_pg", None)  # of HSDP: between the copies
        holders = tuple(group for group in (handle.process_group, across) if group is not None)
        outer = Layout(holders, (handle.process_group,) if handle.uses_sharded_strategy else ())
        flat = handle.flat_param
        each = [_within(outer, spec) for spec in flat._param_extensions]
        found[id(flat)] = _flattened(outer, each)
        found.update((id(param), layout) for param, layout in zip(flat._params or (), each, strict=False))
    return found


def _within(outer: Layout, spec: Any) -> Layout:
    """Return the layout under FSDP1, ``outer``, of a parameter that was a DTensor as ``spec`` says (None: it was none).

    FSDP1 divides the local tensors of tensor parallelism once more, and keeps no DTensor.
    """
    if not hasattr(spec, "placements"):
        return outer
    inner = _layout_on(spec.mesh, spec.placements)
    return Layout((*outer.holders, *inner.holders), (*outer.shards, *inner.shards))


def _flattened(outer: Layout, each: Sequence[Layout]) -> Layout:
    """Return the layout of a flat parameter that is made of parameters with the layouts ``each``."""
    alike = all(layout.shards == each[0].shards for layout in each)
    holders = {id(group): group for layout in (outer, *each) for group in layout.holders}
    return Layout(
        tuple(holders.values()), each[0].shards if alike and each else outer.shards, "" if alike else _FLATTENED
    )


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
