"""The one rule for exceptions: what they leave half done is found by a mark, and repaired by whatever comes next.

Where xamp's own code writes (entering and leaving ``scale_loss``, ``master_params``, the step, clipping,
``zero_grad``), a mark is set first and taken away last. So an exception at any bytecode, Ctrl-C too, leaves it, and
nobody has to catch that. Everything that reaches the session next finds the mark first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Mark"]


class Mark:
    """Tells that code of xamp is writing, or was when an exception ended it.

    Args:
        repair: makes the session whole again; is given the call that was ended. It may be ended itself, and is then
            called again.
    """

    def __init__(self, repair: Callable[[str], None]) -> None:
        self._repair = repair
        self._call = ""

    def settle(self) -> None:
        """Repair what an exception has left half done, if one has."""
        if self._call:
            self._repair(self._call)
            self._call = ""

    def begin(self, call: str) -> None:
        """Set the mark: ``call`` is about to write. Whatever might be refused has been asked before."""
        if self._call:
            self.settle()
        self._call = call

    def end(self) -> None:
        """Take the mark away: all is written."""
        self._call = ""

    def run_foreign(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``function``, code of others within a marked part: what it calls of xamp finds no mark."""
        call = self._call
        try:
            self._call = ""
            result = function(*args, **kwargs)
            if self._call:
                self.settle()  # a call within has left something
            self._call = call
            return result
        except BaseException:
            self._call = call
            raise
