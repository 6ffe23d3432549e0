"""The committed table: which variants are compiled, and the most that each may take."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import NamedTuple

from ci.kernels.driver import Variant
from ci.kernels.figures import BOUNDS, Figures

__all__ = ["FILE", "MOST", "Row", "compared", "read", "written"]

FILE = pathlib.Path(__file__).with_name("table.tsv")
MOST = 60
TARGETS = ("sm_90", "gfx942")
_NVIDIA, _AMD = ("instructions", "registers", "blocks"), ("instructions", "registers", "waves")
_HEAD = "\t".join(("kernel", "constants", *map("sm_90 {}".format, _NVIDIA), *map("gfx942 {}".format, _AMD)))


class Row(NamedTuple):
    """What the table says of a variant: figures for each target that it has columns for."""

    figures: Mapping[str, Figures]


def read() -> dict[Variant, Row]:
    """Return the rows of the file, in its order. A row of which nothing was measured yet has no figures.

    Raises:
        ValueError: there are more than :data:`MOST`.
    """
    rows: dict[Variant, Row] = {}
    for line in FILE.read_text(encoding="utf-8").splitlines()[1:]:
        kernel, constants, *cells = line.split("\t")
        figures = {}
        for number, target in enumerate(TARGETS if cells else ()):
            each, registers, blocks = cells[3 * number : 3 * number + 3]
            figures[target] = Figures(float(each) if each != "-" else None, int(registers), int(blocks))
        rows[Variant(kernel, constants)] = Row(figures)
    if len(rows) > MOST:
        raise ValueError(f"{FILE.name} has {len(rows)} rows: at most {MOST} are compiled for each commit")
    return rows


def written(rows: Mapping[Variant, Row]) -> str:
    """Return the file with these rows."""
    lines = [_HEAD]
    for variant, row in rows.items():
        cells: list[str] = [*variant]
        for found in (row.figures[target] for target in TARGETS):
            each = "-" if found.instructions is None else f"{found.instructions:.1f}"
            cells += (each, *map(str, found[1:]))
        lines.append("\t".join(cells))
    return "\n".join(lines) + "\n"


def compared(variant: Variant, target: str, found: Figures, row: Row) -> list[str]:
    """Return what is more than the table, or a promise, allows."""
    limits = [(f"{FILE.name} says", row.figures[target])] if target in row.figures else []
    if target == "sm_90" and (promised := BOUNDS.get(" ".join(variant))):
        limits.append(("is promised", Figures(*promised)))
    wrong = []
    for who, limit in limits:
        if found.instructions is not None and (limit.instructions is None or found.instructions > limit.instructions):
            wrong.append(f"{found.instructions} instructions an element, where {limit.instructions} {who}")
        if found.registers > limit.registers:
            wrong.append(f"{found.registers} registers, where {limit.registers} {who}")
        if found.blocks < limit.blocks:
            wrong.append(f"{found.blocks} at a time, where {limit.blocks} {who}")
    return wrong
