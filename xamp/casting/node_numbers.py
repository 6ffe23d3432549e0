"""Finds the region in which an autograd node was made, by the node's number.

Activation checkpointing of other libraries does not restore the mark of a region, and the autograd engine evaluates all
nodes with the thread state of the call to ``backward()``. So the mark does not reach recomputed code. But the node
that backward evaluates was made in the region, and each thread numbers the nodes that it makes. A region in which a
mark was read therefore keeps the range of its nodes' numbers, and backward looks up the number of the current node.

A checkpoint inside a recomputation makes its nodes during backward; their numbers are in no range. Their backward is a
graph task inside the graph task that recomputes, on the same thread. It reuses the last answer that was found there.

A recomputation on a CPU in another thread than the forward's is not recognised: threads use the same numbers.
"""

from __future__ import annotations

import bisect
import collections
import operator
import threading
import weakref
from typing import Any

from xamp.casting.region_mark import Mark
from xamp.torch_compat.compiler import keep_eager
from xamp.torch_compat.torch_private.autograd import current_autograd_node, current_graph_task_id, queue_callback

__all__ = ["answer", "find", "keep"]

_RANGES = 1 << 16
"""Ranges kept per thread: so many regions may be left between a forward and its backward. All of them take 6 MB."""

_THREADS = 256
"""Threads whose ranges are kept, ended threads included: DataParallel starts new threads for each forward."""


class _Ranges:
    """The sorted ranges [first, last) of the numbers that autograd nodes of one thread got in regions."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, int, Mark]] = []

    def add(self, first: int, last: int, mark: Mark) -> None:
        rows = self._rows
        while rows and rows[-1][0] >= first:
            rows.pop()  # the range of a region inside this one
        if rows and rows[-1][1] >= first and rows[-1][2] is mark:
            first = rows.pop()[0]
        rows.append((first, last, mark))
        if len(rows) > 2 * _RANGES:
            self._rows = rows[_RANGES:]  # not in place: another thread may be reading

    def find(self, number: int) -> Mark | None:
        rows = self._rows
        at = bisect.bisect_right(rows, number, key=operator.itemgetter(0)) - 1
        return rows[at][2] if at >= 0 and number < rows[at][1] else None


class _Backward:
    """A callback queued in a graph task. It lives until the task ends, with or without an error."""

    def __call__(self) -> None:
        pass


class _ThreadState(threading.local):
    """The state of one thread.

    Attributes:
        ranges: the ranges of the nodes made in its regions; None before the first region.
        answer: the backward in which a mark was last found, the number of that graph task, and the mark.
        is_engine: whether this is a thread of the autograd engine. Such threads evaluate the nodes of accelerators;
            Python has not started them.
    """

    def __init__(self) -> None:
        self.ranges: _Ranges | None = None
        self.answer: tuple[weakref.ref[_Backward], int, Mark] | None = None
        self.is_engine = isinstance(threading.current_thread(), threading._DummyThread)


_thread = _ThreadState()
_all_ranges: collections.deque[_Ranges] = collections.deque(maxlen=_THREADS)
_graph_task = current_graph_task_id
_current_node = current_autograd_node


@keep_eager
def keep(first: int, last: int, mark: Mark) -> None:
    """Remember that a region made the nodes of this thread with the numbers from ``first`` to ``last`` - 1."""
    if last <= first:
        return
    if _thread.ranges is None:
        _thread.ranges = _Ranges()
        _all_ranges.append(_thread.ranges)
    _thread.ranges.add(first, last, mark)


@keep_eager
def find() -> Mark | None:
    """Return the mark of the region that made the node which backward evaluates now; None if there is none."""
    node: Any = _current_node()
    if node is None:
        return None
    number, last = node._sequence_nr(), _thread.answer
    if last is not None and last[0]() is None:
        last = _thread.answer = None  # that backward has ended
    kept = list(_all_ranges) if _thread.is_engine else [_thread.ranges] if _thread.ranges is not None else []
    found = next((mark for ranges in kept if (mark := ranges.find(number)) is not None), None)
    if found is None and last is not None and last[1] != _graph_task():
        return last[2]  # the node is from a checkpoint inside the recomputation for which that mark was found
    if found is None:
        _thread.answer = None
    else:
        answer(found)
    return found


@keep_eager
def answer(mark: Mark) -> None:
    """Remember the mark found in this backward, for checkpoints inside the recomputation."""
    task, last = _graph_task(), _thread.answer
    if last is not None and last[0]() is not None and last[1] == task and last[2] is mark:
        return
    backward = _Backward()
    queue_callback(backward)
    _thread.answer = weakref.ref(backward), task, mark
