"""Small tables that change each step, sent to the device without a wait, and kept until they were read."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

__all__ = ["PointerRing"]

_FEW = 4


class PointerRing:
    """Tables of 64-bit integers, pinned on the host, each with its place on the device and an event that guards both.

    The host may run some steps ahead of the device: then it waits for the oldest table.

    Args:
        length: the words of a table.
        device: where it is read.
        queue: the module with ``Event``, ``current_stream``, ``synchronize``; by default the device's own. None:
            nothing is late.

    Attributes:
        sent: how many tables were sent.
    """

    def __init__(self, length: int, device: torch.device, queue: Any = ...) -> None:
        if queue is ...:
            queue = None if device.type == "cpu" else torch.get_device_module(device)
        self._queue, self._device = queue, device
        self._length = length
        self._tables = self._new(_FEW)
        self._events: list[Any] = [False] * _FEW  # None: whether work that reads the table is in the queue is not known
        self._at, self.sent = -1, 0
        self._words: list[int] = []  # of the newest table

    def _new(self, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return tables: each on the host, and its place on the device."""
        host = torch.empty((count, self._length), dtype=torch.int64, pin_memory=self._device.type != "cpu")
        return [*zip(host, host if self._queue is None else torch.empty_like(host, device=self._device), strict=True)]

    def send(self, words: list[int]) -> torch.Tensor:
        """Return a table on the device that begins with ``words`` when what comes next in the queue reads it.

        It is the newest one, if that does. It is good until :meth:`note_launch` and some sends later.
        """
        if not self._words or words != self._words[: len(words)]:
            self._words = []
            self._at = (self._at + 1) % _FEW
            event, self._events[self._at] = self._events[self._at], None
            if event is None and self._queue is not None:
                self._queue.synchronize(self._device)
            elif event:
                event.synchronize()
            self._write(*self._tables[self._at], words)
            self.note_launch()
            self._words = words
        return self._tables[self._at][1]

    def before_launch(self, kernel: tuple[object, ...]) -> None:
        """Be told of a kernel, by its name and constants, before each launch."""

    def note_launch(self) -> None:
        """Note that work which reads the newest table is in the queue: the table is free when that is done."""
        if self._queue is not None:
            event = self._queue.Event()
            event.record(self._queue.current_stream(self._device))
            self._events[self._at] = event

    def _write(self, host: torch.Tensor, there: torch.Tensor, words: list[int]) -> None:
        table: Any = (ctypes.c_int64 * len(words)).from_address(host.data_ptr())
        table[:] = words  # for less than ``torch.tensor`` takes
        self.sent += 1
        if there is not host:
            there.copy_(host, non_blocking=True)
