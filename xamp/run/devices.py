"""Which device answers in place of the one that a script names."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import torch

import xamp
from xamp.registry.device_in_use import device as device_of
from xamp.registry.registry import HOST

__all__ = ["FOREIGN", "PRETENDED", "Target"]

FOREIGN = ("cuda", "npu")
"""Device types that scripts name. Those that the device in use is not are redirected to it."""

PRETENDED = "cuda"
"""The device type that scripts are told of where the user asked to pretend."""

_SPELLED = re.compile(r"\s*([a-z]+)(?::(\d+))?\s*")


@dataclasses.dataclass(frozen=True)
class Target:
    """The device in use, and what it answers for.

    Attributes:
        type: its type.
        answers_for: the device types that are redirected to it.
        pretend: whether a script is told that CUDA is there.
    """

    type: str
    answers_for: tuple[str, ...]
    pretend: bool = False

    @classmethod
    def in_use(cls, pretend: bool = False) -> Target:
        """The target of this process: :func:`xamp.device`.

        Raises:
            BackendUnavailable: as :func:`xamp.device`.
        """
        kind = device_of().type
        return cls(kind, tuple(other for other in FOREIGN if other != kind), pretend)

    @property
    def is_host(self) -> bool:
        """Whether the target is the CPU."""
        return self.type == HOST

    def is_foreign(self, value: object) -> bool:
        """Whether ``value`` names a device that is redirected; an int does where it would stand for a card of CUDA."""
        if isinstance(value, str):
            spelled = _SPELLED.fullmatch(value)
            return spelled is not None and spelled[1] in self.answers_for
        if isinstance(value, int):
            return "cuda" in self.answers_for and not isinstance(value, bool)
        return isinstance(value, torch.device) and value.type in self.answers_for

    def map(self, value: Any) -> torch.device:
        """The device that answers for ``value``, which :meth:`is_foreign` accepts. On a CPU the index is dropped.

        Raises:
            BackendUnavailable: there is no device of that index.
        """
        return self.at(self._index(value))

    def at(self, index: int | None) -> torch.device:
        """The device of that index; None means the current one."""
        if self.is_host:
            return torch.device(HOST)
        return torch.device(self.type) if index is None else xamp.device(index)

    def map_type(self, value: Any) -> str:
        """A device type as text, redirected where it has to be; other values are returned as they are."""
        return self.type if isinstance(value, str) and self.is_foreign(value) else value

    @staticmethod
    def _index(value: Any) -> int | None:
        if isinstance(value, int):
            return value if value >= 0 else None
        if isinstance(value, str):
            spelled = _SPELLED.fullmatch(value)
            return None if spelled is None or spelled[2] is None else int(spelled[2])
        index: int | None = value.index
        return index
