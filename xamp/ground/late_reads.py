"""Numbers of the device that the host reads without waiting for it, some steps later."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from typing import Any

import torch

__all__ = ["HISTORY_LAG", "History", "LateNumber", "copies_without_waiting", "copy_without_waiting"]

HISTORY_LAG = 16
"""Number of steps after which the host reads an asynchronous copy from the device. By then it has long arrived."""


class History:
    """The values of a tensor at each step, read without waiting for the device where that is possible.

    A device that has asynchronous copies copies them, and the host reads the copy :data:`HISTORY_LAG` steps later.
    The lag is fixed, so that all ranks read the same step at the same time. On other devices, and in host memory, the
    host reads the state at once.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values
        self._late = not values.is_cpu and copies_without_waiting(values.device)
        self._waiting: collections.deque[tuple[Any, torch.Tensor, Any]] = collections.deque()

    def push(self, note: Any) -> Sequence[tuple[Any, list[float]]]:
        """Record the state as it is now, with ``note``; return the records that have become readable, oldest first."""
        if not self._late:
            return ((note, self._values.tolist()),)
        copy, event = self._copy()
        self._waiting.append((note, copy, event))
        return (self._oldest(),) if len(self._waiting) > HISTORY_LAG else ()

    def forget(self) -> None:
        """Drop all records."""
        self._waiting.clear()

    def waiting_records(self) -> Sequence[Any]:
        """Return the records that have not been read, for :meth:`put_back`."""
        return tuple(self._waiting)

    def put_back(self, records: Sequence[Any]) -> None:
        """Undo :meth:`forget`."""
        self._waiting = collections.deque(records)

    def drain(self) -> Sequence[tuple[Any, list[float]]]:
        """Return all records and forget them. Waits for the device."""
        return [self._oldest() for _ in range(len(self._waiting))] if self._waiting else ()

    def peek(self) -> Iterator[tuple[Any, list[float]]]:
        """Yield all records and keep them. Waits for the device."""
        for note, copy, event in self._waiting:
            event.synchronize()
            yield note, copy.tolist()

    def arrived(self) -> Iterator[tuple[Any, list[float]]]:
        """Yield the records that can be read without waiting, oldest first, and keep them."""
        for note, copy, event in self._waiting:
            if not event.query():
                return
            yield note, copy.tolist()

    @property
    def waiting(self) -> int:
        """The number of records that have not been read."""
        return len(self._waiting)

    def _copy(self) -> tuple[torch.Tensor, Any]:
        return copy_without_waiting(self._values)

    def _oldest(self) -> tuple[Any, list[float]]:
        note, copy, event = self._waiting.popleft()
        event.synchronize()
        return note, copy.tolist()


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
