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
_HEAD = "kernel\tconstants\tsm_90 instructions\tsm_90 registers\tsm_90 blocks\tgfx942 registers\tgfx942 waves"


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
        if len(cells) == 5:
            each, registers, blocks, vgprs, waves = cells
            figures["sm_90"] = Figures(float(each) if each != "-" else None, int(registers), int(blocks))
            figures["gfx942"] = Figures(None, int(vgprs), int(waves))
        rows[Variant(kernel, constants)] = Row(figures)
    if len(rows) > MOST:
        raise ValueError(f"{FILE.name} has {len(rows)} rows: at most {MOST} are compiled for each commit")
    return rows


def written(rows: Mapping[Variant, Row]) -> str:
    """Return the file with these rows."""
    lines = [_HEAD]
    for variant, row in rows.items():
        nvidia, amd = row.figures["sm_90"], row.figures["gfx942"]
        each = "-" if nvidia.instructions is None else f"{nvidia.instructions:.1f}"
        lines.append("\t".join(map(str, (*variant, each, *nvidia[1:], *amd[1:]))))
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
