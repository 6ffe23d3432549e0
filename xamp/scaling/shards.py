"""Works on this rank's part of a ``DTensor``, the sharded tensor of tensor parallelism and FSDP2.

A ``DTensor`` is a shell around the local tensor. ``_foreach`` calls do not take the shells, some in-place calls change
the local tensor alone, and two calls on two meshes cannot be one. So masters and their parameters are copied part by
part: they have the same mesh and the same placements, so no rank needs anything of another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from xamp.ground import kernels

__all__ = ["align", "copy", "is_dtensor", "is_part", "local", "set_data", "spec_of", "whole_sum"]


def is_dtensor(tensor: object) -> bool:
    """Return whether ``tensor`` is a ``DTensor``. Does not import its module."""
    return hasattr(tensor, "placements")


def spec_of(tensor: Any) -> Any:
    """Return what has the mesh and the placements of ``tensor``; None where it is no part of a larger one.

    That is a ``DTensor`` itself. DistributedDataParallel with a ``device_mesh`` takes the shells off, and notes the
    placements in the local parameters.
    """
    return tensor if is_dtensor(tensor) else getattr(tensor, "_st_info", None)


def is_part(tensor: object) -> bool:
    """Return whether ``tensor`` is a ``DTensor``, or the local tensor of one; see :func:`spec_of`."""
    return spec_of(tensor) is not None


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
    """Give ``param`` other values, of another dtype perhaps, as ``param.data = values`` does for a plain tensor."""
    param.data = values  # of a DTensor that is the shell's dtype, and makes autograd expect gradients of it
    if is_dtensor(param):
        param._local_tensor, param._spec = values._local_tensor, values._spec
