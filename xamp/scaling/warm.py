"""Which parameters of an optimizer have state, so that the device may decide on their step.

On a step that ``found_inf`` skips, torch's fused SGD makes momentum buffers of uninitialised memory; it also fails
where one parameter has a buffer and another has none. The other fused optimizers leave state of zeros where there was
none. So the host decides on the first step of a parameter, and that step runs in the form the user gave. A loaded state
counts as made: the last bits of the two forms differ, and a resumed run must use the form that the original run used.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from xamp.scaling.fused import FusedForm
from xamp.scaling.gradients import Gradients

__all__ = ["WarmState"]


class WarmState:
    """The parameters of one optimizer whose state exists.

    Args:
        optimizer: the optimizer.
        gradients: its gradients, which know the tensors that it steps.
        fused: its fused form.
    """

    def __init__(self, optimizer: weakref.ref[Optimizer], gradients: Gradients, fused: FusedForm) -> None:
        self._optimizer = optimizer
        self._gradients = gradients
        self._fused = fused
        self._elements = 0  # of all stepped tensors when the optimizer last made or loaded its state
        self._params: set[int] = set()  # ids of the parameters whose state exists, made by a step or loaded
        self._states = 0

    def look_again(self) -> None:
        """Read the optimizer's groups and state. Called when they changed."""
        optimizer = self._optimizer()
        self._params = set(map(id, _with_state(optimizer)))
        self._states = len(_state_of(optimizer))
        self._elements = self._count_elements()

    def fits_fused(self) -> bool:
        """Return whether the state of every parameter about to move exists and, if xamp chose the form, still fits.

        A fused kernel reads past the end of a moment that is shorter than its parameter, as after
        ``resize_token_embeddings``. The form that the user left says so instead.
        """
        return self._is_whole() and (not self._fused.active or self._elements == self._count_elements())

    def unfused(self, base: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``base`` to step in the form the user gave, and remember the state that this step makes."""

        def step(*args: Any, **kwargs: Any) -> Any:
            optimizer: Any = self._optimizer()  # it lives, for it is about to step
            with self._fused.off(optimizer):
                result = base(*args, **kwargs)
            self._params.update(id(p) for p in self._gradients.stepped if p.grad is not None)
            self._states = len(_state_of(optimizer))
            self._elements = self._count_elements()
            return result

        return step

    def _is_whole(self) -> bool:
        """Return whether the state of every parameter about to be stepped exists."""
        if len(getattr(self._optimizer(), "state", ())) < self._states:
            self._params.clear()
        if len(self._params) == len(self._gradients.stepped):
            return True
        return self._params.issuperset(id(p) for p in self._gradients.stepped if p.grad is not None)

    def _count_elements(self) -> int:
        return sum(map(torch.Tensor.numel, self._gradients.stepped))


def _state_of(optimizer: Any) -> Mapping[Any, Any]:
    """Return the optimizer's state; empty for an object that has ``param_groups`` and ``step`` but no ``state``."""
    return getattr(optimizer, "state", {})


def _with_state(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield the parameters that have state, and those of an SGD without momentum, which needs none."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = _state_of(optimizer).get(param)
            has_some = isinstance(state, dict) and any(isinstance(v, torch.Tensor) for v in state.values())
            if has_some or group.get("momentum") == 0:
                yield param
