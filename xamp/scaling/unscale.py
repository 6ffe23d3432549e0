"""Arithmetic on lists of gradients, and their norm over ranks: dense and sparse, of several dtypes and devices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from xamp.distributed import ranks
from xamp.errors import StateError
from xamp.torch_compat import kernels

__all__ = ["add_", "check", "coalesce_half", "kind", "multiply_", "total_norm", "unscale_by_group_", "values", "zero_"]


def values(grad: torch.Tensor) -> torch.Tensor:
    """Return the dense real tensor that holds the numbers of ``grad``. Writing to it writes to ``grad``."""
    dense = grad._values() if grad.is_sparse else grad
    return torch.view_as_real(dense) if dense.is_complex() else dense


@torch.no_grad()
def zero_(grads: Iterable[torch.Tensor]) -> None:
    """Zero ``grads`` in place."""
    for grad in grads:
        grad.zero_()


@torch.no_grad()
def multiply_(grads: Iterable[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply ``grads`` in place by a scalar tensor; each product is rounded once. Of a DTensor: this rank's part."""
    for group in _by_kind(map(ranks.local, grads)):
        kernels.multiply_(group, kernels.on(group[0].device, factor))


@torch.no_grad()
def add_(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Add the second of each pair to the first, in place."""
    for grad, other in pairs:
        grad.add_(other)


@torch.no_grad()
def unscale_by_group_(
    grads: Iterable[torch.Tensor],
    found_inf: torch.Tensor,
    inverse: torch.Tensor,
    unscale_: Callable[[Sequence[torch.Tensor], torch.Tensor, torch.Tensor], None],
) -> None:
    """Run ``unscale_`` (see :meth:`xamp.contract.Backend.unscale_`) once for each kind among ``grads``.

    Of a DTensor it sees this rank's part, so no rank is asked; see :meth:`xamp.distributed.wrappers.Wrappers.agree`.
    """
    for group in _by_kind(map(ranks.local, grads)):
        device = group[0].device
        found = torch.zeros_like(found_inf, device=device)
        unscale_(group, found, kernels.on(device, inverse))
        torch.maximum(found_inf, found.to(found_inf.device), out=found_inf)


@torch.no_grad()
def check(
    grads: Sequence[torch.Tensor],
    found_inf: torch.Tensor,
    unscale_: Callable[[Sequence[torch.Tensor], torch.Tensor, torch.Tensor], None],
) -> None:
    """Raise ``found_inf`` if one of ``grads`` is not finite, and leave their values."""
    if grads:
        one = torch.ones_like(found_inf)
        kernels.set_power_of_two(one, True)
        unscale_by_group_(grads, found_inf, one, unscale_)


@torch.no_grad()
def total_norm(params: Sequence[tuple[torch.Tensor, ranks.Layout]], norm_type: float) -> torch.Tensor:
    """Return the norm of the gradients of ``params``, fp32, as one process would have it. Each rank must call this.

    The norms of parts that lie on other ranks are gathered, and their norm is that of the whole. Copies (data parallel,
    ``Replicate``) are counted once. The collective calls follow the parameters and not the gradients: a rank of FSDP1
    may hold no element of a parameter and so have no gradient of it.

    Args:
        params: parameters, each with its layout, in an order that is the same on all ranks.
        norm_type: the p of the p-norm; may be inf.

    Raises:
        StateError: a parameter is FSDP1's, and which ranks hold the rest of it is unknown.
    """
    device = ranks.local(params[0][0]).device  # of a parameter, which every rank has
    parts: dict[tuple[Any, ...], list[torch.Tensor]] = {}  # by the groups that divide them
    for param, layout in params:
        if layout.unknown:
            raise StateError(f"clip_grad_norm_: {layout.unknown}")
        grad = param.grad
        own = ranks.layout_of(grad) if ranks.is_dtensor(grad) else layout  # a gradient is placed as it likes
        parts.setdefault(own.shards, []).extend([] if grad is None else [ranks.local(ranks.whole_sum(grad))])
    norms = [_over(groups, _norm(own, norm_type, device), norm_type) for groups, own in parts.items()]
    return functools.reduce(lambda a, b: _norm([a, b], norm_type, device), norms)


def _norm(parts: Iterable[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """Return the norm of all ``parts`` as one vector, fp32, on ``device``; 0.0 where they have no element."""
    dense = [numbers for part in parts if (numbers := values(part)).numel()]
    norm: Any = torch.nn.utils.get_total_norm(dense, norm_type, foreach=kernels.foreach_of(dense))
    return norm.to(device, torch.float32)  # type: ignore[no-any-return]


def _over(groups: Sequence[Any], norm: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Return the norm over all ranks of ``groups``, the dimensions of a mesh, of which each has ``norm`` of a part."""
    for group in groups:  # gathered, and not their powers added: a square of 1e20 is no fp32 number
        found = [torch.empty_like(norm) for _ in range(dist.get_world_size(group))]
        dist.all_gather(found, norm, group=group)
        norm = _norm(found, norm_type, norm.device)
    return norm


def coalesce_half(params: Iterable[torch.Tensor]) -> None:
    """Sum the repeated indices in fp16 and bf16 sparse gradients, as torch.amp does: such a sum may overflow."""
    for param in params:
        grad = param.grad
        if grad is not None and grad.is_sparse and grad.dtype != torch.float32 and not grad.is_coalesced():
            param.grad = grad.coalesce()


def kind(tensor: torch.Tensor) -> tuple[torch.device, torch.dtype, object, object]:
    """Return the properties that the tensors of one ``_foreach`` call must share: device, dtype, mesh and placements.

    Operators on DTensors of several meshes cannot be one.
    """
    return tensor.device, tensor.dtype, getattr(tensor, "device_mesh", None), getattr(tensor, "placements", None)


def _by_kind(grads: Iterable[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype, object, object], list[torch.Tensor]] = {}
    for grad in map(values, grads):
        groups.setdefault(kind(grad), []).append(grad)
    return groups.values()
