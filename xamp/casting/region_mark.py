"""The mark of a region: the description of the region that code finds on its thread."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from xamp.casting.features_in_use import needs
from xamp.torch_compat.torch_features import caches_casts_with_gradients

__all__ = ["APART", "PORTABLE", "REPLACED", "SLOT", "Mark", "mark_of", "no_casts_mark"]

SLOT = "ipu"
"""The slot: the autocast state of a device type that torch knows and nobody has. xamp stores a dtype in it.

The slot is part of the autocast state. The compiler's guards and the keys of its caches therefore see it, and so do the
entries that the compiler runs on fake tensors."""

PORTABLE, REPLACED, APART = torch.float16, torch.bfloat16, torch.float32
"""The meanings of the slot's dtype; the compiler's guards compare it while the slot is on.

``PORTABLE``: a region under the portable policy. ``REPLACED``: a region in which replaced functions cast as its mark
says, or must not cast. ``APART``: a block outside of regions in which replaced functions behave differently
than in the code around it."""


@dataclasses.dataclass(frozen=True, eq=False)
class Mark:
    """The mark of a region.

    Attributes:
        device_type: the device type whose autocast state the region sets; None: the region sets none.
        dtype: the dtype to which operators are cast; None: they are not cast.
        blocked: whether this is a ``disable_casts`` block, in which all regions are entered without casts.
        portable: whether operators are cast by the portable policy, and not only by the device's own list.
        casting: the object that the functions replaced by an op policy ask how to cast in this region; None: they cast
            nothing here.
        fp8: the recipe by which linear layers run in fp8; None: they do not.
        slot: the dtype of :data:`SLOT` in the region; None: the slot is off. With a recipe a tuple.
        caches: whether torch's cache of casts may be on in the region.
    """

    device_type: str | None
    dtype: torch.dtype | None
    blocked: bool = False
    portable: bool = False
    casting: Any = None
    fp8: str | None = None
    slot: Any = dataclasses.field(init=False)
    caches: bool = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "caches", caches_casts_with_gradients())
        slot = PORTABLE if self.portable else None if self.casting is None else REPLACED
        object.__setattr__(self, "slot", slot if self.fp8 is None else needs.fp8.slot_of(self.fp8, slot))


@functools.cache
def _mark_of(device_type: str, dtype: torch.dtype | None, portable: bool, casting: Any, fp8: str | None) -> Mark:
    if dtype is None:
        return Mark(device_type, None)
    return Mark(device_type, dtype, portable=portable, casting=casting, fp8=fp8)


def mark_of(
    device_type: str, dtype: torch.dtype | None, portable: bool = False, casting: Any = None, fp8: str | None = None
) -> Mark:
    """Return the mark of a region that casts operators on ``device_type`` to ``dtype``: the same object each time."""
    return _mark_of(device_type, dtype, portable, casting, fp8)


@functools.cache
def _no_casts_mark(device_type: str | None) -> Mark:
    return Mark(device_type, None, blocked=True)


def no_casts_mark(device_type: str | None) -> Mark:
    """Return the mark of a region that must not cast; ``device_type`` is None if it sets no autocast state."""
    return _no_casts_mark(device_type)


# torch.compiler.assume_constant_result sets this attribute: the compiler calls the function while it traces and takes
# the result as a constant. Calling the decorator itself would import the compiler with every import of xamp.
mark_of._dynamo_marked_constant = no_casts_mark._dynamo_marked_constant = True  # type: ignore[attr-defined]
