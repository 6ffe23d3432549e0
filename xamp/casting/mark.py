"""The mark of a region: what code that runs in one finds of it on its thread."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

__all__ = ["APART", "PORTABLE", "REPLACED", "SLOT", "Mark", "mark_of", "no_casts_mark"]

SLOT = "ipu"
"""A device type of torch that nobody has. In a region under the portable policy autocast is on for it: part of the
autocast state, so that the compiler's guards and the keys of its caches see it, and entries that it runs on fake
tensors."""

PORTABLE, REPLACED, APART = torch.float16, torch.bfloat16, torch.float32
"""What its dtype says, which the guards see while it is on: a region under the portable policy; one in which replaced
functions cast by its mark, or must not cast; code outside of regions for which they do other than usual."""


@dataclasses.dataclass(frozen=True, eq=False)
class Mark:
    """The mark of a region.

    Attributes:
        device_type: whose autocast state the region sets; None sets none.
        dtype: what operators are cast to; None: not at all.
        blocked: regions entered in here stay without casts: ``disable_casts``.
        portable: operators are cast by the portable policy, not by the device's own list alone.
        casting: what functions ask that an op policy has replaced, for their casts in this region; None: they cast
            nothing here.
        slot: the dtype of :data:`SLOT` in the region; None: it is off.
    """

    device_type: str | None
    dtype: torch.dtype | None
    blocked: bool = False
    portable: bool = False
    casting: Any = None
    slot: torch.dtype | None = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        slot = PORTABLE if self.portable else None if self.casting is None else REPLACED
        object.__setattr__(self, "slot", slot)


@functools.cache
def _mark_of(device_type: str, dtype: torch.dtype | None, portable: bool, casting: Any) -> Mark:
    if dtype is None:
        return Mark(device_type, None)
    return Mark(device_type, dtype, portable=portable, casting=casting)


def mark_of(device_type: str, dtype: torch.dtype | None, portable: bool = False, casting: Any = None) -> Mark:
    """The mark of a region that casts operators on ``device_type`` to ``dtype``, the same object each time."""
    return _mark_of(device_type, dtype, portable, casting)


@functools.cache
def _no_casts_mark(device_type: str | None) -> Mark:
    return Mark(device_type, None, blocked=True)


def no_casts_mark(device_type: str | None) -> Mark:
    """The mark of a region that must not cast; ``device_type`` None where it has no autocast state to set."""
    return _no_casts_mark(device_type)


# What torch.compiler.assume_constant_result sets: called while tracing, the result a constant. Calling the decorator
# would import the compiler with every import of xamp.
mark_of._dynamo_marked_constant = no_casts_mark._dynamo_marked_constant = True  # type: ignore[attr-defined]
