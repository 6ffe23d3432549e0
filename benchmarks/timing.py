"""Times two ways of doing one thing against each other, alternating in one process."""

from __future__ import annotations

from collections.abc import Callable

import torch

from xamp.testing import measure
from xamp.testing.measure import Pair

__all__ = ["Pair", "compare", "synchronize"]


def compare(
    ours: Callable[[], object], theirs: Callable[[], object], device: torch.device, *, calls: int, rounds: int
) -> Pair:
    """See :func:`xamp.testing.measure.compare`; the time includes the device's work."""
    return measure.compare(ours, theirs, lambda: synchronize(device), calls=calls, rounds=rounds)


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
