"""The context manager of ``scale_loss``: its ``with`` block holds one backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from xamp.errors import StateError
from xamp.scaling.engine import Engine
from xamp.scaling.scale import LossScaler
from xamp.scaling.scope import Scope
from xamp.scaling.step import OptimizerState

__all__ = ["ScaledLoss"]


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
