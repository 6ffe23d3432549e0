"""Op policies: which operator runs in which dtype inside a region.

``"native"`` is the device's own autocast list, to which nothing is added. ``"portable"`` is one table for every device
(:mod:`xamp.casting.ops.table`): where a device's list lacks or differs, :mod:`xamp.casting.ops.portable` adds the
entry. ``"apex"`` is the lists of NVIDIA's Apex: its functions are replaced where they stand
(:mod:`xamp.apex._regions`). A further policy registers here, by name, what has to be done once for a device type before
its first region opens, and, if it replaces functions, how those are held in place and what they ask in a region.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from xamp.contract import Backend

__all__ = ["OP_POLICIES", "REPLACING", "UNKNOWN", "Replacing", "casting", "hold", "install"]

UNKNOWN = "unknown"
"""In a survey (:mod:`xamp.casting.ops.survey`): what a device that is not there does not show."""


def _nothing(device_type: str, backend: Backend) -> None:
    """The device's own list needs no preparation."""


def _portable(device_type: str, backend: Backend) -> None:
    from xamp.casting.ops.portable import install as add_entries

    add_entries(device_type, backend.op_rules)


def _apex(*_: object) -> None:
    from xamp.apex._regions import prepare

    prepare()


OP_POLICIES: dict[str, Callable[[str, Backend], None]] = {"portable": _portable, "native": _nothing, "apex": _apex}


def install(op_policy: str, device_type: str, backend: Backend) -> None:
    """Make ``op_policy`` ready for regions on ``device_type``."""
    OP_POLICIES[op_policy](device_type, backend)


@dataclasses.dataclass(frozen=True)
class Replacing:
    """An op policy that replaces functions while anybody needs them.

    Attributes:
        hold: replaces them, and returns what ends that; to be called once.
        casting: for a device type and a lower dtype, what the functions find as ``casting`` of a region's mark.
    """

    hold: Callable[[], Callable[[], None]]
    casting: Callable[[str, torch.dtype], Any]


def _hold_apex() -> Callable[[], None]:
    from xamp.apex._regions import hold

    return hold()


def _apex_casting(device_type: str, dtype: torch.dtype) -> Any:
    from xamp.apex._casts import region_casting

    return region_casting(device_type, dtype)


REPLACING = {"apex": Replacing(_hold_apex, _apex_casting)}


def hold(op_policy: str, owner: object) -> Callable[[], None]:
    """Keep what ``op_policy`` replaces in place while ``owner`` lives, or until what is returned is called."""
    found = REPLACING.get(op_policy)
    if found is None:
        return _done
    release = weakref.finalize(owner, found.hold())
    release.atexit = False
    return release


def _done() -> None:
    """Nothing is held."""


def casting(op_policy: str, device_type: str, dtype: torch.dtype | None) -> Any:
    """What functions that ``op_policy`` has replaced find on the mark of a region; None if it replaces none."""
    found = REPLACING.get(op_policy)
    return None if found is None or dtype is None else found.casting(device_type, dtype)
