"""Small tables that change each step, sent to the device without a wait, and not written again before they were read."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["PointerRing"]

_FEW = 4


class _Slot:
    """A table on the host, its place on the device, and the event behind the work that reads either."""

    def __init__(self, length: int, device: torch.device, pinned: bool) -> None:
        self.host = torch.empty(length, dtype=torch.int64, pin_memory=pinned)
        self.there = torch.empty(length, dtype=torch.int64, device=device) if pinned else self.host
        self.event: Any = None


class PointerRing:
    """Tables of int64, each pinned on the host, with its place on the device and an event that guards both.

    The host may run ahead of the device by some steps: then another table is taken, up to a few; after that it waits
    for the oldest. On a device whose memory is the host's there is nothing to send.

    Args:
        length: the words of a table.
        device: where it is read.
        queue: the module with ``Event``, ``current_stream``; by default the device's own. None: nothing is late.
    """

    def __init__(self, length: int, device: torch.device, queue: Any = ...) -> None:
        if queue is ...:
            queue = None if device.type == "cpu" else torch.get_device_module(device)
        self._queue, self._length, self._device = queue, length, device
        self._slots: list[_Slot] = []
        self._at = -1

    def send(self, words: list[int]) -> torch.Tensor:
        """Return a table on the device that will hold ``words``; it is good until :meth:`used` and some sends later."""
        slot = self._free()
        slot.host[: len(words)] = torch.tensor(words, dtype=torch.int64)
        if slot.there is not slot.host:
            slot.there.copy_(slot.host, non_blocking=True)
        self.used()
        return slot.there

    def used(self) -> None:
        """Note that work which reads the newest table is in the queue: the table is free when that is done."""
        if self._queue is not None and self._slots:
            event = self._queue.Event()
            event.record(self._queue.current_stream(self._device))
            self._slots[self._at].event = event

    def _free(self) -> _Slot:
        if self._slots:
            nearest = (self._at + 1) % len(self._slots)
            event = self._slots[nearest].event
            if event is None or event.query() or len(self._slots) >= _FEW:
                if event is not None:
                    event.synchronize()
                self._at = nearest
                return self._slots[nearest]
        self._at += 1
        self._slots.insert(self._at, _Slot(self._length, self._device, self._queue is not None))
        return self._slots[self._at]
