"""One figure of a benchmark: its value, its bound, and whether it keeps the bound."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from xamp.testing.measure import Pair


@dataclasses.dataclass(frozen=True)
class Figure:
    """A line of a table.

    Attributes:
        case: what was measured.
        value: the figure.
        unit: the unit of ``value`` and ``bound``.
        bound: the largest allowed value; None: the figure is for information.
        detail: further numbers, printed as they are.
        spread: the quartiles of ``value`` over the rounds; None: it was not measured in rounds.
    """

    case: str
    value: float
    unit: str
    bound: float | None = None
    detail: str = ""
    spread: tuple[float, float] | None = None

    @property
    def missed(self) -> bool:
        return self.bound is not None and not self.value <= self.bound

    @property
    def verdict(self) -> str:
        return "" if self.bound is None else "MISSED" if self.missed else "ok"


def of_ratio(case: str, pair: Pair, bound: float | None = None) -> Figure:
    """The ratio of a pair."""
    return Figure(case, pair.ratio, "ratio", bound, str(pair), pair.ratio_spread)


def of_difference(case: str, pair: Pair, bound: float | None = None) -> Figure:
    """The difference of a pair, in microseconds."""
    detail = f"{pair}  ratio {pair.ratio:.2f}"
    return Figure(case, pair.difference, "us", bound, detail, pair.difference_spread)


def shown(figure: Figure) -> str:
    """The value, with its spread behind it."""
    spread = "" if figure.spread is None else " ({:.3f} to {:.3f})".format(*figure.spread)
    return f"{figure.value:.3f}{spread}"


def print_table(title: str, figures: Iterable[Figure]) -> None:
    rows = [(f.case, shown(f), f.unit, "" if f.bound is None else f"{f.bound:g}", f.verdict, f.detail) for f in figures]
    rows.insert(0, ("case", "value", "unit", "bound", "", ""))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    print(f"\n{title}")
    for row in rows:
        cells = [row[0].ljust(widths[0]), row[1].rjust(widths[1]), row[2].ljust(widths[2]), row[3].rjust(widths[3])]
        print(("  ".join([*cells, row[4].ljust(widths[4]), row[5]])).rstrip())
