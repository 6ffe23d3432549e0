"""Op policies: which operator runs in which dtype inside a region.

``"native"`` is the device's own autocast list, to which nothing is added. A policy that adds entries registers here,
by name, what has to be done once for a device type before its first region opens.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["OP_POLICIES", "install"]


def _nothing(device_type: str) -> None:
    """The device's own list needs no preparation."""


OP_POLICIES: dict[str, Callable[[str], None]] = {"native": _nothing}


def install(op_policy: str, device_type: str) -> None:
    """Make ``op_policy`` ready for regions on ``device_type``."""
    OP_POLICIES[op_policy](device_type)
