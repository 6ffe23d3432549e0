"""The closure that a script may pass to ``optimizer.step``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["loss_of"]


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Return the loss that the closure of a step computes, with gradients on; None where there is no closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
