"""``xamp.accel.nvtx``: the names of torch.cuda.nvtx, which annotate parts of a script for a profiler.

If the device's module has no nvtx, the annotations become ranges of ``torch.profiler``.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import torch

from xamp.accel.used_device import in_use
from xamp.values.accel_names import NVTX

__all__ = [*NVTX]

_thread = threading.local()  # .open: the ranges that range_push opened, innermost last
_started: dict[int, Any] = {}  # ranges of range_start, which may end in another thread
_handles = itertools.count(1)


def range_push(msg: str) -> int:
    """Open a range inside the ranges that are open in this thread.

    Returns:
        The number of ranges that were open before, as in torch.cuda.nvtx: 0 for the outermost range.
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
        The number of ranges that are still open; -1 if none was open, which is no error, as in torch.cuda.nvtx.
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
    """Begin a range that may end in any thread; return its handle for :func:`range_end`."""
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
    """Mark one moment."""
    native = _native()
    if native is not None:
        native.mark(msg)
    else:
        _begin(msg).__exit__(None, None, None)


@contextlib.contextmanager
def range(msg: str, *args: Any, **kwargs: Any) -> Iterator[None]:
    """Make a block, or a decorated function, a range with the name ``msg.format(*args, **kwargs)``."""
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
