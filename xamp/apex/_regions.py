"""Apex's lists in the regions of xamp's own sessions: op policy ``"apex"``.

The functions are replaced as for ``amp.init`` while such a session lives. Outside of its regions they do nothing unless
a handle says so. In a region the device's own autocast is off, and the mark carries the casting that they ask for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from xamp.apex import _patches
from xamp.apex._casts import region_casting
from xamp.casting import recompute
from xamp.casting.needs import needs
from xamp.casting.ops import OpPolicy
from xamp.contract import Backend

__all__ = ["ApexLists"]


class ApexLists(OpPolicy):
    """Functions cast as Apex cast them, in regions."""

    def install(self, device_type: str, backend: Backend) -> None:
        """See :meth:`OpPolicy.install`: have backward recompute as the forward ran."""
        needs.ask_for_marks()
        recompute.watch()

    def hold(self) -> Callable[[], None]:
        """See :meth:`OpPolicy.hold`."""
        wanted = _patches.Wanted(tag="regions")
        _patches.hold(wanted)
        return functools.partial(_patches.release, wanted)

    def casting(self, device_type: str, dtype: torch.dtype) -> Any:
        """See :meth:`OpPolicy.casting`."""
        return region_casting(device_type, dtype)
