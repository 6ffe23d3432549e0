"""Multiplies gradients by 1/scale and checks them for inf and nan; arithmetic on lists of gradients of any kind.

They may be dense and sparse, of several dtypes, on several devices of a type, whole and sharded.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
from torch.optim import Optimizer

from xamp.contract import Backend
from xamp.ground import kernels
from xamp.scaling import ranks
from xamp.scaling.fused import FusedForm
from xamp.scaling.scale import LossScaler

__all__ = ["Unscaler", "add_", "coalesce_half", "kind", "multiply_", "unscale_by_group_", "values", "zero_"]


class Unscaler:
    """Unscales lists of gradients in the way that the parameters of an optimizer call for.

    Attributes:
        in_parts: some of the parameters without a master are DTensors, or local tensors of such, so this rank has parts
            of them.
    """

    def __init__(self, backend: Backend, fused: FusedForm, optimizer: weakref.ReferenceType[Optimizer]) -> None:
        self.in_parts = False
        self._uniform = False
        self._backend = backend
        self._fused = fused
        self._optimizer = optimizer

    def fit(self, plain: Sequence[torch.Tensor], stepped: Sequence[torch.Tensor]) -> None:
        """Look at the parameters: ``plain`` ones have no master, ``stepped`` are these and the masters."""
        self._uniform = len(set(map(kind, stepped))) <= 1
        self.in_parts = any(map(ranks.is_part, plain))

    def run(
        self,
        grads: list[torch.Tensor],
        scaler: LossScaler,
        found_inf: torch.Tensor | None,
        params: Sequence[torch.Tensor] = (),
    ) -> None:
        """Multiply ``grads`` by 1/scale and check them.

        Args:
            grads: the gradients.
            scaler: the scale that they have.
            found_inf: fp32, one element, raised to 1.0 if a gradient is not finite; None: gradients are not checked.
            params: the parameters that hold ``grads`` as ``.grad``; empty where ``grads`` are new fp32 copies.
        """
        if not grads:
            return
        if found_inf is None:
            multiply_(grads, scaler.inverse)
            return
        unscale_ = self._backend.unscale_
        if self.in_parts:  # torch would ask the ranks of the mesh for their flags; they agree later
            grads = [*map(ranks.local, grads)]
        if self._uniform and grads[0].device == found_inf.device:
            try:
                unscale_(grads, found_inf, scaler.inverse)
                return
            except (RuntimeError, NotImplementedError):
                # torch refuses sparse and complex gradients before it changes anything. To look for them first would
                # cost 10 us at 300 gradients.
                if not any(g.is_sparse or g.is_complex() for g in grads):
                    raise
        if any(g.is_sparse for g in grads):
            optimizer = self._optimizer()
            if optimizer is not None:
                self._fused.met_sparse(optimizer)
            if params:
                coalesce_half(params)
                grads = [g for p in params for g in (p.grad,) if g is not None]
        unscale_by_group_(grads, found_inf, scaler.inverse, unscale_)

    def check(self, grads: Sequence[torch.Tensor], found_inf: torch.Tensor) -> None:
        """Raise ``found_inf`` if one of ``grads`` is not finite, and leave their values."""
        if grads:
            one = torch.ones_like(found_inf)
            kernels.mark_power_of_two(one, True)
            unscale_by_group_(grads, found_inf, one, self._backend.unscale_)


# ---------------------------------------------------------------- lists of gradients of any kind


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
