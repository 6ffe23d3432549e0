"""Small tables that change each step, sent to the device without a wait, and kept until they were read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["PointerRing"]

_FEW = 4


class PointerRing:
    """Tables of numbers, each pinned on the host, with its place on the device and an event that guards both.

    The host may run some steps ahead of the device: then another table is taken, or it waits for the oldest.

    Args:
        length: the words of a table.
        device: where it is read.
        queue: the module with ``Event``, ``current_stream``; by default the device's own. None: nothing is late.
        dtype: of the words.
    """

    def __init__(self, length: int, device: torch.device, queue: Any = ..., dtype: Any = torch.int64) -> None:
        if queue is ...:
            queue = None if device.type == "cpu" else torch.get_device_module(device)
        self._queue, self._length, self._device, self._dtype = queue, length, device, dtype
        self._slots: list[list[Any]] = []  # the table on the host, its place on the device, the event
        self._at = -1

    def send(self, words: Sequence[float]) -> torch.Tensor:
        """Return a table on the device that will hold ``words``; it is good until :meth:`used` and some sends later."""
        host, there, _ = self._free()
        host[: len(words)] = torch.tensor(words, dtype=self._dtype)
        if there is not host:
            self._copy(there, host)
        self.used()
        found: torch.Tensor = there
        return found

    def used(self) -> None:
        """Note that work which reads the newest table is in the queue: the table is free when that is done."""
        if self._queue is not None and self._slots:
            event = self._queue.Event()
            event.record(self._queue.current_stream(self._device))
            self._slots[self._at][2] = event

    def _free(self) -> list[Any]:
        if self._slots:
            nearest = (self._at + 1) % len(self._slots)
            event = self._slots[nearest][2]
            if event is None or event.query() or len(self._slots) >= _FEW:
                if event is not None:
                    event.synchronize()
                self._at = nearest
                return self._slots[nearest]
        host = torch.empty(self._length, dtype=self._dtype, pin_memory=self._device.type != "cpu")
        there = host if self._queue is None else torch.empty_like(host, device=self._device)
        self._slots.insert(self._at + 1, [host, there, None])
        self._at += 1  # last: there may have been no memory, or an interrupt
        return self._slots[self._at]

    @staticmethod
    def _copy(there: torch.Tensor, host: torch.Tensor) -> None:
        there.copy_(host, non_blocking=True)
