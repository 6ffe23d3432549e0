"""The device's queue: the host runs ahead of it, and copies to pinned memory arrive late.

The clock counts operators. A copy or an event that is put into the queue at some time is done when the clock has gone
``late_by`` further, or when the host has waited for something behind it. All else is computed at once: nobody but the
host can see the difference, and the host sees it only in memory that a copy writes.
"""

from __future__ import annotations

import collections
import functools
import os
import time
import warnings
from typing import Any

import torch
from xamp_abacus import kernels

from xamp_standin.facts import facts

__all__ = ["Event", "Stream", "current_stream", "install", "is_pinned", "pin", "put_copy", "wait", "wait_here"]


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
mode = "default"
"""What a wait does besides: ``"warn"``, ``"error"``, or nothing."""
waits = 0
"""How often the host has waited."""
forked = False
"""Whether this process was forked from one that had used the device."""


def install() -> None:
    """Let the clock count."""
    kernels.watchers.append(_tick)
    torch.accelerator.synchronize = _synchronize
    os.register_at_fork(after_in_child=_note_fork)


def _note_fork() -> None:
    global forked
    forked = bool(facts().fork) and _queue.issued > 0


def _tick(op: Any, args: Any) -> None:
    if forked:
        raise RuntimeError(facts().fork)
    _queue.issued += 1
    if op.name() in _waiting():
        wait_here()


@functools.cache
def _waiting() -> frozenset[str]:
    return frozenset(facts().waits)


def wait_here() -> None:
    """Let the host wait for an operator, which the mode may forbid.

    Raises:
        RuntimeError: it does.
    """
    global waits
    waits += 1
    if mode == "error":
        raise RuntimeError("called a synchronizing operation of the device")
    if mode == "warn":
        warnings.warn("called a synchronizing operation of the device", stacklevel=2)
    wait()


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
    _seconds = 0.0

    def record(self, stream: Any = None) -> None:
        """Put it at the end of the queue."""
        _queue.issued += 1
        self._recorded, self._seconds = _queue.issued, time.perf_counter()

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this event to another, of the host: the device has no time of its own."""
        return float(1000.0 * (end_event._seconds - self._seconds))

    def query(self) -> bool:
        """Whether the device has passed it."""
        _queue.settle()
        return self._recorded <= _queue.done

    def synchronize(self) -> None:
        """Let the host wait for it."""
        _queue.settle(self._recorded)

    def wait(self, stream: Any = None) -> None:
        """Let a queue wait for it; there is one."""


class Stream(torch.Stream):
    """The queue, as ``torch.cuda.Stream``; all of them are one."""

    def synchronize(self) -> None:
        """Let the host wait for all that is in it."""
        wait()

    def query(self) -> bool:
        """Whether it is empty."""
        _queue.settle()
        return _queue.done >= _queue.issued


def current_stream(device: Any = None) -> Stream:
    """The current one, whose waits the queue sees."""
    found = torch.accelerator.current_stream()
    return Stream(stream_id=found.stream_id, device_index=found.device_index, device_type=found.device_type)


def _synchronize(*device: Any) -> None:
    wait()


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """Call the memory of a tensor of the CPU pinned."""
    storage: Any = tensor.untyped_storage()
    storage.pinned = True
    return tensor


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether a tensor is in pinned memory of the host."""
    return tensor.is_cpu and hasattr(tensor.untyped_storage(), "pinned")
