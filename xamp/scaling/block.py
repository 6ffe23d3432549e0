"""The ``with`` block of ``scale_loss``, and which of them are open.

Ctrl-C may come before Python begins ``__exit__``, so no flag can tell whether a block is still being executed. The
session knows each context manager weakly: where it is gone, the block was abandoned, and its backward is dropped. Where
something still holds it, as a traceback does, the next call is refused, once: the same call again closes the block and
goes on, unless the block has been left meanwhile.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from xamp.errors import StateError
from xamp.scaling.scale import LossScaler
from xamp.scaling.step import OptimizerState
from xamp.torch_compat.compiler import eager_by_rule, keep_eager
from xamp.torch_compat.torch_private import autocast

__all__ = ["Block", "OpenBlocks", "ScaledLoss", "outside", "step_in", "step_out"]


class Block(NamedTuple):
    """The optimizers, the scale and the options of one ``scale_loss``.

    Attributes:
        states: those of its optimizers.
        scaler: its loss scale.
        delay_unscale, delay_overflow_check: see :func:`xamp.scale_loss`.
    """

    states: Sequence[OptimizerState]
    scaler: LossScaler
    delay_unscale: bool = False
    delay_overflow_check: bool = False

    def overlaps(self, states: Sequence[OptimizerState], scaler: LossScaler | None) -> bool:
        """Return whether the block has this scale, or one of these optimizers."""
        return self.scaler is scaler or any(own is state for own in self.states for state in states)


class OpenBlocks:
    """The blocks of one session that were entered and not left.

    Args:
        drop: drops the backward of a block that was abandoned, and removes the block.
        forget: drops all gradients of a block's optimizers since their last steps, and removes the block.
        regions: returns what steps out of the autocast regions of the code around, for backwards and steps.

    Attributes:
        entered: the blocks by their ids, each with its context manager.
    """

    def __init__(self, drop: Callable[[Block], None], forget: Callable[[Block], None], regions: Any = None) -> None:
        self.regions = regions
        self._drop = drop
        self._forget = forget
        self.entered: dict[int, tuple[weakref.ref[Any], Block]] = {}  # by the id of the block
        self._doubted: list[tuple[Block, str]] = []  # with the error by which a call was refused because of them

    def add(self, owner: object, block: Block) -> None:
        """Record that ``owner``, a context manager, has entered ``block``."""
        self.entered[id(block)] = weakref.ref(owner), block

    def remove(self, block: Block) -> bool:
        """Record that ``block`` was left; return whether it was entered and neither left nor closed."""
        if self._doubted:
            self._doubted = [each for each in self._doubted if each[0] is not block]
        return self.entered.pop(id(block), None) is not None

    def scalers(self) -> list[LossScaler]:
        """Return the loss scales of the open blocks."""
        return [block.scaler for _, block in self.entered.values()]

    def close_all(self) -> list[Block]:
        """Close all blocks; return them."""
        closed, self.entered, self._doubted = self.entered, {}, []
        return [block for _, block in closed.values()]

    def overlapping(self, states: Sequence[OptimizerState], scaler: LossScaler | None = None) -> list[Block]:
        """Return the open blocks that have one of ``states`` or ``scaler``."""
        return [block for _, block in self.entered.values() if block.overlaps(states, scaler)]

    def drop_abandoned(self) -> None:
        """Drop the backwards of blocks whose context managers are gone."""
        for ref, block in list(self.entered.values()):
            if ref() is None:
                self._drop(block)

    def refuse(self, error: str, states: Sequence[OptimizerState], scaler: LossScaler | None = None) -> None:
        """Raise a StateError where a block with one of ``states`` or ``scaler`` is open.

        Raised once for each error: if nothing executes the block any more, as where a traceback holds it, the same call
        again drops its gradients and goes on.
        """
        if not self.entered:
            return
        self.drop_abandoned()
        busy = self.overlapping(states, scaler)
        doubted = [block for block, told in self._doubted if told == error]
        for block in busy:
            if all(block is not each for each in doubted):
                self._doubted = [*self._doubted, *((each, error) for each in busy)]
                raise StateError(error)
        for block in busy:
            self._forget(block)


@keep_eager
def step_out(regions: Any) -> Any:
    """Step out of the autocast regions of the code around, if torch counts any; return what :func:`step_in` takes."""
    inside = autocast.autocast_increment_nesting() != 1
    autocast.autocast_decrement_nesting()
    return regions().step_out() if inside else None


@keep_eager
def step_in(regions: Any, left: Any) -> None:
    """Step back into the regions, and drop their casts of weights, which a step changes."""
    autocast.clear_autocast_cache()
    if left is not None:
        regions().step_in(left)


@contextlib.contextmanager
def outside(regions: Any) -> Iterator[None]:
    """Step out of the regions for a ``with`` block. ``regions``: None where a session is disabled."""
    left = None if regions is None else step_out(regions)
    try:
        yield
    finally:
        step_in(regions, left)


class ScaledLoss:
    """The context manager of :func:`xamp.scale_loss`. A class: a generator costs more time than its body here."""

    __slots__ = ("__weakref__", "_block", "_engine", "_left", "_loss")

    def __init__(self, engine: Any, block: Block, loss: torch.Tensor) -> None:
        self._engine = engine
        self._block = block
        self._loss = loss
        self._left: Any = None

    @eager_by_rule
    def __enter__(self) -> torch.Tensor:
        scaled: torch.Tensor = self._engine.enter(self, self._block, self._loss)
        self._left = step_out(self._engine.blocks.regions)
        return scaled

    @eager_by_rule
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None = None, *_: object) -> None:
        try:
            self._engine.leave(self._block, kind)
        finally:
            step_in(self._engine.blocks.regions, self._left)
        if isinstance(error, Exception):
            self._engine.blocks.regions().explain(error)
