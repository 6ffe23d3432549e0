"""The norm of gradients that may be sharded: every rank gets that of the whole, as one process would.

Each rank takes the norm of its own part. Parts that lie on other ranks are other elements of the same vector, so the
norms of the parts are gathered, and their norm is that of the vector. Copies (data parallel, ``Replicate``) are counted
once. The collective calls follow the parameters, which are the same on all ranks, and not the gradients: a rank of
FSDP1 may hold no element of a parameter and so have no gradient of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from xamp.errors import StateError
from xamp.ground import kernels
from xamp.scaling import unscale
from xamp.scaling.rank_groups import Layout, is_shard, layout_of
from xamp.scaling.shards import is_part, local, whole_sum

__all__ = ["clip", "is_divided", "total"]

LayoutOf = Callable[[torch.Tensor], Layout]
"""Returns the layout of a parameter, as :meth:`xamp.scaling.distributed.Wrappers.layout` does."""


def is_divided(params: Iterable[torch.Tensor]) -> bool:
    """Return whether any of ``params`` may lie on several ranks, so that a norm needs all of them."""
    return dist.is_available() and dist.is_initialized() and any(is_part(p) or is_shard(p) for p in params)


def clip(params: Sequence[tuple[torch.Tensor, Layout]], max_norm: float, norm_type: float) -> torch.Tensor:
    """Clip the norm of the gradients of ``params`` in place, and return it. Every rank that holds one must call this.

    Args:
        params: parameters, each with its layout, in an order that is the same on all ranks.
        max_norm: the largest norm allowed.
        norm_type: the p of the p-norm; may be inf.

    Raises:
        StateError: a parameter is FSDP1's, and which ranks hold the rest of it is unknown.
    """
    norm = total(params, norm_type)
    grads = [local(g) for p, _ in params if (g := p.grad) is not None]
    factor = torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0)  # as torch.nn.utils.clip_grads_with_norm_ has it
    unscale.multiply_(grads, factor)
    return norm


@torch.no_grad()
def total(params: Sequence[tuple[torch.Tensor, Layout]], norm_type: float) -> torch.Tensor:
    """Return the norm of the gradients of ``params``, fp32, the same on all ranks. See :func:`clip`."""
    device = _device(params)
    buckets: dict[tuple[int, ...], tuple[Sequence[Any], list[torch.Tensor]]] = {}
    for param, layout in params:
        if layout.unknown:
            raise StateError(f"clip_grad_norm_: {layout.unknown}")
        groups = _shards(param, layout)
        _, parts = buckets.setdefault(tuple(map(id, groups)), (groups, []))
        if (grad := param.grad) is not None:
            parts.append(local(whole_sum(grad)))
    norms = [_over(groups, _norm(parts, norm_type, device), norm_type) for groups, parts in buckets.values()]
    return functools.reduce(lambda a, b: _norm([a, b], norm_type, device), norms)


def _shards(param: torch.Tensor, layout: Layout) -> Sequence[Any]:
    """Return the groups that divide the gradient of ``param``, which is placed as it likes where it is a DTensor."""
    grad = param.grad
    return layout.shards if grad is None or not hasattr(grad, "placements") else layout_of(grad, {}).shards


def _device(params: Sequence[tuple[torch.Tensor, Layout]]) -> torch.device:
    """Return the device for the norm: that of the first parameter, which every rank has."""
    return local(params[0][0]).device if params else torch.device("cpu")


def _norm(parts: Iterable[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """Return the norm of all ``parts`` as one vector, fp32, on ``device``; 0.0 where they have no element."""
    dense = [values for part in parts if (values := unscale.values(part)).numel()]
    norm: Any = torch.nn.utils.get_total_norm(dense, norm_type, foreach=kernels.foreach_of(dense))
    return norm.to(device, torch.float32)  # type: ignore[no-any-return]


def _over(groups: Sequence[Any], norm: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Return the norm over all ranks of ``groups``, the dimensions of a mesh, of which each has ``norm`` of a part.

    The norms are gathered and not their powers added: a square of 1e20 is no fp32 number.
    """
    for group in groups:
        found = [torch.empty_like(norm) for _ in range(dist.get_world_size(group))]
        dist.all_gather(found, norm, group=group)
        norm = _norm(found, norm_type, norm.device)
    return norm
