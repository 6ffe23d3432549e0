"""torch's switches that take digits from float32: what is set, and setting it so that none are taken.

Since torch 2.9 each has two spellings, which torch refuses to read where they disagree. So an old one that can be read
is written, for both agree then; what still says otherwise is written in the new one.
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
        groups: of torch.backends, whose ``fp32_precision`` it is.
        beside: other groups that the old spelling writes too.
        read: the value in the old spelling; None where it has none.
        write: sets it in the old spelling.
        exact: the value, in the old spelling, by which float32 keeps its digits.
    """

    groups: tuple[str, ...]
    beside: tuple[str, ...] = ()
    read: Callable[[], Any] | None = None
    write: Callable[[Any], object] = len
    exact: object = None

    def narrow(self) -> str:
        """The dtype that float32 is computed in, such as ``"tf32"``; empty where it keeps its digits."""
        values = [_value(group) for group in self.groups]
        if any(values):
            return next((value for value in values if value in _NARROW), "")
        old = self._spoken()  # a torch that has no new spelling
        return "" if old in (None, self.exact) else "tf32"

    def make_exact(self) -> Callable[[], object]:
        """Let float32 keep its digits; returns what sets the switch back as it was."""
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
                    _set(group, "none")  # by which it follows the group above it, as it may have done before
                    if _value(group) != value:
                        _set(group, value)

        return back

    def _spoken(self) -> Any:
        """The value in the old spelling; None where there is none, or torch refuses to say."""
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
"""cuDNN's, and its RNNs'."""

HOST_PRODUCTS = _products("mkldnn.matmul", "cuda.matmul")


def host_switch(group: str) -> Switch:
    """The switch of a group of oneDNN, which has the new spelling alone: ``"mkldnn.conv"`` or ``"mkldnn.rnn"``."""
    return Switch((group,))
