"""Apex's lists in the regions of xamp's own sessions: op policy ``"apex"``.

The functions are replaced as for ``amp.init``, while such a session lives, and do nothing outside of its regions unless
a handle says so. In a region the device's own autocast is off, and the mark carries the casting that they ask.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from xamp.apex import _patches
from xamp.casting import recompute
from xamp.casting.needs import needs

__all__ = ["hold", "prepare"]


def prepare() -> None:
    """What has to be known of regions before the first one opens: what backward recomputes runs as it ran."""
    needs.ask_for_marks()
    recompute.watch()


def hold() -> Callable[[], None]:
    """Replace the functions; returns what ends that."""
    wanted = _patches.Wanted(tag="regions")
    _patches.hold(wanted)
    return functools.partial(_patches.release, wanted)
