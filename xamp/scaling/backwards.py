"""The backwards of one optimizer since its last step: which loss scales they had, and whose windows they are in."""

from __future__ import annotations

from xamp.scaling.scale import LossScaler

__all__ = ["Backwards"]


class Backwards:
    """The loss scales that the gradients of one optimizer had since its last step.

    Attributes:
        windows: by index of the scale, its :attr:`xamp.scaling.scale.LossScaler.window` at the last check that counts
            for the window; None: no check does. A step that finds the window of now moves the scale.
        owed: by index, the scales of gradients that are still scaled. A later check is theirs too.
    """

    def __init__(self) -> None:
        self.windows: dict[int, int | None] = {}
        self.owed: dict[int, LossScaler] = {}
        self._counted_elsewhere = False

    def checked(self, scaler: LossScaler, *, counts: bool) -> None:
        """Record that gradients with ``scaler`` were checked; if ``counts``, for its window and those that are owed."""
        if counts:
            self.windows[scaler.index] = scaler.window
            for index, owed in self.owed.items():
                self.windows[index] = owed.window
        else:
            self.windows.setdefault(scaler.index, None)

    def owe(self, scaler: LossScaler) -> None:
        """Record that gradients were left scaled by ``scaler``."""
        self.owed[scaler.index] = scaler

    def owe_nothing(self) -> None:
        """Forget gradients that were left scaled: they were checked, or they are gone."""
        if self.owed:
            self.owed = {}

    def nothing_left(self) -> None:
        """Record that a backward found no gradients."""
        self._counted_elsewhere = False

    def counted_elsewhere(self, scaler: LossScaler) -> bool:
        """Return whether gradients that a backward finds were counted for another window than that of ``scaler``.

        They were checked under another scale, or before a step of another optimizer ended the window. An overflow among
        them must not be counted again.
        """
        windows = ((index, window) for index, window in self.windows.items())
        elsewhere = any(index != scaler.index or window != scaler.window for index, window in windows)
        self._counted_elsewhere = elsewhere or (self._counted_elsewhere and bool(self.windows))
        return self._counted_elsewhere
