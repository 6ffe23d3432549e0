"""The tables of a plan: what kernels know of each row, and which blocks one launch takes.

Dtypes are constants of a kernel, so that a block is read by loads of full width, all before the first use. So there is
one launch for each combination of dtypes, of which real models have one to three.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from xamp.onepass.rules import CODES, Row, vectors_of

__all__ = ["Part", "Parts", "cut", "row_words"]

_ALIGNED = 16  # bytes


class Part(NamedTuple):
    """What one launch takes.

    Attributes:
        constants: of the kernel.
        entries: of each block its row, shifted by 32 bits, and its number in the row, int64, on the device.
    """

    constants: dict[str, Any]
    entries: torch.Tensor


class Parts(NamedTuple):
    """What the launches over all rows take.

    Attributes:
        steps: by the dtypes of all tensors.
        sums: by the dtype of the gradients, and whether they change in place. Those that do come last.
    """

    steps: list[Part]
    sums: list[Part]


def row_words(rule: str, rows: Sequence[Row], block: int, sum_block: int) -> tuple[list[int], int, int]:
    """Return the table of rows, and the counts of blocks of a step and of a sum; see the words in ``elements``."""
    words: list[int] = []
    blocks = sums = 0
    for row in rows:
        size, states = row.param.numel(), [state.data_ptr() for state in row.states]
        read = [row.param, *([] if row.low is None else [row.low]), *vectors_of(rule, row)]
        is_aligned = all(tensor.data_ptr() % _ALIGNED == 0 for tensor in read)
        words += [row.param.data_ptr(), 0 if row.low is None else row.low.data_ptr(), *states, *[0] * (3 - len(states))]
        words += [0 if row.step is None else row.step.data_ptr(), size, size if is_aligned else 0, row.group]
        words += [row.in_place, blocks, -(-size // block), sums, -(-size // sum_block)]
        blocks, sums = blocks + -(-size // block), sums + -(-size // sum_block)
    return words, blocks, sums


def cut(rule: str, rows: Sequence[Row], dtypes: Sequence[torch.dtype], block: int, sum_block: int) -> Parts:
    """Return the parts of ``rows`` whose gradients have ``dtypes``."""

    def step_of(row: Row, grad: int) -> dict[str, Any]:
        states, low = vectors_of(rule, row), 0 if row.low is None else CODES[row.low.dtype]
        state = CODES[states[0].dtype] if states else 1
        codes = {"PARAMS": CODES[row.param.dtype], "LOWS": low, "STATE_CODE": state, "STATES": len(states)}
        return codes | {"GRADS": grad}

    def sum_of(row: Row, grad: int) -> dict[str, Any]:
        return {"GRADS": grad, "IN_PLACE": row.in_place}

    grads = [CODES[dtype] for dtype in dtypes]
    return Parts(_parts(rows, grads, block, step_of), _parts(rows, grads, sum_block, sum_of))


def _parts(
    rows: Sequence[Row], grads: Iterable[int], block: int, kind: Callable[[Row, int], dict[str, Any]]
) -> list[Part]:
    found: dict[tuple[Any, ...], tuple[dict[str, Any], list[torch.Tensor]]] = {}
    for number, (row, grad) in enumerate(zip(rows, grads, strict=True)):
        if row.param.numel():
            constants = kind(row, grad)
            entries = (number << 32) + torch.arange(-(-row.param.numel() // block), dtype=torch.int64)
            found.setdefault(tuple(constants.values()), (constants, []))[1].append(entries)
    return [Part(constants, torch.cat(entries).to(rows[0].param.device)) for constants, entries in found.values()]
