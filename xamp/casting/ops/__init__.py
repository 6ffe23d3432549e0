"""Op policies: which operator runs in which dtype inside a region.

:data:`OP_POLICIES` names each, as a row ``name -> "module:class"``; the class derives from :class:`OpPolicy` and is
imported when the policy is first used. So a further op policy is one row, and this package imports none of them.
"""

from __future__ import annotations

import pkgutil
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from xamp.contract import Backend

__all__ = ["OP_POLICIES", "UNKNOWN", "OpPolicy", "casting", "hold", "named"]

UNKNOWN = "unknown"
"""In a survey (:mod:`xamp.op_dtypes.survey`): what a device that is not there does not show."""

OP_POLICIES = {
    "portable": "xamp.casting.ops.portable:Portable",
    "native": "xamp.casting.ops.fixed_dtype:OwnList",
    "apex": "xamp.apex._regions:ApexLists",
}
"""Name -> where its class is. ``"portable"`` is one table for every device, ``"native"`` the device's own autocast
list, ``"apex"`` the lists of NVIDIA's Apex, whose functions are replaced where they stand."""


class OpPolicy:
    """What an op policy does around regions; by default nothing."""

    def install(self, device_type: str, backend: Backend) -> None:
        """Prepare regions on ``device_type``; called before the first one opens, and again for later sessions."""

    def hold(self) -> Callable[[], None] | None:
        """Put replacements in functions' places; returns what takes them away again, None where there are none."""
        return None

    def casting(self, device_type: str, dtype: torch.dtype) -> Any:
        """What replaced functions find as ``casting`` on the mark of a region; None where none are replaced."""
        return None


_made: dict[str, OpPolicy] = {}  # by hand: the compiler, which traces regions, warns of functools.cache


def named(op_policy: str) -> OpPolicy:
    """The op policy of that name, the same object each time."""
    found = _made.get(op_policy)
    if found is None:
        found = _made[op_policy] = pkgutil.resolve_name(OP_POLICIES[op_policy])()
    return found


def hold(op_policy: str, owner: object) -> Callable[[], None]:
    """Keep what ``op_policy`` replaces in place while ``owner`` lives, or until the returned function is called."""
    end = named(op_policy).hold()
    if end is None:
        return lambda: None
    release = weakref.finalize(owner, end)
    release.atexit = False
    return release


def casting(op_policy: str, device_type: str, dtype: torch.dtype | None) -> Any:
    """What functions that ``op_policy`` has replaced find on the mark of a region that casts to ``dtype``."""
    return None if dtype is None else named(op_policy).casting(device_type, dtype)
