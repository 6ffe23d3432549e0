"""Small tables that change each step, sent to the device without a wait, and not written again before they arrived."""

from __future__ import annotations

import torch

__all__ = ["PointerRing"]


class PointerRing:
    """Tables of int64, each pinned on the host, with its place on the device and an event that guards both."""

    def __init__(self, length: int, device: torch.device) -> None:
        raise NotImplementedError
