"""``apex.fp16_utils.loss_scaler``: the scalers of the first Apex, as numbers on the host."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["DynamicLossScaler", "LossScaler", "to_python_float"]

from xamp.apex.fp16_utils.fp16util import to_python_float


class LossScaler:
    """A static loss scale.

    Args:
        scale: the scale.
    """

    def __init__(self, scale: float = 1) -> None:
        self.cur_scale: float = scale

    def has_overflow(self, params: Iterable[torch.Tensor]) -> bool:
        """Return False: a static scale is not checked."""
        del params
        return False

    def update_scale(self, overflow: bool) -> None:
        """Keep the scale."""
        del overflow

    @property
    def loss_scale(self) -> float:
        """The scale."""
        return self.cur_scale

    def scale_gradient(self, module: Any, grad_in: Iterable[torch.Tensor], grad_out: Any) -> tuple[torch.Tensor, ...]:
        """Return the gradients times the scale: a backward hook of a module."""
        del module, grad_out
        return tuple(self.loss_scale * grad for grad in grad_in)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Run backward from the loss times the scale."""
        (loss * self.loss_scale).backward(retain_graph=retain_graph)


class DynamicLossScaler(LossScaler):
    """A dynamic loss scale.

    Args:
        init_scale: where it starts.
        scale_factor: it is divided by this on an overflow, and multiplied by it to grow.
        scale_window: it grows after as many steps without an overflow.
    """

    def __init__(self, init_scale: float = 2**32, scale_factor: float = 2.0, scale_window: int = 1000) -> None:
        super().__init__(init_scale)
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = scale_factor
        self.scale_window = scale_window

    def has_overflow(self, params: Iterable[torch.Tensor]) -> bool:
        """Return whether a gradient holds inf or nan. Waits for the device."""
        return any(param.grad is not None and self._has_inf_or_nan(param.grad) for param in params)

    @staticmethod
    def _has_inf_or_nan(x: torch.Tensor) -> bool:
        return not bool(torch.isfinite(x).all())

    def update_scale(self, overflow: bool) -> None:
        """Move the scale by whether this step overflowed. It falls to 1 at the lowest."""
        if overflow:
            self.cur_scale = max(self.cur_scale / self.scale_factor, 1)
            self.last_overflow_iter = self.cur_iter
        elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
            self.cur_scale *= self.scale_factor
        self.cur_iter += 1
