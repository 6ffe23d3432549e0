"""The oldest torch that xamp takes, and the newest that it refuses, as tests write them."""

from __future__ import annotations

from xamp.registry.find_torch import MINIMUM_TORCH, as_text

__all__ = ["MINIMUM", "OLDER"]

MINIMUM = as_text(MINIMUM_TORCH)
OLDER = as_text((*MINIMUM_TORCH[:2], MINIMUM_TORCH[2] - 1))
