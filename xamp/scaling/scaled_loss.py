"""An open ``scale_loss``: the context manager, whose ``with`` block holds one backward, and who holds it open.

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

import torch

from xamp.errors import StateError
from xamp.scaling.engine import Engine
from xamp.scaling.scale import LossScaler
from xamp.scaling.step import OptimizerState

__all__ = ["ScaledLoss", "Scope", "is_held"]


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


class ScaledLoss:
    """The context manager of :func:`scale_loss`. A class, because a generator costs more time than its body here."""

    __slots__ = (
        *("__weakref__", "_delay_overflow_check", "_delay_unscale", "_engine", "_loss", "_scaler", "_scope", "_states"),
    )

    def __init__(
        self,
        engine: Engine,
        states: Sequence[OptimizerState],
        scaler: LossScaler,
        loss: torch.Tensor,
        delay_unscale: bool,
        delay_overflow_check: bool,
    ) -> None:
        self._engine = engine
        self._states = states
        self._scaler = scaler
        self._loss = loss
        self._delay_unscale = delay_unscale
        self._delay_overflow_check = delay_overflow_check

    def _is_busy(self) -> bool:
        """Return whether another ``scale_loss`` with this scale or over one of these optimizers is open."""
        busy = self._scaler.scope is not None and self._scaler.is_open()
        for state in self._states:
            if state.scope is not None:
                busy = busy or state.is_open()
        return busy

    def __enter__(self) -> torch.Tensor:
        if self._is_busy():
            raise StateError(
                "scale_loss(loss, optimizer): another scale_loss over this optimizer or with this loss_id is open. "
                "Leave it first, or add the losses up and scale their sum."
            )
        self._scope = scope = Scope(self, self._engine.end_backward, self._states, self._scaler)
        try:
            self._scaler.scope = scope
            for state in self._states:
                state.scope = scope
            self._engine.enter(self._states, self._scaler, scope.entered, self._delay_unscale)
            if not self._engine.policy.scales:
                return self._loss
            loss, factor = self._loss, self._scaler.factor
            # This allocates, and may run out of memory.
            return loss * (factor if loss.device == self._engine.device else factor.to(loss.device))
        except BaseException:  # the body does not run, so nobody calls __exit__
            scope.abandon()
            raise

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        scope = self._scope
        before: object = self._scaler.updates
        try:
            if kind is not None:
                scope.abandon()
                self._engine.note_raised(self._states, kind)
                return
            scope.end_backward()
            self._engine.leave(self._states, self._scaler, self._delay_unscale, self._delay_overflow_check)
            before = None  # all is unscaled, and nothing to be forgotten
            scope.end()
        except BaseException:
            if not scope.ended and kind is not None:
                scope.abandon()
            elif not scope.ended and self._scaler.updates is before:
                scope.forget()
            else:  # all is done; in xamp.apex the scale moves last
                scope.end()
            raise
