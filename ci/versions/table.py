"""What came of each release, as one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ci.stages import summary

__all__ = ["HEADS", "rows", "show"]

HEADS = ("release", "outcome", "Python", "passed", "skipped", "known", "failed", "seconds", "")
_COUNTED = {
    "passed": ("passed",),
    "skipped": ("skipped", "not declared", "lacking"),
    "known": ("xfailed", "known gap"),
    "failed": ("failed",),
}
"""By column: the outcomes of tests in it. Known is what stands in a ledger, and fails as that says."""


def rows(found: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """The lines: one for each release."""
    lines = []
    for one in found:
        sums = [str(sum(one["counts"].get(name, 0) for name in names)) for names in _COUNTED.values()]
        cells = sums if one["counts"] else [""] * len(sums)
        lines.append((one["torch"], one["outcome"], one["python"], *cells, str(one["seconds"]), one["reason"]))
    return lines


def show(found: Sequence[Mapping[str, Any]]) -> None:
    """Print the table."""
    summary.show_table("releases of torch", HEADS, rows(found))
