"""Which tensors xamp has cast to low precision, and what belongs to each: a master, or fp32 values.

One weak table, which casting, the step and sessions read. :mod:`xamp.scaling.masters` fills it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

__all__ = [
    "LOWER",
    "Lowered",
    "any_low_precision",
    "forget_low_precision",
    "handed_out",
    "is_copied",
    "is_low_precision",
    "lowered",
    "master_of",
    "note_copies",
    "was_copied",
]

LOWER = (torch.float16, torch.bfloat16)


@dataclasses.dataclass(eq=False)
class Lowered:
    """The exact values of a parameter or buffer that xamp cast to low precision.

    Attributes:
        master: the fp32 master of a parameter; None where it has none.
        original: of a buffer: the fp32 values that were cast or loaded into it.
        version: the version of the master when parameter and master were last made equal.
        is_unused: no backward has used the master yet, so it follows what is written into the parameter.
        copies: its copies that ``model.state_dict()`` has returned, of :data:`handed_out`.
    """

    master: nn.Parameter | None
    original: torch.Tensor | None
    version: int
    is_unused: bool = True
    copies: dict[Any, None] = dataclasses.field(default_factory=dict)


lowered: Any = WeakIdKeyDictionary()
"""tensor -> its :class:`Lowered`, until its session is closed."""

handed_out: dict[Any, None] = {}
"""The copies of low-precision tensors that ``model.state_dict()`` has returned: see :mod:`xamp.scaling.handed_out`."""

_copied: Any = WeakIdKeyDictionary()  # tensor of a deep copy -> its dtype


def master_of(param: torch.Tensor) -> nn.Parameter | None:
    """Return the fp32 master of a low-precision parameter; None where it has none."""
    found: Lowered | None = lowered.get(param)
    return None if found is None else found.master


def is_low_precision(tensor: torch.Tensor) -> bool:
    """Return whether xamp cast ``tensor`` to low precision, in a session that is not closed."""
    return tensor in lowered


def any_low_precision() -> bool:
    """Return whether xamp cast any tensor to low precision, in a session that is not closed."""
    return bool(lowered)


def forget_low_precision(tensor: torch.Tensor) -> None:
    """Forget ``tensor``: it is no longer in low precision."""
    lowered.pop(tensor, None)


def note_copies(copied: nn.Module) -> None:
    """Remember the 16-bit tensors of ``copied``, a deep copy of a model whose parameters xamp has cast."""
    for tensor in (*copied.parameters(), *copied.buffers()):
        if tensor.dtype in LOWER:
            _copied[tensor] = tensor.dtype


def is_copied(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is 16-bit because it was copied from one that xamp has cast."""
    return _copied.get(tensor) is tensor.dtype


def was_copied(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is of a deep copy of a model whose parameters xamp has cast, whatever its dtype now."""
    return tensor in _copied
