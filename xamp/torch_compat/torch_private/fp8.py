"""The product of two matrices in fp8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["has_amx", "scaled_mm"]

scaled_mm: Callable[..., torch.Tensor] = torch._scaled_mm
"""The public ``torch.nn.functional.scaled_mm`` is there from torch 2.10 on, and calls this."""


def has_amx() -> bool:
    """Return whether this processor has AMX, as far as torch tells."""
    check: Any = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return check is not None and bool(check())
