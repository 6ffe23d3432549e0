"""The one rule for exceptions: what they leave half done is found by a mark, and repaired by whatever comes next.

Where xamp's own code writes (entering and leaving ``scale_loss``, ``master_params``, the step, clipping,
``zero_grad``), a mark is set first and taken away last. So an exception at any bytecode, Ctrl-C too, leaves it, and
nobody has to catch that. Everything that reaches the session next finds the mark first.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread, current_thread
from typing import Any

__all__ = ["Mark"]


class Mark:
    """Tells that code of xamp is writing, or was when an exception ended it.

    Args:
        repair: makes the session whole again. It may be ended itself, and is then called again.
        tell: says so; is given the call that was ended.
    """

    def __init__(self, repair: Callable[[], None], tell: Callable[[str], None]) -> None:
        self._repair = repair
        self._tell = tell
        self._call = ""
        self._thread: Thread | None = None

    def settle(self) -> None:
        """Repair what an exception has left half done, if one has; not what another thread is writing."""
        if self._call and not self._is_of_another_thread():
            self._repair()
            self.run_foreign(self._tell, self._call)  # what hears of it may ask the session
            self.end()

    def _is_of_another_thread(self) -> bool:
        return self._thread is not current_thread() and self._thread is not None and self._thread.is_alive()

    def begin(self, call: str) -> None:
        """Set the mark: ``call`` is about to write. Whatever might be refused has been asked before."""
        if self._call:
            self.settle()
        self._thread = current_thread()
        self._call = call

    def end(self) -> None:
        """Take the mark away: all is written."""
        self._call = ""

    def run_foreign(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``function``, code of others within a marked part: what it calls of xamp finds no mark."""
        call, thread = self._call, self._thread
        try:
            self._call = ""
            result = function(*args, **kwargs)
            if self._call:
                self.settle()  # a call within has left something
            self._thread, self._call = thread, call
            return result
        except BaseException:
            self._thread, self._call = thread, call
            raise
