"""torch's switches by which float32 loses digits: how to read them, and how to set them so that it keeps all digits.

Since torch 2.9 each switch has an old and a new spelling; torch refuses to read them if they disagree. So this module
writes the old spelling where it can be read, because then both agree. What is still narrow is set by the new spelling.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["CONVOLUTIONS", "HOST_PRODUCTS", "PRODUCTS", "Switch", "host_switch"]

_NARROW = ("tf32", "bf16")
_NEW = "fp32_precision"


@dataclasses.dataclass(frozen=True)
class Switch:
    """One such switch.

    Attributes:
        groups: the groups of torch.backends whose ``fp32_precision`` the switch sets.
        beside: other groups that the old spelling also writes.
        read: reads the old spelling; None if there is none.
        write: sets the old spelling.
        exact: the value of the old spelling with which float32 keeps its digits.
    """

    groups: tuple[str, ...]
    beside: tuple[str, ...] = ()
    read: Callable[[], Any] | None = None
    write: Callable[[Any], object] = len
    exact: object = None

    def narrow(self) -> str:
        """The dtype in which float32 is computed, such as ``"tf32"``; empty if float32 keeps its digits."""
        values = [_value(group) for group in self.groups]
        if any(values):
            return next((value for value in values if value in _NARROW), "")
        old = self._spoken()  # this torch has no new spelling
        return "" if old in (None, self.exact) else "tf32"

    def make_exact(self) -> Callable[[], object]:
        """Set the switch so that float32 keeps its digits; return a function that restores it."""
        spoken, before = self._spoken(), {group: _value(group) for group in (*self.groups, *self.beside)}
        written = spoken is not None and spoken != self.exact
        if written:
            self.write(self.exact)
        for group in self.groups:
            if _value(group) in _NARROW:
                _set(group, "ieee")

        def back() -> None:
            if written:
                self.write(spoken)
            for group, value in before.items():
                if value and _value(group) != value:
                    _set(group, "none")  # now it follows the group above it, as it may have done before
                    if _value(group) != value:
                        _set(group, value)

        return back

    def _spoken(self) -> Any:
        """The value of the old spelling; None if there is none, or if torch refuses to read it."""
        if self.read is not None:
            with contextlib.suppress(AttributeError, RuntimeError, Warning):
                return self.read()
        return None


def _value(group: str) -> str:
    try:
        return str(operator.attrgetter(f"{group}.{_NEW}")(torch.backends))
    except (AttributeError, RuntimeError):
        return ""


def _set(group: str, value: str) -> None:
    setattr(operator.attrgetter(group)(torch.backends), _NEW, value)


def _products(group: str, beside: str) -> Switch:
    return Switch(
        (group,), (beside,), torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, exact="highest"
    )


def _set_tf32(value: bool) -> None:
    torch.backends.cudnn.allow_tf32 = value


PRODUCTS = _products("cuda.matmul", "mkldnn.matmul")
CONVOLUTIONS = Switch(
    ("cudnn.conv", "cudnn.rnn"), read=lambda: torch.backends.cudnn.allow_tf32, write=_set_tf32, exact=False
)
"""The switch of cuDNN's convolutions and RNNs."""

HOST_PRODUCTS = _products("mkldnn.matmul", "cuda.matmul")


def host_switch(group: str) -> Switch:
    """The switch of a oneDNN group, ``"mkldnn.conv"`` or ``"mkldnn.rnn"``; it has only the new spelling."""
    return Switch((group,))
