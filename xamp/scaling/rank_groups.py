"""Which ranks hold a parameter, and between which of them its elements are divided.

The answer is in the parameter itself for a ``DTensor`` (FSDP2, tensor parallel, and both at once), and in the module
that manages it for FSDP1. :mod:`xamp.scaling.distributed` asks for the ranks that hold the parameters, to decide
together with them; :mod:`xamp.scaling.norms` asks for those that divide them, to add their norms up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["WHOLE", "Layout", "fsdp1_layouts", "is_shard", "layout_of", "ranks_of", "widest"]


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the elements of a parameter lie on the ranks.

    Attributes:
        holders: process groups whose ranks hold the parameter, whole or in parts.
        shards: those of ``holders`` between whose ranks its elements are divided.
        known: False for a parameter of FSDP1 whose module xamp was not given, so that its groups are unknown.
    """

    holders: tuple[Any, ...] = ()
    shards: tuple[Any, ...] = ()
    known: bool = True


WHOLE = Layout()
"""The layout of a parameter that nobody shards. DDP may hold it all the same: DDP leaves no trace in a parameter."""

_UNKNOWN = Layout(known=False)


def is_shard(param: torch.Tensor | None) -> bool:
    """Return whether ``param`` is FSDP1's flat parameter or a view of it, which holds one rank's part only."""
    return hasattr(param, "_fsdp_flattened") or hasattr(param, "_is_flat_param")


def layout_of(param: Any, fsdp1: Mapping[int, Layout]) -> Layout:
    """Return the layout of a parameter, or of its gradient where that is a DTensor.

    Args:
        param: the tensor.
        fsdp1: what :func:`fsdp1_layouts` found.
    """
    if hasattr(param, "placements"):
        groups = tuple(param.device_mesh.get_all_groups())
        divided = (not place.is_replicate() and not place.is_partial() for place in param.placements)
        return Layout(groups, tuple(group for group, is_divided in zip(groups, divided, strict=True) if is_divided))
    if is_shard(param):
        return fsdp1.get(id(param), _UNKNOWN)
    return WHOLE


def fsdp1_layouts(modules: Iterable[nn.Module]) -> dict[int, Layout]:
    """Return the layouts of all parameters that the FSDP1 modules among ``modules`` manage, by id."""
    found: dict[int, Layout] = {}
    for module in modules:
        handle: Any = getattr(module, "_handle", None) if hasattr(module, "_sync_gradients") else None
        if handle is None:
            continue
        across = getattr(module, "_inter_node_pg", None)  # of HSDP: between the copies
        holders = tuple(group for group in (handle.process_group, across) if group is not None)
        layout = Layout(holders, (handle.process_group,) if handle.uses_sharded_strategy else ())
        for param in (handle.flat_param, *(getattr(handle.flat_param, "_params", None) or ())):
            found[id(param)] = layout
    return found


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
