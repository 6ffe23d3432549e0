"""Copies that ``model.state_dict()`` has handed out, for tensors of which the model has no fp32 one.

torch's own entries are the tensors of the model, so that ``own = model.state_dict(); own[name].copy_(value)`` loads.
What is written into a copy is written into the model before it is used again. A copy is not kept alive for that: a
tensor without memory shares its version, by which writes are known. Loaded where there is such a copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from xamp.errors import StateError
from xamp.values.lowered import handed_out, is_low_precision

__all__ = ["forget", "hand_out", "take_in"]

Write = Callable[[torch.Tensor, torch.Tensor], None]
"""Writes fp32 values into a low-precision tensor."""


class _Copy:
    """One copy.

    Attributes:
        key: its key in the state dict.
        tensor: returns the tensor of the model; None: it is gone.
        copy: returns the copy; None: it is gone.
    """

    def __init__(self, key: str, tensor: torch.Tensor, copy: torch.Tensor, write: Write) -> None:
        self.key = key
        self.tensor = weakref.ref(tensor)
        self._write = write
        self._counter = copy.detach()  # shares the version
        self._counter.set_()  # type: ignore[call-overload]  # and has no memory any more
        self._version = self._counter._version
        self.copy = weakref.ref(copy, self._end)

    def is_written(self) -> bool:
        """Return whether something has written into the copy."""
        return self._counter._version != self._version

    def take_in(self, tensor: torch.Tensor, copy: torch.Tensor) -> None:
        """Write the copy into the model."""
        self._write(tensor, copy)
        self._version = self._counter._version

    def _end(self, _: object) -> None:
        """The copy is gone: nobody can write into it any more."""
        if not self.is_written() and self in handed_out:
            handed_out.remove(self)


def hand_out(key: str, tensor: torch.Tensor, copy: torch.Tensor, write: Write) -> None:
    """Note that ``copy`` of ``tensor`` is handed out under ``key``."""
    if type(copy) is torch.Tensor and not copy.is_inference():
        handed_out.append(_Copy(key, tensor, copy, write))


def forget(tensor: torch.Tensor) -> None:
    """Forget what was written into copies of ``tensor``, which is loaded now."""
    handed_out[:] = [one for one in handed_out if one.tensor() is not tensor]


def take_in() -> None:
    """Write into the models what was written into copies.

    Raises:
        StateError: one that was written into is gone, with what it held.
    """
    lost = []
    for one in [one for one in handed_out if one.is_written()]:
        tensor: Any = one.tensor()
        copy: Any = one.copy()
        if tensor is None or copy is None or not is_low_precision(tensor):
            handed_out.remove(one)
            if tensor is not None and is_low_precision(tensor):
                lost.append(one.key)
        else:
            one.take_in(tensor, copy)
    if lost:
        raise StateError(
            f"model.state_dict()[{lost[0]!r}]: at this level it is a copy in fp32, and something was written into it. "
            f"The copy is gone, and the model was not used meanwhile to take that over ({len(lost)} such entries). "
            "Load with model.load_state_dict(own), or keep what state_dict() returned until the next forward."
        )
