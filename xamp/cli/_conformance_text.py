"""The output of ``xamp conformance``: progress as a bar, or as lines without a terminal; then tables."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from xamp.testing.lane import Lane
from xamp.testing.run import OUTCOMES, Listener, Result

__all__ = ["Progress", "render"]

_COLOURS = {"passed": "green", "failed": "bold red", "known gap": "yellow", "not declared": "dim", "skipped": "yellow"}
_TEXT_LINES = 30
_QUIET = 20.0  # seconds after which a line says what runs


class Progress(Listener):
    """Shows the progress of the run on standard error.

    On a terminal that is a bar. Else it is a line when a tier is done, and after 20 seconds one that says what runs.
    """

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()  # not the console's opinion: FORCE_COLOR asks for colours only
        self._console = Console(stderr=True)
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._is_terminal,
        )
        self._task: Any = None
        self._left: dict[tuple[str, str], int] = {}
        self._done: dict[tuple[str, str], list[Result]] = {}
        self._began = self._told = time.monotonic()

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._bar.stop()

    def begin(self, counts: dict[tuple[str, str], int]) -> None:
        """Take the number of clauses of each lane and tier, and show an empty bar."""
        self._left, self._done = dict(counts), {key: [] for key in counts}
        self._task = self._bar.add_task("", total=sum(counts.values()))
        self._began = self._told = time.monotonic()

    def start(self, lane: str, clause: str) -> None:
        """Show the clause that runs now."""
        if not self._is_terminal and time.monotonic() - self._told >= _QUIET:
            done, total = sum(map(len, self._done.values())), sum(self._left.values())
            self._print(f"{lane}  {clause}: {done} of {total} done after {time.monotonic() - self._began:.0f} s")
        self._bar.update(self._task, description=escape(f"{lane}  {clause}"[:60].ljust(60)))

    def end(self, result: Result) -> None:
        """Count the result. Print it if it failed, and print the line of its tier if the tier is done."""
        key = result.lane, result.tier
        self._done[key].append(result)
        self._bar.advance(self._task)
        if result.outcome == "failed":
            self._print(f"{result.lane}  {result.clause} failed: {result.reason}")
        if len(self._done[key]) == self._left[key]:
            self._print(_line_of(*key, self._done[key]))

    def _print(self, text: str) -> None:
        self._told = time.monotonic()
        if self._is_terminal:
            self._bar.console.print(Text(text))
        else:
            print(text, file=sys.stderr, flush=True)


def _line_of(lane: str, tier: str, results: Sequence[Result]) -> str:
    return f"{lane}  {tier:<12} {_sums(results)} in {sum(result.seconds for result in results):.0f} s"


def _sums(results: Sequence[Result]) -> str:
    counts = Counter(result.outcome for result in results)
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome])


def render(lanes: Sequence[Lane], results: Sequence[Result], *, whole: bool) -> None:
    """Print a table for each lane, what did not pass and why, and a verdict. ``whole``: no clause was left out."""
    console = Console()
    if not sys.stdout.isatty():
        console = Console(width=120)
    for lane in lanes:
        mine = [result for result in results if result.lane == lane.title]
        console.print(Group(*_about(lane, mine, whole)))


def _about(lane: Lane, results: Sequence[Result], whole: bool) -> Iterator[RenderableType]:
    versions = ", ".join(f"{name} {version}" for name, version in lane.backend.versions().items())
    yield Text(f"\n{lane} on {lane.device} ({lane.device_name}); {versions}", style="bold")
    yield _table(results)
    failed = [result for result in results if result.outcome == "failed"]
    for result in failed:
        yield Text(f"\n{result.clause} failed: {result.reason}", style=_COLOURS["failed"])
        yield Text("\n".join(result.text.splitlines()[-_TEXT_LINES:]))
    for outcome in ("known gap", "skipped", "not declared"):
        yield from _reasons(outcome, [result for result in results if result.outcome == outcome])
    good = "conforms in all that it declares" if whole else "passes what was chosen"
    verdict = "does not conform" if failed else good
    yield Text(f"\n{lane.title}: {verdict}: {_sums(results)}", style=_COLOURS["failed" if failed else "passed"])


def _table(results: Sequence[Result]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("tier")
    for outcome in (*OUTCOMES, "seconds"):
        table.add_column(outcome, justify="right")
    tiers = list(dict.fromkeys(result.tier for result in results))
    for tier in tiers:
        table.add_row(tier, *_cells([result for result in results if result.tier == tier]))
    table.add_row("all", *_cells(results), style="bold")
    return table


def _cells(results: Sequence[Result]) -> list[Text]:
    counts = Counter(result.outcome for result in results)
    cells = [
        Text(str(counts[outcome]), style=_COLOURS[outcome]) if counts[outcome] else Text("-", style="dim")
        for outcome in OUTCOMES
    ]
    return [*cells, Text(f"{sum(result.seconds for result in results):.1f}")]


def _reasons(outcome: str, results: Sequence[Result]) -> Iterator[Text]:
    """Each reason once, with the clauses to which it applies."""
    by_reason: dict[str, Counter[str]] = {}
    for result in results:
        by_reason.setdefault(result.reason, Counter())[result.clause.partition("[")[0]] += 1
    if by_reason:
        yield Text(f"\n{outcome}:", style=_COLOURS[outcome])
    for reason, clauses in by_reason.items():
        yield Text(f"  {reason}")
        names = ", ".join(f"{name} ({count})" if count > 1 else name for name, count in clauses.items())
        yield Text(f"      {names}", style="dim")
