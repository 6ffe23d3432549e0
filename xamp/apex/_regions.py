"""Casts by Apex's lists in the regions of xamp's own sessions: op policy ``"apex"``.

While such a session lives, the functions are replaced as for ``amp.init``. Outside of its regions the wrappers cast
only if a handle is active. In a region the device's own autocast is off, and the mark has the casting for the wrappers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from xamp.apex import _patches
from xamp.apex._casts import region_casting
from xamp.casting import recompute
from xamp.casting.features_in_use import needs
from xamp.casting.ops import OpPolicy
from xamp.contract import Backend

__all__ = ["ApexLists"]


class ApexLists(OpPolicy):
    """The op policy under which functions in a region cast their arguments as in Apex."""

    def install(self, device_type: str, backend: Backend) -> None:
        """See :meth:`OpPolicy.install`: make backward recompute with the casts of the forward."""
        needs.marks = True
        recompute.watch()

    def hold(self) -> Callable[[], None]:
        """See :meth:`OpPolicy.hold`."""
        wanted = _patches.Wanted(tag="regions")
        _patches.hold(wanted)
        return functools.partial(_patches.release, wanted)

    def casting(self, device_type: str, dtype: torch.dtype) -> Any:
        """See :meth:`OpPolicy.casting`."""
        return region_casting(device_type, dtype)
