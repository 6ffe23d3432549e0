"""Which parameters of an optimizer have state that suits its fused form, so that the device may decide on their step.

On a step that ``found_inf`` skips, torch's fused SGD makes momentum buffers of uninitialised memory; it also fails
where one parameter has a buffer and another has none. The other fused optimizers leave state of zeros where there was
none. So the host decides on the first step of a parameter, and that step runs in the form the user gave. A loaded state
counts as made: the last bits of the two forms differ, and a resumed run must use the form that the original run used.

Fused kernels on a CPU read a parameter, its gradient and its state in the order of memory, whatever their strides;
those of a GPU raise an error where the strides differ. So a step in which they do runs in the form the user gave. They
differ where ``model.to(memory_format=...)`` came after a step, where a checkpoint was saved in another memory format,
and where a script puts a gradient into ``.grad``: only what autograd adds up has the strides of the parameter. A
parameter that is a view of a part of another tensor has gaps, into which the kernels would write.
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

_is_contiguous = torch.Tensor.is_contiguous


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
        self._contiguous = False  # parameters and state, as far as anybody knows

    def look_again(self) -> None:
        """Read the optimizer's groups and state. Called when they changed."""
        optimizer = self._optimizer()
        self._params = set(map(id, _with_state(optimizer)))
        self._states = len(_state_of(optimizer))
        self._elements = self._count_elements()
        self._contiguous = False

    def fits_fused(self) -> bool:
        """Return whether the state of every parameter about to move exists and, if xamp chose the form, still fits.

        A fused kernel reads past the end of a moment that is shorter than its parameter, as after
        ``resize_token_embeddings``. The form that the user left says so instead.
        """
        if not self._is_whole():
            return False
        return not self._fused.active or (self._elements == self._count_elements() and self._is_laid_out_alike())

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

    def _is_laid_out_alike(self) -> bool:
        """Return whether each parameter has the strides of its gradient and of its state.

        All are contiguous in most models. To see that takes 35 us for the gradients of 300 parameters; what moves a
        parameter to another memory format moves its gradient too, and state is looked at again where it is loaded.
        """
        if torch.compiler.is_compiling():  # a graph is bound to the strides, and has no use for what was seen before
            return all(p.grad is None or p.grad.stride() == p.stride() for p in self._gradients.stepped)
        stepped = self._gradients.stepped
        are_contiguous = all(map(_is_contiguous, [g for p in stepped for g in (p.grad,) if g is not None]))
        if self._contiguous and are_contiguous:
            return True
        held = [p for p in stepped if p.grad is not None]
        state = _state_of(self._optimizer())
        beside = [_beside(param, state) for param in held]
        self._contiguous = are_contiguous and all(map(_is_contiguous, [*held, *(t for ts in beside for t in ts)]))
        return self._contiguous or all(_is_like(t, p) for p, ts in zip(held, beside, strict=True) for t in ts)

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


def _beside(param: torch.Tensor, state: Mapping[Any, Any]) -> list[torch.Tensor]:
    """Return what a fused kernel reads along with ``param``, element by element."""
    kept = state.get(param, {})
    moments = [t for t in kept.values() if isinstance(t, torch.Tensor) and t.shape == param.shape]
    return [*moments, param.grad] if param.grad is not None else moments


def _is_like(tensor: torch.Tensor, param: torch.Tensor) -> bool:
    """Return whether the elements of ``tensor`` and ``param`` have one order in memory, and no gaps."""
    strides = [(a, b) for a, b, n in zip(tensor.stride(), param.stride(), param.shape, strict=True) if n != 1]
    return all(a == b for a, b in strides) and _is_dense(param)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements of ``tensor`` fill a piece of memory: kernels write into what lies between them."""
    if tensor.is_contiguous() or not tensor.numel():
        return True
    size = 1
    for stride, length in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != size:
            return False
        size *= length
    return True
