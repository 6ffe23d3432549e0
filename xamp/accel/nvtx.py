"""``xamp.accel.nvtx``: the names of torch.cuda.nvtx, which mark what a script does for a profiler.

Where the device's module has no such marks, they become ranges of ``torch.profiler``.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import torch

from xamp.accel.use import in_use

__all__ = ["mark", "range", "range_end", "range_pop", "range_push", "range_start"]

_thread = threading.local()  # .open: the ranges that range_push opened, innermost last
_started: dict[int, Any] = {}  # those of range_start, which may end in another thread
_handles = itertools.count(1)


def range_push(msg: str) -> int:
    """Open a range within those open in this thread.

    Returns:
        How many were open, as torch.cuda.nvtx counts them: 0 for the outermost.
    """
    native = _native()
    if native is not None:
        return int(native.range_push(msg))
    opened = _open_ranges()
    opened.append(_begin(msg))
    return len(opened) - 1


def range_pop() -> int:
    """Close the innermost range that :func:`range_push` opened in this thread.

    Returns:
        How many are open still; -1 where none was open, as torch.cuda.nvtx has it, which takes that for no error.
    """
    native = _native()
    if native is not None:
        return int(native.range_pop())
    opened = _open_ranges()
    if not opened:
        return -1
    opened.pop().__exit__(None, None, None)
    return len(opened)


def range_start(msg: str) -> int:
    """Begin a range that ends anywhere; returns what :func:`range_end` takes."""
    native = _native()
    if native is not None:
        return int(native.range_start(msg))
    handle = next(_handles)
    _started[handle] = _begin(msg)
    return handle


def range_end(range_id: int) -> None:
    """End a range that :func:`range_start` began."""
    native = _native()
    if native is not None:
        native.range_end(range_id)
    elif range_id in _started:
        _started.pop(range_id).__exit__(None, None, None)


def mark(msg: str) -> None:
    """Note one moment."""
    native = _native()
    if native is not None:
        native.mark(msg)
    else:
        _begin(msg).__exit__(None, None, None)


@contextlib.contextmanager
def range(msg: str, *args: Any, **kwargs: Any) -> Iterator[None]:
    """A block, or a decorated function, as a range called ``msg.format(*args, **kwargs)``."""
    with contextlib.ExitStack() as at_end:
        range_push(msg.format(*args, **kwargs))
        at_end.callback(range_pop)
        yield


def _begin(msg: str) -> Any:
    opened = torch.profiler.record_function(str(msg))
    opened.__enter__()
    return opened


def _open_ranges() -> list[Any]:
    if not hasattr(_thread, "open"):
        _thread.open = []
    opened: list[Any] = _thread.open
    return opened


def _native() -> Any:
    return getattr(in_use().runtime, "nvtx", None)
