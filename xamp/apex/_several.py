"""A loss over optimizers that were given to several calls of ``amp.initialize``.

Apex keeps one list of loss scales, that of the newest call, and every loss uses it. Here each call has an engine with
scales of its own. So the loss is scaled by the newest of these engines, the others take over its scale for this
backward, and all of them learn of an overflow that any of them found.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from xamp.apex._engine import ApexEngine
from xamp.scaling.block import Block, ScaledLoss
from xamp.scaling.step import OptimizerState
from xamp.torch_compat.compiler import eager_by_rule

__all__ = ["LossOfSeveralCalls"]


class LossOfSeveralCalls(contextlib.AbstractContextManager[torch.Tensor]):
    """The context manager of ``amp.scale_loss`` where the optimizers belong to several engines.

    Args:
        parts: the engines, the newest last, each with its optimizers' states.
        loss: the loss, fp32.
        loss_id: the index of the loss scale; an engine that has fewer uses its last one.
        delay_unscale: see :func:`xamp.apex.amp.scale_loss`.
        delay_overflow_check: see :func:`xamp.apex.amp.scale_loss`.
    """

    def __init__(
        self,
        parts: Sequence[tuple[ApexEngine, Sequence[OptimizerState]]],
        loss: torch.Tensor,
        loss_id: int,
        delay_unscale: bool,
        delay_overflow_check: bool,
    ) -> None:
        self._parts = parts
        self._scalers = [engine.scalers[min(loss_id, len(engine.scalers) - 1)] for engine, _ in parts]
        delays = delay_unscale, delay_overflow_check
        self._together = not any(delays)
        self._losses = [
            ScaledLoss(engine, Block(states, scaler, *delays), loss)
            for (engine, states), scaler in zip(parts, self._scalers, strict=True)
        ]

    @eager_by_rule
    def __enter__(self) -> torch.Tensor:
        self._scale = self._share_scale()
        with contextlib.ExitStack() as entered:
            for part in self._losses:
                scaled = entered.enter_context(part)  # each yields the same number; the newest is the last
            self._exits = entered.pop_all()
        return scaled

    def _share_scale(self) -> float:
        """Give every engine the scale and the count of the newest, and return the scale. The host reads them."""
        *others, newest = self._scalers
        scale, count = float(newest.scale), int(newest.growth_tracker)
        for scaler in others:
            scaler.growth_tracker.fill_(count)
            if float(scaler.scale) != scale:
                scaler.fill(scale)
        return scale

    @eager_by_rule
    def __exit__(self, *exception: Any) -> None:
        for engine, _ in self._parts:
            engine.forget_check()
        self._exits.__exit__(*exception)
        found = [engine.found for engine, _ in self._parts if engine.found is not None]
        if exception[0] is None and self._together and any(bool(each) for each in found):
            self._tell_all()

    def _tell_all(self) -> None:
        """Let an overflow of this backward count for every optimizer, and once for the scale."""
        for engine, states in self._parts:
            engine.learn_of_overflow(states)
        for scaler in self._scalers:
            if scaler.rules.dynamic:
                scaler.set(scaler.rules.after_overflow(self._scale))
