"""The product of two matrices in fp8."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["scaled_mm"]

scaled_mm: Callable[..., torch.Tensor] = torch._scaled_mm
"""The public ``torch.nn.functional.scaled_mm`` is there from torch 2.10 on, and calls this."""
