"""Tells code in which of xamp's regions it runs: functions registered with xamp act in regions and nowhere else.

A region is a stretch of one thread in which xamp has set the autocast state: a method of a model of ``initialize``,
``session.autocast()``, ``xamp.autocast``. The state and the mark of a region are set and restored in one place,
:func:`enter` and :func:`leave`. Anything else that a region needs, such as the slot of an op policy, belongs there too.

:func:`current` answers for three kinds of code:

* Code that runs in a region reads the mark that :func:`enter` left on the thread.
* Code that torch.compile traces reads the same mark. The compiler treats it like any attribute: the answer becomes a
  constant of the graph, and the mark with which the compiled function was entered becomes one of its guards.
* Code that activation checkpointing recomputes during backward runs long after its region was left. For torch's own
  checkpointing, :mod:`xamp.casting.recompute` restores the mark. For the checkpointing of other libraries,
  :mod:`xamp.casting.node_numbers` finds the mark by the autograd node that backward evaluates.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from xamp.casting import node_numbers
from xamp.casting.features_in_use import needs
from xamp.casting.region_mark import PORTABLE, REPLACED, SLOT, Mark, no_casts_mark
from xamp.torch_compat.compiler import keep_eager
from xamp.torch_compat.torch_private import autocast
from xamp.torch_compat.torch_private.autograd import current_graph_task_id, get_sequence_nr
from xamp.torch_compat.torch_private.dispatch import is_torch_function_mode_enabled

__all__ = [
    "casts_on",
    "current",
    "drop_casts",
    "enter",
    "get_slot",
    "innermost",
    "leave",
    "next_number",
    "open_region",
    "prepare_tracing",
    "replay",
    "restore",
    "run_traced",
    "set_slot",
    "snapshot",
]


class _ThreadState(threading.local):
    """The state of one thread.

    Attributes:
        mark: the mark of the innermost region; None outside of regions.
        mark_was_read: whether code has asked for the mark since the outermost region was entered.
    """

    def __init__(self) -> None:
        # An attribute of the instance, not of the class: the compiler guards the two in different ways.
        self.mark: Mark | None = None
        self.mark_was_read = False


_thread = _ThreadState()
next_number = get_sequence_nr
"""Returns the number that this thread's next autograd node gets."""

_graph_task = current_graph_task_id
_is_compiling = torch.compiler.is_compiling
_has_function_mode = is_torch_function_mode_enabled
_is_enabled, _set_enabled = autocast.is_autocast_enabled, autocast.set_autocast_enabled
_get_dtype, _set_dtype = autocast.get_autocast_dtype, autocast.set_autocast_dtype
_is_cached, _set_cached = autocast.is_autocast_cache_enabled, autocast.set_autocast_cache_enabled
_increment_nesting, _decrement_nesting = autocast.autocast_increment_nesting, autocast.autocast_decrement_nesting
_clear_cache = autocast.clear_autocast_cache

Entered = tuple[Mark, "Mark | None", int, bool, "torch.dtype | None", bool, "tuple[Any] | None", int]


def get_slot() -> Any:
    """Return the dtype of :data:`SLOT` on this thread, None where the slot is off; with a recipe of fp8 a tuple."""
    plain = _get_dtype(SLOT) if _is_enabled(SLOT) else None
    return plain if needs.fp8 is None else needs.fp8.read(plain)


@keep_eager
def set_slot(slot: Any) -> None:
    """Set what :func:`get_slot` returns; None switches the slot off."""
    if needs.fp8 is not None:
        slot = needs.fp8.write(slot)
    _set_enabled(SLOT, slot is not None)
    _set_dtype(SLOT, PORTABLE if slot is None else slot)


@keep_eager
def enter(mark: Mark, number: int, cached: bool | None = True) -> Entered:
    """Set the autocast state of a region and leave its mark on this thread.

    This function does by hand what ``torch.autocast`` does on entry. Making a ``torch.autocast`` object costs more than
    this whole function.

    Args:
        mark: the mark of the region. Inside a ``disable_casts`` block, the region is entered without casts.
        number: the result of :func:`next_number` at this moment.
        cached: whether casts of weights are cached; None leaves that setting as it is.

    Returns:
        The argument for :func:`leave`, which must be called on this thread, after all regions that were entered later
        have been left.
    """
    before = _thread.mark
    if before is not None and before.blocked:
        mark = no_casts_mark(mark.device_type)
    device, dtype, was_cached = mark.device_type, mark.dtype, _is_cached()
    if device is None:
        _thread.mark = mark
        return mark, before, number, False, None, was_cached, None, 0
    enabled, old, depth, slot = _is_enabled(device), _get_dtype(device), 0, None
    cached = cached and mark.caches
    try:
        depth = _increment_nesting()
        if depth != 1:  # what a region around this one has cast may be older than the weights, or of another dtype
            drop_casts(mark)
        _set_enabled(device, dtype is not None and mark.casting is None)
        if dtype is not None and dtype is not old:
            _set_dtype(device, dtype)
        if cached is not was_cached and cached is not None:
            _set_cached(cached)
        _thread.mark = mark
        if mark.slot is not (None if before is None else before.slot):
            slot = (get_slot(),)
            set_slot(mark.slot)
        return mark, before, number, enabled, old, was_cached, slot, depth
    except BaseException:  # Ctrl-C: nobody will leave this region
        _put_back((mark, before, number, enabled, old, was_cached, slot, depth))
        raise


@keep_eager
def leave(entered: Entered) -> None:
    """Restore the state that :func:`enter` found."""
    try:
        mark, before, number, enabled, dtype, cached, slot, _ = entered
        _thread.mark = before
        if slot is not None:
            set_slot(slot[0])
        if mark.device_type is not None and dtype is not None:
            _set_enabled(mark.device_type, enabled)
            _set_dtype(mark.device_type, dtype)
            _set_cached(cached)
            _decrement_nesting()
            autocast.clear_autocast_cache()  # within another region too: torch's cache does not know their dtype
            if mark.casting is not None:
                mark.casting.clear()
        if needs.marks and _thread.mark_was_read:
            _keep_node_numbers(mark, before, number)
    except BaseException:  # Ctrl-C in the middle
        _put_back(entered)
        raise


@keep_eager
def _put_back(entered: Entered) -> None:
    """Restore the state that :func:`enter` found, however much of that is done."""
    mark, before, _, enabled, dtype, cached, slot, depth = entered
    _thread.mark = before
    if slot is not None:
        set_slot(slot[0])
    if mark.device_type is None or dtype is None:
        return
    _set_enabled(mark.device_type, enabled)
    _set_dtype(mark.device_type, dtype)
    _set_cached(cached)
    _increment_nesting()
    now = _decrement_nesting()
    while depth and now >= depth:
        now = _decrement_nesting()
    drop_casts(mark)  # they only save time


@keep_eager
def drop_casts(mark: Mark | None = None) -> None:
    """Drop the casts of weights that autocast keeps until the outermost region ends, and those of ``mark``'s policy."""
    autocast.clear_autocast_cache()
    if mark is not None and mark.casting is not None:
        mark.casting.clear()


@keep_eager
def _keep_node_numbers(mark: Mark, before: Mark | None, first: int) -> None:
    """Keep the numbers of the nodes made in a region in which a mark was read: recomputation may read it again."""
    if mark.dtype is not None:
        node_numbers.keep(first, next_number(), mark)
    if before is None:
        _thread.mark_was_read = False


@keep_eager
def snapshot() -> tuple[Mark | None, Any]:
    """Return the mark and the dtype of :data:`SLOT` that hold here, for :func:`replay`."""
    mark, slot = _thread.mark, get_slot()
    if mark is None and _graph_task() >= 0:
        mark = node_numbers.find()
        if slot is None and mark is not None:
            slot = mark.slot
    return mark, slot


@keep_eager
def replay(mark: Mark | None, slot: Any) -> tuple[Mark | None, Any, bool]:
    """Set the mark and the slot that :func:`snapshot` returned, but no other autocast state.

    Returns:
        The argument for :func:`restore`.
    """
    before = _thread.mark, get_slot(), _thread.mark_was_read
    _thread.mark = mark
    set_slot(slot)
    if mark is not None and mark.dtype is not None and _graph_task() >= 0:
        node_numbers.answer(mark)  # for checkpoints of another library inside this recomputation
    return before


@keep_eager
def restore(before: tuple[Mark | None, Any, bool]) -> None:
    """Undo :func:`replay`."""
    _thread.mark, slot, _thread.mark_was_read = before
    set_slot(slot)


def open_region(mark: Mark, cached: bool | None = True) -> Callable[[], None]:
    """Enter a region as :func:`enter` does; return a function that leaves it."""
    entered = None
    try:
        leave_it = functools.partial(leave, entered := enter(mark, next_number(), cached))
        device = mark.device_type
        if device is None or not _has_function_mode():
            return leave_it
        # A tracer such as torch.export's records only torch.autocast objects.
        stack = contextlib.ExitStack()
        stack.callback(leave_it)
        on = _is_enabled(device)
        stack.enter_context(torch.autocast(device, dtype=_get_dtype(device), enabled=on, cache_enabled=cached))
        return stack.close
    except BaseException:
        if entered is not None:
            _put_back(entered)
        raise


def _traced_slot(mark: Mark) -> Any:
    """Return the dtype for :data:`SLOT` in a traced graph; the mark does not reach the code that lowers the graph."""
    return REPLACED if mark.slot is None and needs.replaced_outside else mark.slot


@contextlib.contextmanager
def traced_region(mark: Mark, cached: bool | None = True) -> Iterator[None]:
    """Enter a region in code that is being traced, by a ``torch.autocast`` object, which every tracer knows.

    This is a generator because Dynamo traces generators in more versions of torch than classes.
    """
    before = _thread.mark if needs.marks else None
    if before is not None and before.blocked:
        mark = no_casts_mark(mark.device_type)
    prepare_tracing()
    if needs.marks:
        _thread.mark = mark
    try:
        if mark.device_type is None:
            yield
        else:
            on, slot = mark.dtype is not None and mark.casting is None, _traced_slot(mark)
            cached = cached if mark.caches and mark.casting is None else False
            with torch.autocast(mark.device_type, dtype=mark.dtype, enabled=on, cache_enabled=cached):
                _clear_cache()  # a call in the graph, for who runs its autocast blocks as they are
                if needs.fp8 is not None:
                    one, other, third = needs.fp8.parts(slot)
                    with torch.autocast(*one), torch.autocast(*other), torch.autocast(*third):
                        yield
                elif slot is get_slot():
                    yield
                else:
                    with torch.autocast(SLOT, dtype=slot or PORTABLE, enabled=slot is not None):
                        yield
    finally:
        if mark.device_type is not None:
            _clear_cache()
        if needs.marks:
            _thread.mark = before


def run_traced(mark: Mark, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` in a region while the call is being traced."""
    with traced_region(mark):
        return function(*args, **kwargs)


def prepare_tracing() -> None:
    """Run what must run before a region is traced; see :attr:`xamp.casting.features_in_use.Needs.when_tracing`."""
    for function in needs.when_tracing:
        function()


prepare_tracing._dynamo_marked_constant = True  # type: ignore[attr-defined]


def current() -> Mark | None:
    """Return the mark of the region in which the caller runs, or whose forward is being recomputed by this call.

    The result is None outside of xamp's regions, and in a region that casts nothing. A ``torch.autocast`` block inside
    the region may have switched casts off or changed their dtype: only torch's autocast state tells that.
    """
    mark = innermost()
    return None if mark is None or mark.dtype is None else mark


def innermost() -> Mark | None:
    """Return what :func:`current` returns, but also the mark of a region that casts nothing.

    The result is None only outside of xamp's regions. A model whose operators are not cast leaves a mark only while
    some replaced function acts outside of regions too (:mod:`xamp.casting.features_in_use`).
    """
    mark = _thread.mark
    if mark is not None:
        if mark.dtype is not None and not _is_compiling():
            _thread.mark_was_read = True
        return mark
    if _is_compiling() or _graph_task() < 0:
        return None
    return node_numbers.find()


@keep_eager
def read_portable() -> bool:
    """Tell whether the portable policy casts operators here, and note that somebody asked.

    It does in eager, recomputed and traced code.
    """
    if _is_enabled(SLOT) and _get_dtype(SLOT) is PORTABLE:
        _thread.mark_was_read = True
        return True
    if _graph_task() < 0 or _thread.mark is not None:
        return False
    mark = node_numbers.find()
    return mark is not None and mark.portable


@keep_eager
def casts_on(device_type: str) -> bool:
    """Tell whether a region casts operators on ``device_type`` here, under any op policy; see :func:`read_portable`."""
    mark = current()
    if mark is None:
        return read_portable()
    return mark.device_type == device_type and mark.casting is None
