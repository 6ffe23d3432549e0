"""Copies that ``model.state_dict()`` has handed out, for tensors of which the model has no fp32 one.

torch's own entries are the tensors of the model, so that ``own = model.state_dict(); own[name].copy_(value)`` loads.
What is written into a copy is written into the model before it is used again. A copy is not kept alive for that: a
tensor without memory shares its version, by which writes are known. Loaded where there is such a copy.

A copy does not follow the model. Written after a load or a step it would bring back what the model had before wherever
nobody wrote, and nothing tells which elements these are: an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from xamp.errors import StateError
from xamp.values.lowered import handed_out, is_low_precision, lowered

__all__ = ["begin_saving", "forget", "hand_out", "take_in"]

Write = Callable[[torch.Tensor, torch.Tensor], None]  # writes fp32 values into a low-precision tensor


class _Copy:
    """One copy: its ``key`` in the state dict, and what returns the ``tensor`` and the ``copy``; None: it is gone."""

    def __init__(self, key: str, tensor: torch.Tensor, copy: torch.Tensor, write: Write) -> None:
        self.key = key
        self.tensor = weakref.ref(tensor)
        self._write = write
        self._counter = copy.detach()  # shares the version
        self._counter.set_()  # type: ignore[call-overload]  # and has no memory any more
        self._taken = tensor._version
        self.forget()
        self.copy = weakref.ref(copy, self.end)

    def is_written(self) -> bool:
        """Return whether something has written into the copy."""
        return self._counter._version != self._version

    def take_in(self, tensor: torch.Tensor, copy: torch.Tensor) -> bool:
        """Write the copy into the model, unless that has moved on since it had what the copy has: return whether."""
        self.forget()
        if tensor._version != self._taken:
            return False
        self._write(tensor, copy)
        before = self._taken
        for each in lowered[tensor].copies:
            each.go_on(before, tensor)
        self._taken = tensor._version
        return True

    def go_on(self, version: int, tensor: torch.Tensor) -> None:
        """Follow ``tensor``, which a copy of that ``version`` was written into; this one, of another name, was too."""
        if self._taken == version and self.is_written():
            self._taken = tensor._version

    def forget(self) -> None:
        """Forget what was written into the copy."""
        self._version = self._counter._version

    def end(self, _: object = None) -> None:
        """The copy, or the tensor, is gone: what is written counts no more. What was written is yet to be told."""
        if not self.is_written():
            handed_out.pop(self, None)
            if (tensor := self.tensor()) is not None and is_low_precision(tensor):
                lowered[tensor].copies.pop(self, None)


def hand_out(key: str, tensor: torch.Tensor, copy: torch.Tensor, write: Write) -> None:
    """Note that ``copy`` of ``tensor`` is handed out under ``key``."""
    if type(copy) is torch.Tensor and not (copy.is_inference() or tensor.is_inference()):
        one = _Copy(key, tensor, copy, write)
        handed_out[one] = lowered[tensor].copies[one] = None


def forget(tensor: torch.Tensor) -> None:
    """Forget what was written into copies of ``tensor``, which is loaded now."""
    for one in [*lowered[tensor].copies] if is_low_precision(tensor) else ():
        one.forget()
        if one.copy() is None:
            one.end()


def begin_saving(state: Mapping[str, Any]) -> None:
    """Call :func:`take_in` before the first copy for ``state``. A model of many parts comes here with each of them."""
    if handed_out:
        last = next(reversed(handed_out))
        if state.get(last.key, last) is not last.copy():
            take_in()


def take_in() -> None:
    """Write into the models what was written into copies.

    Raises:
        StateError: one that was written into is gone, with what it held, or the model has moved on.
    """
    gone: list[str] = []
    behind: list[str] = []
    for one in [one for one in [*handed_out] if one.is_written()]:
        tensor, copy = one.tensor(), one.copy()
        if tensor is None or copy is None or not is_low_precision(tensor):
            gone += [one.key] if tensor is not None and is_low_precision(tensor) else []
            one.forget()
            one.end()
        elif not one.take_in(tensor, copy):
            behind.append(one.key)
    if lost := gone or behind:
        why = (
            "is gone, and the model was not used meanwhile" if gone else "is from before the model's last step or load"
        )
        raise StateError(
            f"model.state_dict()[{lost[0]!r}]: at this level it is a copy in fp32, and something was written into it. "
            f"The copy {why} ({len(lost)} such entries). Load with model.load_state_dict(own), or write into what "
            "model.state_dict() returns now, and keep that until the next forward."
        )
