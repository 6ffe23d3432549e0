"""The closure that a caller passes to ``optimizer.step``, under loss scaling or master weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from xamp.errors import StateError
from xamp.policy import levels_where, listed
from xamp.scaling.gradients import Gradients

__all__ = ["call_closure"]


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
