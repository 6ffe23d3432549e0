"""Reads the overflow flag of a chip that saturates, around the forwards of a session.

Such a chip returns its largest number instead of inf and raises a flag, one for everything that runs on it. After an
overflow in a training forward the gradients look right and are wrong, so the step must be skipped; after one elsewhere,
as in validation, it must not. So the flag is lowered where a training forward begins and read where it ends, and so
around each backward (``Engine.enter``, ``Engine.leave``). Nothing here waits for the device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from xamp.contract import Backend

__all__ = ["FlagWatch", "read_flag", "run_watched"]

_watches: Any = WeakIdKeyDictionary()  # by model


class _Open(threading.local):
    """Counts the watched forwards and backwards that this thread is in. An inner one is a part of the outer one."""

    depth = 0


_open = _Open()


def read_flag(backend: Backend, device: torch.device, one: torch.Tensor | None = None) -> torch.Tensor:
    """Return the flag of a chip as it is now: fp32, no dimension, on the device, 1.0 where it is raised.

    A caller that reads often passes ``one``, an fp32 tensor of 1.0 on the device, to save making it.
    """
    found = torch.zeros((), dtype=torch.float32, device=device)
    backend.unscale_([], found, torch.ones_like(found) if one is None else one)
    return found


class FlagWatch:
    """Watches the flag of one device for one session.

    ``record`` takes the flag that was read after a forward: an fp32 scalar on the device.
    """

    def __init__(self, backend: Backend, device: torch.device, record: Callable[[torch.Tensor], None]) -> None:
        self._backend = backend
        self._device = device
        self._record = record
        self._one = torch.ones((), dtype=torch.float32, device=device)

    def follow(self, models: Sequence[nn.Module]) -> None:
        """Watch the forwards of ``models``."""
        for model in models:
            _watches[model] = self

    def open(self) -> None:
        """Begin a forward or a backward: lower the flag, unless an outer one is watched already."""
        _open.depth += 1
        if _open.depth == 1:
            self._backend.clear_overflow(self._device)

    def close(self) -> None:
        """End the forward or backward."""
        _open.depth -= 1

    def run(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a forward. An overflow in it makes each optimizer of the session skip its next step."""
        if _open.depth:
            return function(*args, **kwargs)
        self.open()
        try:
            result = function(*args, **kwargs)
            found = read_flag(self._backend, self._device, self._one)
        finally:
            self.close()
        self._record(found)
        return result


def run_watched(model: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run ``function``, a forward of ``model``. A training forward is watched; what ``torch.compile`` traces is not."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or (watch := _watches.get(model)) is None:
        return function(*args, **kwargs)
    found: FlagWatch = watch
    return found.run(function, args, kwargs)
