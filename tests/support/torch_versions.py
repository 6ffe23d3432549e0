"""The oldest torch that xamp takes, and the newest that it refuses, as tests write them."""

from __future__ import annotations

from xamp.registry.find_torch import MINIMUM_TORCH

__all__ = ["MINIMUM", "OLDER"]

MINIMUM = ".".join(map(str, MINIMUM_TORCH))
OLDER = f"{MINIMUM_TORCH[0]}.{MINIMUM_TORCH[1] - 1}"
