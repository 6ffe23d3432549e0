"""Which region an autograd node was made in, told by its number.

Activation checkpointing that is not torch's own restores no mark of a region, and the engine gives all nodes the thread
state of the call to ``backward()``, so none reaches what is run again. But the node that is being evaluated was made in
the region, and a thread numbers the nodes that it makes. So a region in which somebody asked leaves behind the range of
numbers that its nodes got, and in backward the current node's number is looked up.

A checkpoint inside a recomputation has nodes made during backward, which are in no range. Their backward is a graph
task within the one that recomputes, on the same thread, and takes over the last answer that was given there.

What a CPU recomputes in another thread than the forward's is not recognised: numbers of different threads are alike.
"""

from __future__ import annotations

import bisect
import collections
import operator
import threading
import weakref
from typing import Any

import torch

from xamp.casting.compiler import keep_eager
from xamp.casting.mark import Mark

__all__ = ["answer", "find", "keep"]

_RANGES = 1 << 16
"""Ranges kept for a thread: as many regions may be left between a forward and its backward. 6 MB where all are used."""

_THREADS = 256
"""Threads whose ranges are kept, dead ones included: DataParallel starts new ones for each forward."""


class _Ranges:
    """Sorted ranges [first, last) of the numbers that one thread's autograd nodes got in regions."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, int, Mark]] = []

    def add(self, first: int, last: int, mark: Mark) -> None:
        rows = self._rows
        while rows and rows[-1][0] >= first:
            rows.pop()  # of regions within this one
        if rows and rows[-1][1] >= first and rows[-1][2] is mark:
            first = rows.pop()[0]
        rows.append((first, last, mark))
        if len(rows) > 2 * _RANGES:
            self._rows = rows[_RANGES:]  # not in place: another thread may be looking

    def find(self, number: int) -> Mark | None:
        rows = self._rows
        at = bisect.bisect_right(rows, number, key=operator.itemgetter(0)) - 1
        return rows[at][2] if at >= 0 and number < rows[at][1] else None


class _Backward:
    """Queued in a graph task, and so alive as long as that is, whether it ends well or not."""

    def __call__(self) -> None:
        pass


class _Here(threading.local):
    """What is known of this thread.

    Attributes:
        ranges: of the nodes made in its regions; None before the first.
        answer: the last mark that was found in a backward, that backward, and the graph task's number.
    """

    def __init__(self) -> None:
        self.ranges: _Ranges | None = None
        self.answer: tuple[weakref.ref[_Backward], int, Mark] | None = None
        # Nodes on an accelerator are evaluated by threads of the engine's own, which Python has not started.
        self.is_engine = isinstance(threading.current_thread(), threading._DummyThread)


_here = _Here()
_all_ranges: collections.deque[_Ranges] = collections.deque(maxlen=_THREADS)
_graph_task = torch._C._current_graph_task_id
_current_node = torch._C._current_autograd_node


@keep_eager
def keep(first: int, last: int, mark: Mark) -> None:
    """Remember that this thread's nodes from ``first`` to before ``last`` were made in a region."""
    if last <= first:
        return
    if _here.ranges is None:
        _here.ranges = _Ranges()
        _all_ranges.append(_here.ranges)
    _here.ranges.add(first, last, mark)


@keep_eager
def find() -> Mark | None:
    """The mark of the region in which the node was made that backward evaluates now."""
    node: Any = _current_node()
    if node is None:
        return None
    number, last = node._sequence_nr(), _here.answer
    if last is not None and last[0]() is None:
        last = _here.answer = None  # that backward has ended
    kept = list(_all_ranges) if _here.is_engine else [_here.ranges] if _here.ranges is not None else []
    found = next((mark for ranges in kept if (mark := ranges.find(number)) is not None), None)
    if found is None and last is not None and last[1] != _graph_task():
        return last[2]  # in a recomputation within the one for which that answer was given
    if found is None:
        _here.answer = None
    else:
        answer(found)
    return found


@keep_eager
def answer(mark: Mark) -> None:
    """Remember what was found in this backward, for recomputations within this one."""
    task, last = _graph_task(), _here.answer
    if last is not None and last[0]() is not None and last[1] == task and last[2] is mark:
        return
    backward = _Backward()
    torch.autograd.Variable._execution_engine.queue_callback(backward)
    _here.answer = weakref.ref(backward), task, mark
