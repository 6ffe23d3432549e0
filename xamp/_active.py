"""Which of xamp's regions this code runs in: what is registered with xamp acts there, and is inert everywhere else.

A region is a stretch of one thread in which xamp has set the autocast state: a method of a model of ``initialize``,
``session.autocast()``, ``xamp.autocast``. :func:`enter` and :func:`leave` are the one place where that state and the
mark of the region are set and restored; whatever else a region may need, such as an op policy's marker, belongs there.

:func:`current` answers for three kinds of code:

* code that runs in a region reads the mark that :func:`enter` left on the thread;
* code that torch.compile traces reads the same mark. The compiler follows it like any attribute: the answer is a
  constant of the graph, and the mark with which the compiled function was entered is one of its guards;
* code that activation checkpointing runs again during backward, long after its region was left. Checkpointing restores
  the autocast state and nothing else, and the engine gives all nodes the thread state of the call to ``backward()``, so
  no mark of a region reaches them. But the node that is being evaluated was made in the region, and a thread numbers
  the nodes that it makes. So a region in which somebody asked leaves behind the range of numbers that its nodes got,
  and in backward the current node's number is looked up.

A checkpoint inside a recomputation has nodes made during backward, which are in no range. Their backward is a graph
task within the one that recomputes, on the same thread, and takes over the last answer that was given there.

What a CPU recomputes in another thread than the forward's is not recognised: numbers of different threads are alike.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import dataclasses
import functools
import operator
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = [
    "Inside",
    "block",
    "current",
    "enter",
    "inside",
    "leave",
    "next_number",
    "open_region",
    "prepare_tracing",
    "run_traced",
]

_RANGES = 1 << 16
"""Ranges kept for a thread: as many regions may be left between a forward and its backward. 6 MB where all are used."""

SLOT = "ipu"
"""A device type of torch that nobody has. In a region under the portable policy float64 is its autocast dtype: part of
the autocast state, and so seen by the compiler's guards, and by entries that it runs on fake tensors."""

_OFF = torch.float16
"""That dtype outside of such regions: torch's default."""

_THREADS = 256
"""Threads whose ranges are kept, dead ones included: DataParallel starts new ones for each forward."""


@dataclasses.dataclass(frozen=True, eq=False)
class Inside:
    """The mark of a region.

    Attributes:
        device_type: whose autocast state the region sets; None sets none.
        dtype: what operators are cast to; None: not at all.
        blocked: regions entered in here stay without casts: ``disable_casts``.
        portable: operators are cast by the portable policy, not by the device's own list alone.
    """

    device_type: str | None
    dtype: torch.dtype | None
    blocked: bool = False
    portable: bool = False


@functools.cache
def inside(device_type: str, dtype: torch.dtype | None, portable: bool = False) -> Inside:
    """The mark of a region that casts operators on ``device_type`` to ``dtype``, the same object each time."""
    return Inside(device_type, dtype, portable=portable and dtype is not None)


@functools.cache
def _block(device_type: str | None) -> Inside:
    return Inside(device_type, None, blocked=True)


def block(device_type: str | None) -> Inside:
    """The mark of a region that must not cast; ``device_type`` None where it has no autocast state to set."""
    return _block(device_type)


# What torch.compiler.assume_constant_result sets: called while tracing, the result a constant. Calling the decorator
# would import the compiler with every import of xamp.
block._dynamo_marked_constant = True  # type: ignore[attr-defined]


class _Ranges:
    """Sorted ranges [first, last) of the numbers that one thread's autograd nodes got in regions."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, int, Inside]] = []

    def add(self, first: int, last: int, mark: Inside) -> None:
        rows = self._rows
        while rows and rows[-1][0] >= first:
            rows.pop()  # of regions within this one
        if rows and rows[-1][1] >= first and rows[-1][2] is mark:
            first = rows.pop()[0]
        rows.append((first, last, mark))
        if len(rows) > 2 * _RANGES:
            self._rows = rows[_RANGES:]  # not in place: another thread may be looking

    def find(self, number: int) -> Inside | None:
        rows = self._rows
        at = bisect.bisect_right(rows, number, key=operator.itemgetter(0)) - 1
        return rows[at][2] if at >= 0 and number < rows[at][1] else None


_all_ranges: collections.deque[_Ranges] = collections.deque(maxlen=_THREADS)


class _Backward:
    """Queued in a graph task, and so alive as long as that is, whether it ends well or not."""

    def __call__(self) -> None:
        pass


class _Here(threading.local):
    """What is known of this thread.

    Attributes:
        mark: of the innermost region.
        asked: somebody got a mark from :func:`current` since the outermost region was entered.
        ranges: of the nodes made in this thread's regions; None before the first.
        answer: the last mark that :func:`current` gave in a backward, that backward, and the graph task's number.
    """

    def __init__(self) -> None:
        self.mark: Inside | None = None  # set here, not in the class: the compiler's guards tell the two apart
        self.asked = False
        self.ranges: _Ranges | None = None
        self.answer: tuple[weakref.ref[_Backward], int, Inside] | None = None
        # Nodes on an accelerator are evaluated by threads of the engine's own, which Python has not started.
        self.is_engine = isinstance(threading.current_thread(), threading._DummyThread)


_here = _Here()
next_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number that this thread's next autograd node gets."""

_graph_task = torch._C._current_graph_task_id
_current_node = torch._C._current_autograd_node
_is_compiling = torch.compiler.is_compiling
_has_function_mode = torch._C._is_torch_function_mode_enabled
_is_enabled, _set_enabled = torch.is_autocast_enabled, torch.set_autocast_enabled
_get_dtype, _set_dtype = torch.get_autocast_dtype, torch.set_autocast_dtype
_is_cached, _set_cached = torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled
_deeper, _shallower = torch.autocast_increment_nesting, torch.autocast_decrement_nesting
_clear_cache = torch.clear_autocast_cache

Before = tuple[Inside, "Inside | None", int, bool, "torch.dtype | None", bool, "torch.dtype | None"]


def enter(mark: Inside, number: int, cached: bool | None = True) -> Before:
    """Set the autocast state of a region and leave its mark on this thread.

    By hand what ``torch.autocast`` does on entry: making that object costs more than all of this.

    Args:
        mark: the region. Within a block without casts, it is entered without them.
        number: :func:`next_number` now.
        cached: whether casts of weights are cached; None leaves that as it is.

    Returns:
        What :func:`leave` needs: on this thread, once all that is entered after it was left.
    """
    before = _here.mark
    if before is not None and before.blocked:
        mark = block(mark.device_type)
    device, dtype, was_cached = mark.device_type, mark.dtype, _is_cached()
    if device is None:
        _here.mark = mark
        return mark, before, number, False, None, was_cached, None
    enabled, old = _is_enabled(device), _get_dtype(device)
    _set_enabled(device, dtype is not None)
    if dtype is not None and dtype is not old:
        _set_dtype(device, dtype)
    _deeper()
    if cached is not was_cached and cached is not None:
        _set_cached(cached)
    _here.mark = mark
    slot = None
    if mark.portable is not (before is not None and before.portable):
        slot = _get_dtype(SLOT)
        _set_dtype(SLOT, torch.float64 if mark.portable else _OFF)
        _set_enabled(SLOT, mark.portable)  # guards look at the dtypes of enabled devices only
    return mark, before, number, enabled, old, was_cached, slot


def leave(entered: Before) -> None:
    """Restore what :func:`enter` found."""
    mark, before, number, enabled, dtype, cached, slot = entered
    _here.mark = before
    if slot is not None:
        _set_dtype(SLOT, slot)
        _set_enabled(SLOT, slot is torch.float64)
    if mark.device_type is not None and dtype is not None:
        if _shallower() == 0:
            _clear_cache()
        _set_enabled(mark.device_type, enabled)
        _set_dtype(mark.device_type, dtype)
        _set_cached(cached)
    if is_asked_for and _here.asked:
        _note(mark, before, number)


def _note(mark: Inside, before: Inside | None, first: int) -> None:
    """Keep the numbers of the nodes made in a region, where somebody asked and may ask again in backward."""
    last = next_number()
    if mark.dtype is not None and last > first:
        if _here.ranges is None:
            _here.ranges = _Ranges()
            _all_ranges.append(_here.ranges)
        _here.ranges.add(first, last, mark)
    if before is None:
        _here.asked = False


def open_region(mark: Inside, cached: bool | None = True) -> Callable[[], None]:
    """:func:`enter`, for code that does not know when it is left; returns what leaves."""
    leave_it = functools.partial(leave, enter(mark, next_number(), cached))
    device = mark.device_type
    if device is None or not _has_function_mode():
        return leave_it
    # A tracer such as torch.export.export's sees torch's own object only.
    stack = contextlib.ExitStack()
    stack.callback(leave_it)
    on = _is_enabled(device)
    stack.enter_context(torch.autocast(device, dtype=_get_dtype(device), enabled=on, cache_enabled=cached))
    return stack.close


def run_traced(mark: Inside, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` in a region while it is being traced: with torch's own object, which every tracer knows."""
    before = _here.mark if is_asked_for else None
    if before is not None and before.blocked:
        mark = block(mark.device_type)
    assert mark.device_type is not None
    prepare_tracing()
    if is_asked_for:
        _here.mark = mark
    try:
        with torch.autocast(mark.device_type, dtype=mark.dtype, enabled=mark.dtype is not None, cache_enabled=True):
            if not mark.portable and _get_dtype(SLOT) is not torch.float64:
                return function(*args, **kwargs)
            with torch.autocast(SLOT, dtype=torch.float64 if mark.portable else _OFF, enabled=False):
                return function(*args, **kwargs)
    finally:
        if is_asked_for:
            _here.mark = before


@contextlib.contextmanager
def traced_region(mark: Inside, cached: bool | None = True) -> Iterator[None]:
    """The same as a context manager; a generator, since Dynamo traces those in more versions of torch than a class."""
    before = _here.mark if is_asked_for else None
    if before is not None and before.blocked:
        mark = block(mark.device_type)
    prepare_tracing()
    if is_asked_for:
        _here.mark = mark
    try:
        if mark.device_type is None:
            yield
        else:
            on = mark.dtype is not None
            with torch.autocast(mark.device_type, dtype=mark.dtype, enabled=on, cache_enabled=cached):
                if mark.portable or _get_dtype(SLOT) is torch.float64:
                    with torch.autocast(SLOT, dtype=torch.float64 if mark.portable else _OFF, enabled=False):
                        yield
                else:
                    yield
    finally:
        if is_asked_for:
            _here.mark = before


is_asked_for = False
"""Whether there is anything that asks: what calls :func:`current` sets this, when it is imported.

Where nothing does, no mark is left while tracing: torch.export warns of what a model writes to.
"""

has_registered = False
"""Whether functions are registered that act in regions only."""

when_tracing: list[Callable[[], None]] = []
"""Called each time that the compiler starts to trace a region."""


def prepare_tracing() -> None:
    """To be called where a region is traced."""
    for function in when_tracing:
        function()


prepare_tracing._dynamo_marked_constant = True  # type: ignore[attr-defined]


def current() -> Inside | None:
    """The mark of the region in which the caller runs, or which backward recomputes by running it.

    None outside of xamp's regions and where the innermost one casts nothing. A ``torch.autocast`` within a region may
    have switched casts off, or to another dtype: ask torch for that.
    """
    mark = _here.mark
    if mark is not None:
        if mark.dtype is None:
            return None
        if not _is_compiling():
            _here.asked = True
        return mark
    if _is_compiling() or _graph_task() < 0:
        return None
    return _recomputed()


def is_portable() -> bool:
    """Whether operators are to be cast by the portable policy: here, in what backward recomputes, in what is traced."""
    if _get_dtype(SLOT) is torch.float64:
        _here.asked = True
        return True
    if _graph_task() < 0 or _here.mark is not None:
        return False
    mark = _recomputed()
    return mark is not None and mark.portable


def _recomputed() -> Inside | None:
    """The mark of the region in which the node was made that backward evaluates now."""
    node: Any = _current_node()
    if node is None:
        return None
    number, task, last = node._sequence_nr(), _graph_task(), _here.answer
    if last is not None and last[0]() is None:
        last = _here.answer = None  # that backward has ended
    kept = list(_all_ranges) if _here.is_engine else [_here.ranges] if _here.ranges is not None else []
    found = next((mark for ranges in kept if (mark := ranges.find(number)) is not None), None)
    if found is None and last is not None and last[1] != task:
        return last[2]  # in a recomputation within the one for which that answer was given
    if found is None:
        _here.answer = None
    elif last is None or last[1] != task or last[2] is not found:
        backward = _Backward()
        torch.autograd.Variable._execution_engine.queue_callback(backward)
        _here.answer = weakref.ref(backward), task, found
    return found
