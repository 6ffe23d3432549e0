"""The arithmetic of Ascend chips where it differs from a CPU's.

Old chips saturate: a float16 overflow becomes the largest number, nan becomes 0, and the card raises a flag. An inf
among the inputs, such as that of an attention mask, is no overflow: an operator that computes with it gives the
largest number and raises no flag. An operator that only moves numbers keeps the inf. (That is an assumption; no source
says it.) A float32 overflow raises the flag too. That a card also saturates it, as Ascend's page of INF_NAN_MODE_ENABLE
says of all dtypes, is not imitated: the inf shows. These chips cannot compute in bfloat16, only store it.
"""

from __future__ import annotations

import math
import os
from typing import Any

import torch

from xamp.backends.npu import chips

__all__ = ["CHIP", "FIRST_A2", "SATURATES", "WATCHED", "Sources", "clear", "decide", "moves", "raised", "settle"]

_LARGEST = 65504.0
FIRST_A2 = 220
_FIRST_950 = 260


def _chip() -> chips.Chip:
    name = os.environ.get(chips.EMULATED, chips.DEFAULT)
    return chips.find(name) or chips.CHIPS[chips.DEFAULT]


def _saturates(chip: chips.Chip) -> bool:
    """Whether the chip saturates, by default or because the environment says so: torch_npu's rule."""
    told = os.environ.get("INF_NAN_MODE_FORCE_DISABLE") == "1" or os.environ.get("INF_NAN_MODE_ENABLE") == "0"
    return chip.saturates or (told and chip.number < _FIRST_950)


CHIP = _chip()
SATURATES = _saturates(CHIP)
WATCHED = SATURATES or not CHIP.bf16


def decide() -> None:
    """Read the environment again: torch_npu does when the device starts, and a script may set it until then."""
    global SATURATES, WATCHED
    SATURATES = _saturates(CHIP)
    WATCHED = SATURATES or not CHIP.bf16


_flags: set[int] = set()

# Operators that only move numbers: names without "aten::", a final underscore and the overload.
_MOVES = frozenset(
    (
        *("cat", "channel_shuffle", "clone", "constant_pad_nd", "fill", "flip", "gather", "im2col", "masked_fill"),
        *("index", "index_copy", "index_fill", "index_put", "_index_put_impl", "index_select", "masked_scatter"),
        *(
            "masked_select",
            "put",
            "repeat",
            "roll",
            "scatter",
            "split_with_sizes_copy",
            "stack",
            "take",
            "tril",
            "triu",
        ),
        *("where", "zero", "_chunk_cat", "_foreach_copy", "_foreach_zero"),
    )
)


def moves(name: str) -> bool:
    """Whether operator ``name`` only moves numbers, so that no chip changes them."""
    return name.partition("::")[2].partition(".")[0].rstrip("_") in _MOVES


class Sources:
    """What something is computed from: whether all of that is finite, which is looked at when it is asked, and once."""

    __slots__ = ("_finite", "_values")

    def __init__(self, *values: Any) -> None:
        """Of ``values``, a nest of arguments."""
        self._values: Any = values
        self._finite: bool | None = None

    def finite(self) -> bool:
        """Whether all numbers in them are finite. Who writes to one of them asks before that."""
        if self._finite is None:
            self._finite = _all_finite(self._values)
            self._values = None
        return self._finite


def _all_finite(values: Any) -> bool:
    if isinstance(values, torch.Tensor):
        if values.layout is torch.sparse_coo:
            values = values._values()
        return values.layout is not torch.strided or not values.is_floating_point() or _is_finite(values)
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (list, tuple)):
        return not isinstance(values, float) or math.isfinite(values)
    for each in values:  # noqa: SIM110 - no generator: this runs for each operator
        if not _all_finite(each):
            return False
    return True


def _is_finite(tensor: torch.Tensor) -> bool:
    # A finite sum has finite parts, and is one operator in the place of five; another one may just be too large.
    if tensor.element_size() > 1 and math.isfinite(tensor.sum().item()):
        return True
    return bool(torch.isfinite(tensor).all())


def settle(made: Any, index: int, sources: Sources | None = None) -> None:
    """Change ``made``, in place, from the CPU's results to what the chip would have computed on card ``index``.

    Args:
        made: tensors on the CPU, in nested lists.
        index: the card.
        sources: the inputs; a value that is not finite is an overflow only if all of them were finite.

    Raises:
        RuntimeError: the chip does not compute in this dtype.
    """
    if not WATCHED or made is None:
        return
    if isinstance(made, torch.Tensor):
        if made.layout is torch.sparse_coo:
            made = made._values()
        if made.dtype is torch.bfloat16 and not CHIP.bf16:
            raise RuntimeError(f"not implemented for DT_BFLOAT16 on {CHIP.name} (emulated)")
        if SATURATES and made.dtype is torch.float16 and made.layout is torch.strided:
            _saturate(made, index, sources)
        elif (
            SATURATES
            and made.dtype is torch.float32
            and made.layout is torch.strided
            and not _is_finite(made)
            and (sources is None or sources.finite())
        ):
            _flags.add(index)
    elif isinstance(made, (list, tuple)):
        for each in made:
            settle(each, index, sources)


def _saturate(made: torch.Tensor, index: int, sources: Sources | None) -> None:
    if not _is_finite(made):
        overflows = sources is None or sources.finite()
        torch.nan_to_num_(made, nan=0.0, posinf=_LARGEST, neginf=-_LARGEST)
        if overflows:
            _flags.add(index)


def raised(index: int) -> bool:
    """Whether something overflowed on card ``index`` since its flag was cleared."""
    return index in _flags


def clear(index: int) -> None:
    """Lower the flag of card ``index``."""
    _flags.discard(index)
