"""Apex's oldest interface: ``handle = amp.init()``; the handle wraps optimizers and scales losses."""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from xamp.apex import _casts_handle
from xamp.apex._amp_state import _amp_state as state
from xamp.apex._engine import ApexEngine
from xamp.apex._properties import Properties
from xamp.apex._scale_loss import scale_loss
from xamp.apex._start import Scaling, start_engine
from xamp.scaling.block import Block, ScaledLoss
from xamp.scaling.optimizer import state_of
from xamp.sessions.set_up import Arguments

__all__ = ["OptimWrapper", "scale_by_handle"]


class Handle(Protocol):
    """What an optimizer wrapper needs from the handle that made it."""

    def is_active(self) -> bool:
        """Whether losses are scaled."""


class OptimWrapper:
    """Wraps an optimizer and gives it loss scales of its own; passes on every other attribute of the optimizer.

    Args:
        optimizer: the optimizer to wrap.
        handle: the handle from ``amp.init``; while it is inactive, nothing is scaled.
        num_loss: the number of losses between two steps. Each has its own scale; they take them in order.
    """

    def __init__(self, optimizer: Optimizer, handle: Handle, num_loss: int = 1) -> None:
        self._optimizer = optimizer
        self._amp_handle = handle
        self._num_loss = num_loss
        self._loss_idx = 0
        self._engine = _engine_for(optimizer, num_loss) if handle.is_active() else None

    def scale_loss(self, loss: torch.Tensor) -> contextlib.AbstractContextManager[torch.Tensor]:
        """Scale the next loss, as :func:`xamp.apex.amp.scale_loss` does.

        Raises:
            AssertionError: ``num_loss`` losses have been scaled since the last step.
        """
        if not self._amp_handle.is_active() or self._engine is None:
            return contextlib.nullcontext(loss)
        if not 0 <= self._loss_idx < self._num_loss:
            raise AssertionError(f"scale_loss: all {self._num_loss} losses (num_loss) were scaled. Call step() first.")
        self._loss_idx += 1
        return _scaled(self._engine, loss, self._loss_idx - 1)

    def step(self, closure: Any = None) -> Any:
        """Step the optimizer, or skip the step after an overflow.

        Raises:
            NotImplementedError: a closure is given while the handle is active.
        """
        if not self._amp_handle.is_active():
            return self._optimizer.step(closure=closure)
        self._loss_idx = 0
        if closure is not None:
            raise NotImplementedError("The `closure` argument is unsupported by the amp optimizer wrapper.")
        return self._optimizer.step()

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":  # not set yet while the wrapper is copied or unpickled
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __repr__(self) -> str:
        return repr(self._optimizer)


def scale_by_handle(
    handle: Handle, loss: torch.Tensor, optimizer: Optimizer
) -> contextlib.AbstractContextManager[torch.Tensor]:
    """``handle.scale_loss``: uses one loss scale for the optimizer, which is made at its first loss."""
    if not handle.is_active():
        return contextlib.nullcontext(loss)
    if state_of(optimizer) is not None:
        return scale_loss(loss, optimizer)
    return _scaled(_engine_for(optimizer, 1), loss, 0)


def _engine_for(optimizer: Optimizer, num_loss: int) -> ApexEngine:
    properties = Properties()
    properties.take("O1")
    arguments = Arguments([], [optimizer], state.verbosity)
    engine = start_engine(arguments, properties, Scaling(num_losses=num_loss))
    engine.around_step, engine.after_backward = _casts_handle.disable_casts, _casts_handle.clear_caches
    return engine


def _scaled(engine: ApexEngine, loss: torch.Tensor, index: int) -> contextlib.AbstractContextManager[torch.Tensor]:
    return ScaledLoss(engine, Block(engine.states, engine.scalers[index]), loss.float())
