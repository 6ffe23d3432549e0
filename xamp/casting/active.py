"""Which of xamp's regions this code runs in: what is registered with xamp acts there, and is inert everywhere else.

A region is a stretch of one thread in which xamp has set the autocast state: a method of a model of ``initialize``,
``session.autocast()``, ``xamp.autocast``. :func:`enter` and :func:`leave` are the one place where that state and the
mark of the region are set and restored; whatever else a region may need, such as an op policy's marker, belongs there.

:func:`current` answers for three kinds of code:

* code that runs in a region reads the mark that :func:`enter` left on the thread;
* code that torch.compile traces reads the same mark. The compiler follows it like any attribute: the answer is a
  constant of the graph, and the mark with which the compiled function was entered is one of its guards;
* code that activation checkpointing runs again during backward, long after its region was left. torch's own puts the
  mark back (:mod:`xamp.casting.recompute`); for another library's the node that backward evaluates tells it
  (:mod:`xamp.casting.node_numbers`).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from xamp.casting import node_numbers
from xamp.casting.compiler import keep_eager
from xamp.casting.mark import PORTABLE, REPLACED, SLOT, Mark, no_casts_mark
from xamp.casting.needs import needs

__all__ = [
    "current",
    "enter",
    "get_slot",
    "leave",
    "next_number",
    "open_region",
    "prepare_tracing",
    "replay",
    "restore",
    "run_traced",
    "set_slot",
    "standing",
    "surrounding",
]


class _Here(threading.local):
    """What is known of this thread.

    Attributes:
        mark: of the innermost region.
        asked: somebody got a mark from :func:`current` since the outermost region was entered.
    """

    def __init__(self) -> None:
        self.mark: Mark | None = None  # set here, not in the class: the compiler's guards tell the two apart
        self.asked = False


_here = _Here()
next_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number that this thread's next autograd node gets."""

_graph_task = torch._C._current_graph_task_id
_is_compiling = torch.compiler.is_compiling
_has_function_mode = torch._C._is_torch_function_mode_enabled
# Not the same names in torch: what runs scripts for one device on another replaces those by functions that ask which
# device is meant, and that the compiler cannot trace.
_is_enabled, _set_enabled = torch._C.is_autocast_enabled, torch._C.set_autocast_enabled
_get_dtype, _set_dtype = torch._C.get_autocast_dtype, torch._C.set_autocast_dtype
_is_cached, _set_cached = torch._C.is_autocast_cache_enabled, torch._C.set_autocast_cache_enabled
_deeper, _shallower = torch._C.autocast_increment_nesting, torch._C.autocast_decrement_nesting
_clear_cache = torch._C.clear_autocast_cache

Before = tuple[Mark, "Mark | None", int, bool, "torch.dtype | None", bool, "tuple[torch.dtype | None] | None"]


def get_slot() -> torch.dtype | None:
    """The dtype of :data:`SLOT` on this thread; None where it is off."""
    return _get_dtype(SLOT) if _is_enabled(SLOT) else None


@keep_eager
def set_slot(slot: torch.dtype | None) -> None:
    """Set what :func:`get_slot` returns."""
    _set_enabled(SLOT, slot is not None)
    _set_dtype(SLOT, PORTABLE if slot is None else slot)


@keep_eager
def enter(mark: Mark, number: int, cached: bool | None = True) -> Before:
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
        mark = no_casts_mark(mark.device_type)
    device, dtype, was_cached = mark.device_type, mark.dtype, _is_cached()
    if device is None:
        _here.mark = mark
        return mark, before, number, False, None, was_cached, None
    enabled, old = _is_enabled(device), _get_dtype(device)
    _set_enabled(device, dtype is not None and mark.casting is None)
    if dtype is not None and dtype is not old:
        _set_dtype(device, dtype)
    _deeper()
    if cached is not was_cached and cached is not None:
        _set_cached(cached)
    _here.mark = mark
    slot = None
    if mark.slot is not (None if before is None else before.slot):
        slot = (get_slot(),)
        set_slot(mark.slot)
    return mark, before, number, enabled, old, was_cached, slot


@keep_eager
def leave(entered: Before) -> None:
    """Restore what :func:`enter` found."""
    mark, before, number, enabled, dtype, cached, slot = entered
    _here.mark = before
    if slot is not None:
        set_slot(slot[0])
    if mark.device_type is not None and dtype is not None:
        if _shallower() == 0:
            _clear_cache()
            if mark.casting is not None:
                mark.casting.clear()
        _set_enabled(mark.device_type, enabled)
        _set_dtype(mark.device_type, dtype)
        _set_cached(cached)
    if needs.marks and _here.asked:
        _note(mark, before, number)


@keep_eager
def _note(mark: Mark, before: Mark | None, first: int) -> None:
    """Keep the numbers of the nodes made in a region, where somebody asked and may ask again in backward."""
    if mark.dtype is not None:
        node_numbers.keep(first, next_number(), mark)
    if before is None:
        _here.asked = False


@keep_eager
def standing() -> tuple[Mark | None, torch.dtype | None]:
    """What holds here, for :func:`replay`: the mark, and the dtype of :data:`SLOT`."""
    mark, slot = _here.mark, get_slot()
    if mark is None and _graph_task() >= 0:
        mark = node_numbers.find()
        if slot is None and mark is not None:
            slot = mark.slot
    return mark, slot


@keep_eager
def replay(mark: Mark | None, slot: torch.dtype | None) -> tuple[Mark | None, torch.dtype | None, bool]:
    """Put back what :func:`standing` told, the autocast state apart; returns what :func:`restore` needs."""
    before = _here.mark, get_slot(), _here.asked
    _here.mark = mark
    set_slot(slot)
    if mark is not None and mark.dtype is not None and _graph_task() >= 0:
        node_numbers.answer(mark)  # for what is checkpointed in there by another library
    return before


@keep_eager
def restore(before: tuple[Mark | None, torch.dtype | None, bool]) -> None:
    """Undo :func:`replay`."""
    _here.mark, slot, _here.asked = before
    set_slot(slot)


def open_region(mark: Mark, cached: bool | None = True) -> Callable[[], None]:
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


def _traced_slot(mark: Mark) -> torch.dtype | None:
    """What :data:`SLOT` is to say in a graph, where no mark reaches what runs when the graph is lowered."""
    return REPLACED if mark.slot is None and needs.replaced_outside else mark.slot


@contextlib.contextmanager
def traced_region(mark: Mark, cached: bool | None = True) -> Iterator[None]:
    """A region in code that is being traced: with torch's own object, which every tracer knows.

    A generator, since Dynamo traces those in more versions of torch than a class.
    """
    before = _here.mark if needs.marks else None
    if before is not None and before.blocked:
        mark = no_casts_mark(mark.device_type)
    prepare_tracing()
    if needs.marks:
        _here.mark = mark
    try:
        if mark.device_type is None:
            yield
        else:
            on, slot = mark.dtype is not None and mark.casting is None, _traced_slot(mark)
            cached = cached if mark.casting is None else False
            with torch.autocast(mark.device_type, dtype=mark.dtype, enabled=on, cache_enabled=cached):
                if slot is get_slot():
                    yield
                else:
                    with torch.autocast(SLOT, dtype=slot or PORTABLE, enabled=slot is not None):
                        yield
    finally:
        if needs.marks:
            _here.mark = before


def run_traced(mark: Mark, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` in a region while it is being traced."""
    with traced_region(mark):
        return function(*args, **kwargs)


def prepare_tracing() -> None:
    """To be called where a region is traced."""
    needs.prepare_tracing()


prepare_tracing._dynamo_marked_constant = True  # type: ignore[attr-defined]


def current() -> Mark | None:
    """The mark of the region in which the caller runs, or which backward recomputes by running it.

    None outside of xamp's regions and where the innermost one casts nothing. A ``torch.autocast`` within a region may
    have switched casts off, or to another dtype: ask torch for that.
    """
    mark = surrounding()
    return None if mark is None or mark.dtype is None else mark


def surrounding() -> Mark | None:
    """As :func:`current`, but also the mark of a region that casts nothing: None is outside of xamp's regions only.

    A model whose operators are not cast leaves a mark only while functions are replaced outside of regions
    (:mod:`xamp.casting.needs`).
    """
    mark = _here.mark
    if mark is not None:
        if mark.dtype is not None and not _is_compiling():
            _here.asked = True
        return mark
    if _is_compiling() or _graph_task() < 0:
        return None
    return node_numbers.find()


@keep_eager
def is_portable() -> bool:
    """Whether operators are to be cast by the portable policy: here, in what backward recomputes, in what is traced."""
    if _is_enabled(SLOT) and _get_dtype(SLOT) is PORTABLE:
        _here.asked = True
        return True
    if _graph_task() < 0 or _here.mark is not None:
        return False
    mark = node_numbers.find()
    return mark is not None and mark.portable
