"""What the process has asked of regions. Who needs something says so here; regions look it up on their way in and out.

Each answer starts as "nobody asked", so that a region costs nothing for what nobody uses.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Needs", "needs"]


class Needs:
    """What was asked for. The attributes are for reading; each is set by the function of this class that names it.

    Attributes:
        marks: somebody asks for the mark of a region. Otherwise none is left while tracing, since torch.export warns of
            everything that a model writes to.
        extended: device types to whose autocast the portable policy has added entries.
        registered: functions are registered that act in regions only.
        replaced_outside: functions are replaced that act outside of regions too. Then a region that casts nothing also
            leaves a mark, so that they do not act in it.
    """

    def __init__(self) -> None:
        self.marks = False
        self.extended: frozenset[str] = frozenset()
        self.registered = False
        self.replaced_outside = False
        self._when_tracing: list[Callable[[], None]] = []

    def ask_for_marks(self) -> None:
        """Say that marks are asked for from now on."""
        self.marks = True

    def add_extended(self, device_type: str) -> None:
        """Say that the portable policy has added entries to the autocast of ``device_type``."""
        self.extended |= {device_type}

    def set_registered(self, any_is: bool) -> None:
        """Say whether functions are registered that act in regions only."""
        self.registered = any_is

    def set_replaced_outside(self, any_is: bool) -> None:
        """Say whether functions are replaced that act outside of regions too; they ask for marks."""
        self.replaced_outside = any_is
        self.marks = self.marks or any_is

    def call_when_tracing(self, function: Callable[[], None]) -> None:
        """Have ``function`` called each time that the compiler starts to trace a region."""
        self._when_tracing.append(function)

    def prepare_tracing(self) -> None:
        """Call what :meth:`call_when_tracing` was given."""
        for function in self._when_tracing:
            function()


needs = Needs()
"""The process's."""
