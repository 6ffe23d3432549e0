"""Recommends a level for a device, and says why: the level is the one that ``level="auto"`` means there."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator

import torch

from xamp.contract import Backend
from xamp.policy import LEVELS, WHY_BEST, Level, best_level

__all__ = ["Advice", "advise"]

_TILE = 8


@dataclasses.dataclass(frozen=True)
class Advice:
    """The recommended level for a device.

    Attributes:
        level: the level that ``"auto"`` means on the device.
        reason: why this level.
        alternatives: pairs: another level, and the case in which it is the better one.
        shapes: which tensor sizes run fast on the device; empty where the size makes no difference.
    """

    level: str
    reason: str
    alternatives: tuple[tuple[str, str], ...]
    shapes: str


def advise(backend: Backend, device: torch.device) -> Advice | None:
    """Recommend a level for ``device``; choose it as ``initialize`` does. None where the device runs no level."""
    can = backend.capabilities(device)
    level = best_level(can.fast_dtypes)
    if not can.levels:
        return None
    alternatives = [(name, when) for name, when in _alternatives(level, can.fast_dtypes) if name in can.levels]
    shapes = "" if level.dtype is None else _shape_hint(level)
    return Advice(level.name, WHY_BEST[level.dtype], tuple(alternatives), shapes)


def _alternatives(level: Level, fast_dtypes: Collection[str]) -> Iterator[tuple[str, str]]:
    """What may suit better than ``level``, the recommended one, and when."""
    if level.dtype is None:
        return
    for row in LEVELS.values():
        if row.dtype == level.dtype and row.master_weights:
            scaled = ", a loss scale" if row.scales and not level.scales else ""
            yield (
                row.name,
                f"parameters in {row.dtype} with float32 masters{scaled}: less memory for activations, fewer casts",
            )
    if level.dtype == "bfloat16" and "float16" in fast_dtypes:
        other = best_level(("float16",))
        yield other.name, "float16 with a loss scale: three more bits of mantissa, where bfloat16 costs accuracy"


def _shape_hint(level: Level) -> str:
    return (
        f"at {level.name} give linear layers, channels, batches and vocabularies sizes that are multiples of {_TILE}: "
        f"matrix units take tiles of {_TILE} values of {level.dtype} (16 bytes), and other sizes are padded or run on "
        "slower kernels"
    )
