"""What came of stages, as data and as one table. Texts name no host and no path."""

from __future__ import annotations

import collections
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ci.results import clean
from ci.stages.log import Kept
from ci.stages.stage import Stage, is_there

__all__ = ["HEADS", "counts", "failures", "of", "rows", "show", "show_table"]

HEADS = ("stage", "outcome", "passed", "failed", "others", "seconds", "")
_REASON = 300  # characters
_COLOURS = {"passed": "green", "left out": "yellow", "not run": "dim"}


def of(stage: Stage, kept: Kept) -> dict[str, Any]:
    """One stage: name, what, outcome, reason, seconds, counts."""
    reason = "" if kept.end is None else _short(kept.end["reason"])
    if kept.outcome == "killed" and kept.end is None:
        reason = "it was cut short"
    about = {"name": stage.name, "what": stage.what, "outcome": kept.outcome, "reason": reason}
    return {**about, "seconds": round(kept.seconds), "counts": counts(kept)}


def counts(kept: Kept) -> dict[str, int]:
    """How many tests had each outcome; empty for a stage without tests."""
    return dict(collections.Counter(test["outcome"] for test in kept.tests.values()))


def failures(stage: str, kept: Kept) -> Iterable[dict[str, str]]:
    """Each test that failed, and each command that did not come to its end: stage, test, reason."""
    for name, test in kept.tests.items():
        if test["outcome"] == "failed":
            yield {"stage": stage, "test": clean(name), "reason": _short(test["reason"])}
    for name, step in kept.steps.items():
        if step["cut"] or step["code"] not in (0, 1, 5):
            yield {"stage": stage, "test": name, "reason": _short(step["tail"].strip().rpartition("\n")[2])}


def _short(text: str) -> str:
    return clean(" ".join(re.sub(r"\x1b\[[0-9;]*m", "", text).split()))[:_REASON]


def rows(stages: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """The lines of the table."""
    lines = []
    for stage in stages:
        left = dict(stage["counts"])
        passed, failed = left.pop("passed", ""), left.pop("failed", "")
        others = ", ".join(f"{number} {outcome}" for outcome, number in left.items())
        cells = (stage["name"], stage["outcome"], passed, failed, others, stage["seconds"], stage["reason"])
        lines.append(tuple(map(str, cells)))
    seconds = sum(stage["seconds"] for stage in stages)
    return [*lines, ("all", "", "", "", "", str(seconds), "")]


def show(title: str, stages: Sequence[Mapping[str, Any]]) -> None:
    """Print the table of stages."""
    show_table(title, HEADS, rows(stages))


def show_table(title: str, heads: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Print a table, whose second column is an outcome: in colours where rich is there, else as plain text."""
    if is_there("rich"):
        _show_in_colours(title, heads, lines)
        return
    widths = [max(len(line[i]) for line in [heads, *lines]) for i in range(len(heads))]
    print(f"\n{title}")
    for line in [heads, *lines]:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip(), flush=True)


def _show_in_colours(title: str, heads: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for index, head in enumerate(heads):
        numbers = any(line[index] for line in lines) and all(line[index].isdigit() for line in lines if line[index])
        table.add_column(head, justify="right" if numbers else "left", overflow="fold")
    for line in lines:
        table.add_row(*map(Text, line), style=_COLOURS.get(line[1], "bold red" if line[1] else "bold"))
    Console(width=None if sys.stdout.isatty() else 140).print(Text(f"\n{title}", style="bold"), table)
