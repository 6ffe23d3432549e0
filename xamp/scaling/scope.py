"""An open ``scale_loss``: who holds it open, and what is to be done when nobody does any more.

Ctrl-C may come before Python begins ``__exit__``, so no flag can tell whether a block is still open. The states and the
scaler that are in use keep a :class:`Scope`, which knows the context manager weakly. Where that is gone, or where only
a traceback still shows it, the block was abandoned, and the next call cleans up in its place.
"""

from __future__ import annotations

import gc
import sys
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["Scope", "is_held"]


class Scope:
    """What is in use while a ``scale_loss`` is open.

    Args:
        owner: the context manager, which is known weakly.
        end_backward: tells the engine of the session that the backward is over.
        states: the states of its optimizers.
        scaler: the scale of its loss.

    Attributes:
        entered: the optimizers whose gradients it has touched.
        ended: the block is left. Set in one moment, so that an interrupt comes before it or after it.
    """

    __slots__ = ("_backward_ended", "_end_backward", "_owner", "_scaler", "_states", "ended", "entered")

    def __init__(self, owner: object, end_backward: Callable[[], None], states: Sequence[Any], scaler: Any) -> None:
        self._owner = weakref.ref(owner)
        self._end_backward = end_backward
        self._states = states
        self._scaler = scaler
        self.entered: list[Any] = []
        self.ended = False
        self._backward_ended = False

    def is_open(self) -> bool:
        """Return whether the block is being executed; clean up after it if it was abandoned."""
        if not self.ended and not is_held(self._owner):
            self.abandon()
        return not self.ended

    def end_backward(self) -> None:
        """Tell the engine, once, that the backward is over."""
        if not self._backward_ended:
            self._backward_ended = True
            self._end_backward()

    def abandon(self) -> None:
        """Clean up after an exception: the gradients of a backward that came half-way are dropped."""
        self.end_backward()
        for state in self.entered:
            state.gradients.abandon(self._scaler)
        self.end()

    def forget(self) -> None:
        """Clean up where the gradients were half unscaled: all of them are dropped, and what was found in them."""
        for state in self.entered:
            state.forget_backwards()
        self.end()

    def end(self) -> None:
        """Let go of the optimizers and of the scale."""
        self.ended = True
        self._scaler.scope = None
        for state in self._states:
            state.scope = None


def is_held(ref: weakref.ReferenceType[object]) -> bool:
    """Return whether anybody but a traceback holds the object: a ``with`` block, an ExitStack, a variable.

    A traceback keeps the frames that it shows, with their variables, for as long as somebody looks at it; a notebook
    keeps the last one. These frames do not run any more. This searches all objects, and is called before an error only.
    """
    found = ref()
    if found is None:
        return False
    running: set[int] = set()
    for frame in sys._current_frames().values():
        outer: types.FrameType | None = frame
        while outer is not None:
            running.add(id(outer))
            outer = outer.f_back
    shown = [each for each in gc.get_referrers(found) if isinstance(each, types.FrameType) and id(each) not in running]
    probe = object()  # held as ``found`` is: by a variable of this function
    return sys.getrefcount(found) - sys.getrefcount(probe) > len(shown)
