"""The one rule for exceptions: what they leave half done is found by a mark, and repaired by whatever comes next.

Where xamp's own code writes (entering and leaving ``scale_loss``, ``master_params``, the step, clipping,
``zero_grad``), a mark is set first and taken away last. So an exception at any bytecode, Ctrl-C too, leaves it, and
nobody has to catch that. Everything that reaches the session next finds the mark first.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

__all__ = ["WritingMark"]


class _ThisThread(threading.local):
    """Tells threads apart, and living ones from dead ones, for less than ``current_thread()`` takes."""

    def __init__(self) -> None:
        self._life: set[None] = set()  # lives as long as the thread
        self.ref = weakref.ref(self._life)


_this_thread = _ThisThread()


class WritingMark:
    """Tells that code of xamp is writing, or was when an exception ended it.

    Args:
        repair: makes the session whole again. It may be ended itself, and is then called again.
        tell: says so; is given the call that was ended.
    """

    def __init__(self, repair: Callable[[], None], tell: Callable[[str], None]) -> None:
        self._repair = repair
        self._tell = tell
        self._part: tuple[str, weakref.ref[set[None]]] | None = None  # the call that is writing, and its thread

    def settle(self) -> None:
        """Repair the session where an exception has left a part half done; not one that another thread is writing."""
        if self._part is not None and not self._is_of_another_thread(self._part[1]):
            self._repair()
            self.run_foreign(self._tell, self._part[0])  # what hears of it may ask the session
            self._part = None

    @staticmethod
    def _is_of_another_thread(thread: weakref.ref[set[None]]) -> bool:
        return thread is not _this_thread.ref and thread() is not None

    def is_set(self) -> bool:
        """Return whether a part is being written, or was not written to its end."""
        return self._part is not None

    def begin(self, call: str) -> None:
        """Set the mark: ``call`` is about to write. Whatever might be refused has been asked before."""
        if self._part is not None:
            self.settle()
        self._part = call, _this_thread.ref

    def end(self) -> None:
        """Take the mark away: all is written."""
        self._part = None

    def run_foreign(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``function``, code of others within a marked part: what it calls of xamp finds no mark."""
        part = self._part
        try:
            self._part = None
            result = function(*args, **kwargs)
            if self.is_set():
                self.settle()  # a call within has left something
            self._part = part
            return result
        except BaseException:
            self._part = part
            raise
