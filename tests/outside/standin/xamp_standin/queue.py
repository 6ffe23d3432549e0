"""The device's queue: the host runs ahead of it, and copies to pinned memory arrive late.

The clock counts operators. A copy or an event that is put into the queue at some time is done when the clock has gone
``late_by`` further, or when the host has waited for something behind it. All else is computed at once: nobody but the
host can see the difference, and the host sees it only in memory that a copy writes.
"""

from __future__ import annotations

import collections
from typing import Any

import torch
from xamp_abacus import kernels
from xamp_standin.facts import facts

__all__ = ["Event", "install", "is_pinned", "pin", "put_copy", "wait"]


class _Queue:
    def __init__(self) -> None:
        self.issued = 0
        self.done = 0
        self.copies: collections.deque[tuple[int, torch.Tensor, torch.Tensor]] = collections.deque()

    def settle(self, waited_for: int = 0) -> None:
        """Write what has arrived by now, and what was put in up to the time ``waited_for``."""
        self.done = max(self.done, waited_for, self.issued - facts().copies["late_by"])
        while self.copies and self.copies[0][0] <= self.done:
            _, target, values = self.copies.popleft()
            target.copy_(values)


_queue = _Queue()


def install() -> None:
    """Let the clock count."""
    kernels.watchers.append(_tick)


def _tick(op: Any, args: Any) -> None:
    _queue.issued += 1


def put_copy(target: torch.Tensor, values: torch.Tensor) -> None:
    """Copy ``values``, a tensor of the CPU that nobody else writes to, into ``target``, pinned memory, later."""
    _queue.settle()
    _queue.issued += 1
    _queue.copies.append((_queue.issued, target.detach(), values))


def wait() -> None:
    """Let the host wait for all that is in the queue."""
    _queue.settle(_queue.issued)


class Event(torch.Event):
    """A point in the queue, as ``torch.cuda.Event``."""

    _recorded = 0

    def record(self, stream: Any = None) -> None:
        """Put it at the end of the queue."""
        _queue.issued += 1
        self._recorded = _queue.issued

    def query(self) -> bool:
        """Whether the device has passed it."""
        _queue.settle()
        return self._recorded <= _queue.done

    def synchronize(self) -> None:
        """Let the host wait for it."""
        _queue.settle(self._recorded)

    def wait(self, stream: Any = None) -> None:
        """Let a queue wait for it; there is one."""


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """Call the memory of a tensor of the CPU pinned."""
    storage: Any = tensor.untyped_storage()
    storage.pinned = True
    return tensor


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether a tensor is in pinned memory of the host."""
    return tensor.is_cpu and hasattr(tensor.untyped_storage(), "pinned")
