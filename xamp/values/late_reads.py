"""Numbers of the device that the host reads without waiting for it, some steps later."""

from __future__ import annotations

import collections
from typing import Any

import torch

__all__ = ["HISTORY_LAG", "LateNumber", "copies_without_waiting", "copy_without_waiting"]

HISTORY_LAG = 16
"""Number of steps after which the host reads an asynchronous copy from the device. By then it has long arrived."""


class LateNumber:
    """A number on the device, of which each :meth:`read` gives the newest value that has arrived at the host.

    The host waits for the first value only, and for the oldest where :data:`HISTORY_LAG` are under way.
    """

    def __init__(self) -> None:
        self._waiting: collections.deque[tuple[torch.Tensor, Any]] = collections.deque()
        self._known: float | None = None

    def read(self, number: torch.Tensor) -> float:
        """Ask for ``number``, and return the newest value that is there."""
        if number.is_cpu or not copies_without_waiting(number.device):
            return float(number)
        self._waiting.append(copy_without_waiting(number.detach().float()))
        while self._waiting:
            copy, event = self._waiting[0]
            if not event.query():
                if self._known is not None and len(self._waiting) <= HISTORY_LAG:
                    break
                event.synchronize()
            self._known = float(copy)
            self._waiting.popleft()
        assert self._known is not None, "the first was waited for"
        return self._known


def copy_without_waiting(values: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Start to copy fp32 ``values`` to the host; return the copy and the event after which it can be read."""
    copy = torch.empty(values.shape, dtype=torch.float32, pin_memory=True)
    copy.copy_(values, non_blocking=True)
    module = torch.get_device_module(values.device)
    event = module.Event()
    event.record(module.current_stream(values.device))  # which runs the copy, whatever the current device is
    return copy, event


def copies_without_waiting(device: torch.device) -> bool:
    """Return whether the device can copy to the host asynchronously, and has events that tell when it is done."""
    try:
        torch.empty(1, pin_memory=True)
        torch.get_device_module(device).Event().record()
    except (RuntimeError, AttributeError, NotImplementedError, AssertionError):
        return False
    return True
