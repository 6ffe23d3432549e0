"""Of a chip that saturates: what its overflow flag says of the forwards of a session.

Such a chip gives its largest number where inf is due, and raises a flag, one for all that runs on it. What overflows in
a forward leaves gradients that look sound and are wrong, so the step has to be skipped; what overflows elsewhere, in
validation or in a metric, must skip none. So the flag is lowered where a training forward begins and read where it
ends, as it is around each backward (``Engine.enter``, ``Engine.leave``). Nothing of this waits for the device, and
nothing of it is there on other chips.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from xamp.contract import Backend

__all__ = ["FlagWatch", "read_flag", "watched"]

_watches: Any = WeakIdKeyDictionary()  # by model


class _Open(threading.local):
    """How many forwards and backwards that are watched this thread is in: what is within one is part of it."""

    depth = 0


_open = _Open()


def read_flag(backend: Backend, device: torch.device, one: torch.Tensor | None = None) -> torch.Tensor:
    """The flag of a chip as it is: fp32, no dimension, on the device, 1.0 where it is up.

    Args:
        backend: The device's.
        device: Where.
        one: A 1.0 there, fp32, for who asks often.
    """
    found = torch.zeros((), device=device)
    backend.unscale_([], found, torch.ones((), device=device) if one is None else one)
    return found


class FlagWatch:
    """The flag of one device, seen from one session.

    Args:
        backend: The device's.
        device: Where.
        note: Takes the flag that was read after a forward: an fp32 scalar on the device.
    """

    def __init__(self, backend: Backend, device: torch.device, note: Callable[[torch.Tensor], None]) -> None:
        self._backend = backend
        self._device = device
        self._note = note
        self._one = torch.ones((), device=device)

    def follow(self, models: Sequence[nn.Module]) -> None:
        """Watch the forwards of ``models``."""
        for model in models:
            _watches[model] = self

    def open(self) -> None:
        """A forward or a backward begins."""
        _open.depth += 1
        if _open.depth == 1:
            self._backend.clear_overflow(self._device)

    def close(self) -> None:
        """It has ended."""
        _open.depth -= 1

    def run(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a forward; what overflows in it counts for the next step of each optimizer of the session."""
        if _open.depth:
            return function(*args, **kwargs)
        self.open()
        try:
            result = function(*args, **kwargs)
            found = read_flag(self._backend, self._device, self._one)
        finally:
            self.close()
        self._note(found)
        return result


def watched(method: Callable[..., Any]) -> Callable[..., Any]:
    """``method(model, ...)``, watched where it is a training forward. What ``torch.compile`` traces is not."""

    @functools.wraps(method)
    def watching(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling() or (watch := _watches.get(self)) is None:
            return method(self, *args, **kwargs)
        found: FlagWatch = watch
        return found.run(method, (self, *args), kwargs)

    return watching
