"""What a step refuses, and what it warns of, before the optimizer is called."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from xamp.contract import Backend
from xamp.errors import StateError
from xamp.ground.log import say
from xamp.policy import Policy, levels_where, listed
from xamp.scaling.fused import FusedForm
from xamp.scaling.gradients import Gradients

__all__ = ["Refuser", "StepRefusals", "call_closure"]


class Refuser(Protocol):
    """The part of :class:`xamp.scaling.engine.Engine` that refusals need."""

    policy: Policy
    backend: Backend
    device: torch.device
    refusal: str

    def names_of(self, params: Iterable[torch.Tensor]) -> list[str]:
        """Return the qualified names of parameters."""

    def check_not_sharded(self, call: str) -> None:
        """Refuse a model that was sharded after ``initialize``."""


class StepRefusals:
    """The refusals of one optimizer. Each method raises a StateError where its line says so, else does nothing.

    Args:
        engine: the engine that it belongs to.
        optimizer: the optimizer.
        gradients: its gradients.
        fused: its fused form.
    """

    def __init__(
        self, engine: Refuser, optimizer: weakref.ref[Optimizer], gradients: Gradients, fused: FusedForm
    ) -> None:
        self._engine = engine
        self._optimizer = optimizer
        self._gradients = gradients
        self._fused = fused
        self._warned_of_no_gradient = False
        self._unreached = 0  # the most stepped tensors that had no gradient at a step

    @property
    def _its_class(self) -> str:
        return type(self._optimizer()).__name__

    def wrong(self) -> None:
        """Raise a StateError where a step of this optimizer would be wrong, by its backend or by what happened."""
        engine = self._engine
        optimizer: Any = self._optimizer()  # it lives, for it is about to step
        if engine.refusal:
            raise StateError(f"optimizer.step(): {engine.refusal}")
        if engine.policy.casts_parameters:
            engine.backend.join_gradients(optimizer)
        if why := engine.backend.optimizer_refusal(optimizer, casts=False):
            raise StateError(f"optimizer.step(): {type(optimizer).__name__} {why}")

    def lost(self) -> None:
        """Refuse a model that was sharded after its first steps: parameters that it replaced get no gradient more."""
        unreached = [param.grad for param in self._gradients.stepped].count(None)
        if unreached > self._unreached:
            self._engine.check_not_sharded("optimizer.step()")
            self._unreached = unreached

    def stray(self) -> None:
        """Refuse gradients of a backward that ran without ``scale_loss``."""
        if self._gradients.has_stray() and not self._only_fills_state():
            raise StateError(
                "optimizer.step(): there are gradients that did not come through scale_loss since the last step. Run "
                "every backward() as `with xamp.scale_loss(loss, optimizer) as scaled: scaled.backward()`, inside the "
                "with block, and clear the gradients with optimizer.zero_grad() after a step."
            )

    def _only_fills_state(self) -> bool:
        """Return whether this step only serves ``torch.distributed.checkpoint`` to make the state of a new optimizer.

        That step gives every parameter a gradient of zeros. This method waits for the device, but only where there
        would be an error otherwise.
        """
        optimizer: Any = self._optimizer()
        return not optimizer.state and self._gradients.all_zero()

    def capture(self) -> None:
        """Refuse a step that reads the device, which a graph cannot hold."""
        name = self._its_class
        why = "its parameters have had no step yet, and the host decides on the first"
        cure = "Run at least one whole training step before the capture"
        if not self._fused.skips_on_device:
            why = f"this {name} cannot skip on the device"
            cure = self._how_to_skip(name)
        raise StateError(
            f"optimizer.step(): while a graph is captured the host cannot read whether to skip this step; {why}. "
            f"{cure}, or leave the step out of the graph."
        )

    def _how_to_skip(self, name: str) -> str:
        there = self._engine.backend.capabilities(self._engine.device).fused_optimizers
        if name in there:
            return f"Make it fused: torch.optim.{name}(..., fused=True), with capturable=True where it has that option"
        others = f", as {listed(there)} have" if there else ""
        return f"Take an optimizer with a fused form that is right on {self._engine.device}{others}"

    def late(self, late: Sequence[torch.Tensor], call: str) -> None:
        """Refuse parameters that came into the groups with a gradient; ``call`` is what found them."""
        if late:
            raise StateError(
                f"{call}: {self._engine.names_of(late)[0]} was put into param_groups after the scale_loss that gave it "
                "its gradient, which is still multiplied by the loss scale. Put it in before the scale_loss, or clear "
                "its gradient."
            )

    def warn_of_no_gradient(self) -> None:
        """Say once that a step finds no gradient at all: the optimizer may hold other tensors than the model."""
        gradients = self._gradients
        if self._warned_of_no_gradient or any(param.grad is not None for param in gradients.stepped):
            return
        if not gradients.in_shards:
            self._engine.check_not_sharded("optimizer.step()")
            self._warned_of_no_gradient = True
            say(
                "%s.step() finds no gradient on anything that this optimizer holds, and changes nothing. If a backward "
                "ran, the optimizer was made from other parameters: of a copy of the model, or before the model was "
                "moved, sharded or replaced. Make it from model.parameters() of the very model, last.",
                self._its_class,
                level=logging.WARNING,
            )


# ---------------------------------------------------------------- the closure of a caller


def call_closure(
    gradients: Gradients, args: tuple[Any, ...], kwargs: dict[str, Any], *, name: str, level: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Call the closure among the arguments of a step; return the arguments with one in its place that has its result.

    Where gradients came through ``scale_loss`` already, a closure mostly runs no backward: Lightning passes one to
    each step, with hooks of its own in it.

    Args:
        gradients: the gradients of the optimizer.
        args: the arguments of the step. What is callable is a closure.
        kwargs: its keyword arguments.
        name: the class of the optimizer, for a message.
        level: the level, for a message.

    Raises:
        StateError: no gradients came through ``scale_loss``, or the closure ran a backward.
    """
    if not gradients.ready:
        raise _error(name, level, "would run")
    reached: list[torch.Tensor] = []
    hooks = [
        param.register_post_accumulate_grad_hook(reached.append)
        for param in (*gradients.plain, *(lowered for lowered, _ in gradients.pairs))
        if param.requires_grad and param.is_leaf
    ]
    try:
        args, kwargs = tuple(map(_called, args)), {key: _called(value) for key, value in kwargs.items()}
    finally:
        for hook in hooks:
            hook.remove()
    if reached:
        raise _error(name, level, "ran")
    return args, kwargs


def _called(value: Any) -> Any:
    """Call ``value`` if it is a closure; return a function that has its result."""
    if not callable(value):
        return value
    closure: Callable[[], Any] = value
    with torch.enable_grad():
        result = closure()
    return lambda: result


def _error(name: str, level: str, did: str) -> StateError:
    plain = levels_where(lambda row: not row.manages_gradients)
    return StateError(
        f"{name}.step(closure): under loss scaling or master weights (level {level}) a closure {did} backward without "
        "them. Compute the loss before step(), in scale_loss; an optimizer that needs a closure (LBFGS) works at "
        f"{listed(plain, 'and')}."
    )
