"""What tests take, and which of them the quick tier leaves out.

``tests/costs.tsv`` has a line for each file of tests, and one for each test whose cases take longer than :data:`LIMIT`
on average. A test without a line of its own is quick, and so is one that is new, until ``ci/test.sh --costs`` has timed
it. Seconds are those of the clock on an idle machine, with the set-up of a case and all the processes it waits for.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

__all__ = ["LIMIT", "TABLE", "Cost", "Costs", "Meter", "read"]

ROOT = Path(__file__).resolve().parent.parent.parent
TABLE = ROOT / "tests" / "costs.tsv"
LIMIT = 0.5
"""Seconds a case that make a test slow. What is below fits the quick tier into its five minutes."""
_STAYS = 0.7
"""A test that has a line keeps it down to so much of the limit, so that noise moves few lines."""
_HEAD = "# test\tcases\tseconds\n# Made by ci/test.sh --costs; see tests/support/costs.py.\n"
_SHOWN = 10  # cases that are named as the slowest


@dataclasses.dataclass(frozen=True)
class Cost:
    """What the cases of a test take, or those of a file that are not in tests with a line of their own.

    Attributes:
        cases: how many there are.
        seconds: what they take together.
    """

    cases: int
    seconds: float

    @property
    def each(self) -> float:
        """Seconds a case."""
        return self.seconds / max(1, self.cases)


class Costs:
    """The table.

    Args:
        lines: cost by file, ``tests/unit/test_some.py``, and by slow test, ``tests/unit/test_some.py::test_it``.
    """

    def __init__(self, lines: Mapping[str, Cost]) -> None:
        self.lines = dict(lines)

    def is_slow(self, test: str) -> bool:
        """Whether a test has a line of its own."""
        return _test_of(test) in self.lines

    def of(self, nodeid: str) -> float:
        """What one case takes, in seconds; 0 where it was not timed."""
        found = self.lines.get(_test_of(nodeid)) or self.lines.get(_file_of(nodeid))
        return found.each if found else 0.0

    def with_measured(self, seconds: Mapping[str, float]) -> Costs:
        """The table after a run: new for the files that were run, as it was for others.

        Args:
            seconds: of each case, by its node id.
        """
        files = {_file_of(case) for case in seconds}
        lines = {name: cost for name, cost in self.lines.items() if _file_of(name) not in files}
        tests: dict[str, list[float]] = defaultdict(list)
        for case, taken in seconds.items():
            tests[_test_of(case)].append(taken)
        quick: dict[str, list[float]] = defaultdict(list)
        for test, taken_by in tests.items():
            cost = Cost(len(taken_by), sum(taken_by))
            if cost.each > LIMIT * (_STAYS if test in self.lines else 1.0):
                lines[test] = cost
            else:
                quick[_file_of(test)] += taken_by
        for file in files:
            lines[file] = Cost(len(quick[file]), sum(quick[file]))
        return Costs(lines)

    def write(self, path: Path, root: Path = ROOT) -> None:
        """Keep the table; files that are gone go. Two digits of the seconds say enough, and change seldom."""
        there = ((name, cost) for name, cost in sorted(self.lines.items()) if (root / _file_of(name)).exists())
        rows = (f"{name}\t{cost.cases}\t{_short(cost.seconds)}\n" for name, cost in there)
        path.write_text(_HEAD + "".join(rows), encoding="utf-8")


def read(path: Path = TABLE) -> Costs:
    """The table that is kept.

    Raises:
        ValueError: a line is none. The message names it.
    """
    lines: dict[str, Cost] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        if line.startswith("#"):
            continue
        try:
            name, cases, seconds = line.split("\t")
            lines[name] = Cost(int(cases), float(seconds))
        except ValueError:
            raise ValueError(f"{path.name} has the line {line!r}, which is no test, cases, seconds") from None
    return Costs(lines)


class Meter:
    """A plugin of pytest that adds up what each case takes: set-up, call and what ends it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add one phase of a case."""
        self.seconds[report.nodeid] += report.duration

    def lines(self) -> Iterable[str]:
        """The sum of each folder, and the slowest cases."""
        folders: dict[str, list[float]] = defaultdict(list)
        for case, taken in self.seconds.items():
            folders[str(Path(_file_of(case)).parent)].append(taken)
        for folder, each in sorted(folders.items(), key=lambda pair: -sum(pair[1])):
            yield f"{sum(each):7.1f} s  {len(each):5} cases  {folder}"
        for case in sorted(self.seconds, key=lambda case: -self.seconds[case])[:_SHOWN]:
            yield f"{self.seconds[case]:7.1f} s  {case}"


def _short(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.2g}"


def _file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def _test_of(nodeid: str) -> str:
    return nodeid.partition("[")[0]
