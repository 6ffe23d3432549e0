"""Arithmetic on lists of gradients of any kind: dense and sparse, of several dtypes, on several devices, in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from xamp.ground import kernels
from xamp.scaling import ranks

__all__ = ["add_", "check", "coalesce_half", "kind", "multiply_", "unscale_by_group_", "values", "zero_"]


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

    Of a DTensor it sees this rank's part, so no rank is asked; see :meth:`xamp.scaling.wrappers.Wrappers.agree`.
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
        kernels.mark_power_of_two(one, True)
        unscale_by_group_(grads, found_inf, one, unscale_)


def coalesce_half(params: Iterable[torch.Tensor]) -> None:
    """Sum the repeated indices in fp16 and bf16 sparse gradients, as torch.amp does: such a sum may overflow."""
    for param in params:
        grad = param.grad
        if grad is not None and grad.is_sparse and grad.dtype != torch.float32 and not grad.is_coalesced():
            param.grad = grad.coalesce()


def kind(tensor: torch.Tensor) -> tuple[torch.device, torch.dtype, object, object]:
    """Return what the tensors of one ``_foreach`` call must have in common: device, dtype, mesh and placements.

    Operators on DTensors of several meshes cannot be one.
    """
    return tensor.device, tensor.dtype, getattr(tensor, "device_mesh", None), getattr(tensor, "placements", None)


def _by_kind(grads: Iterable[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype, object, object], list[torch.Tensor]] = {}
    for grad in map(values, grads):
        groups.setdefault(kind(grad), []).append(grad)
    return groups.values()
