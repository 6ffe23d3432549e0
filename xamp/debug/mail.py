"""Takes numbers from the device to the host without waiting for the device."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

import torch

from xamp.values.late_reads import copies_without_waiting, copy_without_waiting

__all__ = ["Mail"]


class Mail:
    """Takes numbers to the host without waiting for the device, and writes frames of them in order.

    On a device that has asynchronous copies a letter is read when its copy has arrived; elsewhere at once.
    """

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write
        self._waiting: collections.deque[tuple[Any, Any, Callable[[list[float]], bytes]]] = collections.deque()
        self._asynchronous: dict[torch.device, bool] = {}

    def send(self, numbers: Sequence[Any], make: Callable[[list[float]], bytes]) -> None:
        """Send ``numbers``, floats and scalar tensors; ``make`` gets them as floats and returns the frames."""
        far = [number for number in numbers if isinstance(number, torch.Tensor) and not number.is_cpu]
        if not far:
            self.wait()
            self._write(make([float(number) for number in numbers]))
            return
        packed = torch.stack([number.detach().float().reshape(()) for number in far])
        if self._asynchronous.setdefault(packed.device, copies_without_waiting(packed.device)):
            copy, event = copy_without_waiting(packed)
        else:
            copy, event = packed.cpu(), None
        self._waiting.append((copy, event, lambda found: make(_merged(numbers, found))))
        while self._waiting and (self._waiting[0][1] is None or self._waiting[0][1].query()):
            self._deliver()

    def wait(self) -> None:
        """Write all letters. Waits for the device."""
        while self._waiting:
            if self._waiting[0][1] is not None:
                self._waiting[0][1].synchronize()
            self._deliver()

    def _deliver(self) -> None:
        copy, _, make = self._waiting.popleft()
        self._write(make(copy.tolist()))


def _merged(numbers: Sequence[Any], far: Sequence[float]) -> list[float]:
    arrived = iter(far)
    return [next(arrived) if isinstance(n, torch.Tensor) and not n.is_cpu else float(n) for n in numbers]
