"""Multiplies the gradients of one optimizer by 1/scale and checks them for inf and nan."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from xamp.contract import Backend
from xamp.ground import kernels
from xamp.scaling import foreach, ranks
from xamp.scaling.fused import FusedForm
from xamp.scaling.scale import LossScaler

__all__ = ["Unscaler"]


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
        self._uniform = len(set(map(foreach.kind, stepped))) <= 1
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
            foreach.multiply_(grads, scaler.inverse)
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
                foreach.coalesce_half(params)
                grads = [g for p in params for g in (p.grad,) if g is not None]
        foreach.unscale_by_group_(grads, found_inf, scaler.inverse, unscale_)

    def check(self, grads: Sequence[torch.Tensor], found_inf: torch.Tensor) -> None:
        """Raise ``found_inf`` if one of ``grads`` is not finite, and leave their values."""
        if grads:
            one = torch.ones_like(found_inf)
            kernels.mark_power_of_two(one, True)
            foreach.unscale_by_group_(grads, found_inf, one, self._backend.unscale_)
