"""The features that the process needs of regions. Users of a feature set it; regions read it on entry and on exit.

Each feature starts as not needed, so that regions do no work for features that nobody uses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Needs", "needs"]


class Needs:
    """The needs of the process.

    Attributes:
        marks: whether some code reads the marks of regions. If not, traced code leaves no mark, because torch.export
            warns about everything that a model writes to.
        extended: the device types to whose autocast the portable policy has added entries.
        own_dtypes: by device type, those to which its own autocast casts some operators, whatever the region's dtype.
            There xamp's entries act in the place of its own.
        registered: whether functions are registered that act in regions only.
        replaced_outside: whether functions are replaced that act outside of regions too. If so, a region that casts
            nothing also leaves a mark, so that those functions do not act in it.
        fp8: reads and writes the recipe of a region (:class:`xamp.casting.fp8_regions.State`); None: no region has one.
        when_tracing: functions that are called each time the compiler starts to trace a region.
    """

    def __init__(self) -> None:
        self.marks = False
        self.extended: frozenset[str] = frozenset()
        self.own_dtypes: dict[str, frozenset[torch.dtype]] = {}
        self.registered = False
        self.replaced_outside = False
        self.fp8: Any = None
        self.when_tracing: list[Callable[[], None]] = []


needs = Needs()
"""The needs of this process."""
