"""Op policies: which operator runs in which dtype inside a region.

``"native"`` is the device's own autocast list, to which nothing is added. ``"portable"`` is one table for every device
(:mod:`xamp.ops.table`): where a device's list lacks or differs, :mod:`xamp.ops.portable` adds the entry. A further
policy registers here, by name, what has to be done once for a device type before its first region opens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xamp.contract import Backend

__all__ = ["OP_POLICIES", "UNKNOWN", "install"]

UNKNOWN = "unknown"
"""In a survey (:mod:`xamp.ops.survey`): what a device that is not there does not show."""


def _nothing(device_type: str, backend: Backend) -> None:
    """The device's own list needs no preparation."""


def _portable(device_type: str, backend: Backend) -> None:
    from xamp.ops.portable import install as add_entries

    add_entries(device_type, backend.op_rules)


OP_POLICIES: dict[str, Callable[[str, Backend], None]] = {"portable": _portable, "native": _nothing}


def install(op_policy: str, device_type: str, backend: Backend) -> None:
    """Make ``op_policy`` ready for regions on ``device_type``."""
    OP_POLICIES[op_policy](device_type, backend)
