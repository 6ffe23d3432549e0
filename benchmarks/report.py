"""One figure of a benchmark: its value, its bound, and whether it keeps the bound."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Figure:
    """A line of a table.

    Attributes:
        case: what was measured.
        value: the figure.
        unit: the unit of ``value`` and ``bound``.
        bound: the largest allowed value; None: the figure is for information.
        detail: further numbers, printed as they are.
    """

    case: str
    value: float
    unit: str
    bound: float | None = None
    detail: str = ""

    @property
    def missed(self) -> bool:
        return self.bound is not None and not self.value <= self.bound

    @property
    def verdict(self) -> str:
        return "" if self.bound is None else "MISSED" if self.missed else "ok"


def print_table(title: str, figures: Iterable[Figure]) -> None:
    rows = [
        (f.case, f"{f.value:.3f}", f.unit, "" if f.bound is None else f"{f.bound:g}", f.verdict, f.detail)
        for f in figures
    ]
    rows.insert(0, ("case", "value", "unit", "bound", "", ""))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    print(f"\n{title}")
    for row in rows:
        cells = [row[0].ljust(widths[0]), row[1].rjust(widths[1]), row[2].ljust(widths[2]), row[3].rjust(widths[3])]
        print(("  ".join([*cells, row[4].ljust(widths[4]), row[5]])).rstrip())
