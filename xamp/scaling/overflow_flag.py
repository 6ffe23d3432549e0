"""Reads the overflow flag of a chip that saturates, around the forwards of a session.

Such a chip returns its largest number instead of inf and raises a flag, one for everything that runs on it. After an
overflow in a training forward the gradients look right and are wrong, so the step must be skipped; after one elsewhere,
as in validation, it must not. So the flag is lowered where a training forward begins and read where it ends, and so
around each backward (``Engine.enter``, ``Engine.leave``). Nothing here waits for the device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from xamp.contract import Backend

__all__ = ["FlagWatch", "Watch", "read_flag", "run_watched"]

_watches: Any = WeakIdKeyDictionary()  # by model


class _Open(threading.local):
    """Counts the watched forwards and backwards that this thread is in. An inner one is a part of the outer one."""

    depth = 0

    def enter(self) -> bool:
        """Count one more; return whether it is the outer one."""
        self.depth += 1
        return self.depth == 1

    def leave(self) -> None:
        """Count one less."""
        self.depth = max(self.depth - 1, 0)

    def leave_all(self) -> None:
        """Count none."""
        self.depth = 0


_open = _Open()


def read_flag(backend: Backend, device: torch.device, one: torch.Tensor | None = None) -> torch.Tensor:
    """Return the flag of a chip as it is now: fp32, no dimension, on the device, 1.0 where it is raised.

    A caller that reads often passes ``one``, an fp32 tensor of 1.0 on the device, to save making it.
    """
    found = torch.zeros((), dtype=torch.float32, device=device)
    backend.unscale_([], found, torch.ones_like(found) if one is None else one)
    return found


class Watch:
    """Watches the device of one session for overflows that its gradients do not show. Here they show all.

    Args:
        backend: the backend of the device.
        device: the device.
    """

    def __init__(self, backend: Backend, device: torch.device) -> None:
        self._backend = backend
        self._device = device

    def open(self) -> None:
        """Begin a backward."""
        self._backend.clear_overflow(self._device)

    def close(self) -> None:
        """End a backward, also after an exception."""

    def close_all(self) -> None:
        """End whatever an exception has left open on this thread."""

    def postpone(self, index: int) -> None:
        """Keep what the device tells of a backward of optimizer ``index`` for its later check."""

    def take(self, index: int, found_inf: torch.Tensor) -> None:
        """Raise ``found_inf``, of one element, by what the device told since the last check of optimizer ``index``."""

    def forget(self, index: int, *, forwards: bool = True) -> None:
        """Forget what the device told of backwards of optimizer ``index``; if ``forwards``, of forwards too."""


class FlagWatch(Watch):
    """Watches the flag of one device for one session, and keeps what it told until a check takes it.

    Args:
        backend: the backend of the device.
        device: the device.
        models: the models whose forwards are watched.
        before_forward: called before each watched forward.
        optimizers: returns the indices of the session's optimizers.
    """

    def __init__(
        self,
        backend: Backend,
        device: torch.device,
        models: Iterable[nn.Module],
        before_forward: Callable[[], None],
        optimizers: Callable[[], Iterable[int]],
    ) -> None:
        super().__init__(backend, device)
        self._before_forward = before_forward
        self._optimizers = optimizers
        self._one = torch.ones((), dtype=torch.float32, device=device)
        self._of_forwards: dict[int, torch.Tensor] = {}
        self._of_backwards: dict[int, torch.Tensor] = {}  # whose gradients are still scaled
        for model in models:
            _watches[model] = self

    def open(self) -> None:
        """Begin a forward or a backward: lower the flag, unless an outer one is watched already."""
        if _open.enter():
            self._backend.clear_overflow(self._device)

    def close(self) -> None:
        """End the forward or backward."""
        _open.leave()

    def close_all(self) -> None:
        """See :meth:`Watch.close_all`."""
        _open.leave_all()

    def run(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a forward. An overflow in it makes each optimizer of the session skip its next step."""
        self._before_forward()  # also where an abandoned block seems to be around it
        if _open.depth:
            return function(*args, **kwargs)
        try:
            self.open()
            result = function(*args, **kwargs)
            found = read_flag(self._backend, self._device, self._one)
        finally:
            self.close()
        for index in self._optimizers():
            _raise(self._of_forwards, index, found)
        return result

    def postpone(self, index: int) -> None:
        """Keep the flag of a backward of optimizer ``index`` for its later check: the next backward lowers it."""
        _raise(self._of_backwards, index, read_flag(self._backend, self._device, self._one))

    def take(self, index: int, found_inf: torch.Tensor) -> None:
        """Raise ``found_inf``, of one element, by what the flag told since the last check of optimizer ``index``."""
        for kept in (self._of_forwards, self._of_backwards):
            if (found := kept.pop(index, None)) is not None:
                torch.maximum(found_inf, found, out=found_inf)

    def forget(self, index: int, *, forwards: bool = True) -> None:
        """Forget what the flag told of backwards of optimizer ``index``; if ``forwards``, of forwards too."""
        self._of_backwards.pop(index, None)
        if forwards:
            self._of_forwards.pop(index, None)


def _raise(kept: dict[int, torch.Tensor], index: int, found: torch.Tensor) -> None:
    before = kept.get(index)
    kept[index] = found if before is None else torch.maximum(before, found)


def run_watched(model: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run ``function``, a forward of ``model``. A training forward is watched; what ``torch.compile`` traces is not."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or (watch := _watches.get(model)) is None:
        return function(*args, **kwargs)
    found: FlagWatch = watch
    return found.run(function, args, kwargs)
