"""The features that the process needs of regions. Users of a feature set it; regions read it on entry and on exit.

Each feature starts as not needed, so that regions do no work for features that nobody uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

__all__ = ["Needs", "needs"]


class Needs:
    """The needs of the process. The attributes are for reading; the method that names an attribute sets it.

    Attributes:
        marks: whether some code reads the marks of regions. If not, traced code leaves no mark, because torch.export
            warns about everything that a model writes to.
        extended: the device types to whose autocast the portable policy has added entries.
        own_dtypes: by device type, those to which its own autocast casts some operators, whatever the region's dtype.
        registered: whether functions are registered that act in regions only.
        replaced_outside: whether functions are replaced that act outside of regions too. If so, a region that casts
            nothing also leaves a mark, so that those functions do not act in it.
    """

    def __init__(self) -> None:
        self.marks = False
        self.extended: frozenset[str] = frozenset()
        self.own_dtypes: dict[str, frozenset[torch.dtype]] = {}
        self.registered = False
        self.replaced_outside = False
        self._when_tracing: list[Callable[[], None]] = []

    def ask_for_marks(self) -> None:
        """Set that code reads the marks of regions from now on."""
        self.marks = True

    def add_extended(self, device_type: str) -> None:
        """Record that the portable policy has added entries to the autocast of ``device_type``."""
        self.extended |= {device_type}

    def add_own_dtypes(self, device_type: str, dtypes: Iterable[torch.dtype]) -> None:
        """Record that in regions of other dtypes xamp's entries act in the place of those of ``device_type``."""
        self.own_dtypes = {**self.own_dtypes, device_type: frozenset(dtypes)}
        self.ask_for_marks()

    def set_registered(self, any_is: bool) -> None:
        """Set whether functions are registered that act in regions only."""
        self.registered = any_is

    def set_replaced_outside(self, any_is: bool) -> None:
        """Set whether functions are replaced that act outside of regions too; such functions read marks."""
        self.replaced_outside = any_is
        self.marks = self.marks or any_is

    def call_when_tracing(self, function: Callable[[], None]) -> None:
        """Register ``function`` to be called each time the compiler starts to trace a region."""
        self._when_tracing.append(function)

    def prepare_tracing(self) -> None:
        """Call the functions that :meth:`call_when_tracing` registered."""
        for function in self._when_tracing:
            function()


needs = Needs()
"""The needs of this process."""
