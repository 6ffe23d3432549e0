"""Runs the suite without a test file: for the command ``xamp conformance``, and for tests of the suite.

pytest does the work, isolated from other tests: it uses no configuration, conftest or cache of the working folder, no
options or plugins that the environment names, and no installed plugins.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from xamp.errors import PolicyError
from xamp.testing.lane import SKIPPED, UNDECLARED, Lane
from xamp.testing.tier import clause_of, clause_without_parameters

__all__ = ["OUTCOMES", "Listener", "Loop", "Result", "run", "run_by"]

OUTCOMES = ("passed", "failed", "known gap", "not declared", "skipped")


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of one clause on one lane.

    Attributes:
        lane: Title of the lane: the backend's name, and the device's index if one is given.
        clause: Name of the clause.
        outcome: One of :data:`OUTCOMES`.
        reason: Why, in one line; empty if the clause passed.
        seconds: How long it took.
        text: For a failure, the traceback and captured output.
    """

    lane: str
    clause: str
    outcome: str
    reason: str = ""
    seconds: float = 0.0
    text: str = ""

    @property
    def tier(self) -> str:
        """The tier's name."""
        return self.clause.partition(".")[0]


Loop = Callable[[Sequence[pytest.Item]], None]


class Listener:
    """Receives the events of a run. This base does nothing with them."""

    def begin(self, counts: dict[tuple[str, str], int]) -> None:
        """Called once, before the run, with the number of clauses by lane and tier."""

    def start(self, lane: str, clause: str) -> None:
        """Called before each clause."""

    def end(self, result: Result) -> None:
        """Called after each clause."""


def run(
    lanes: Sequence[Lane],
    clauses: Sequence[str] = (),
    listener: Listener | None = None,
    *,
    ledger: str = "",
    until: Callable[[Result], bool] | None = None,
) -> list[Result]:
    """Run the suite.

    Args:
        lanes: The lanes to run on.
        clauses: Names or globs of the clauses to run, with or without their parameters in brackets; empty: all.
        listener: Receives the events of the run.
        ledger: Known gaps, in place of the ledger that the backend's spec names.
        until: The run ends after the first result for which this returns True. None: it runs to its end.

    Returns:
        A result for each clause, in the order in which they ran.

    Raises:
        PolicyError: a name in ``clauses`` matches no clause.
        KeyboardInterrupt: the user interrupted the run.
        RuntimeError: pytest itself failed, or left clauses out.
    """
    plugin = _Plugin(lanes, clauses, listener or Listener(), ledger, until=until)
    _run(plugin, clauses)
    if len(plugin.results) != plugin.chosen and not plugin.ended:
        raise RuntimeError(f"pytest ran {len(plugin.results)} clauses of {plugin.chosen}")
    return plugin.results


def run_by(
    loop: Loop,
    lanes: Sequence[Lane],
    clauses: Sequence[str] = (),
    listener: Listener | None = None,
    *,
    ledger: str = "",
    capture: str = "fd",
) -> None:
    """Collect the clauses, and leave it to ``loop`` which of them run, and in which order.

    Args:
        loop: Gets pytest's items, in the order in which :func:`run` would run them.
        lanes: As in :func:`run`, as are ``clauses`` and ``ledger``.
        clauses: See there.
        listener: Receives the number of all clauses, and the events of those that ``loop`` runs.
        ledger: See there.
        capture: What is kept of the output of a clause: ``"fd"``: all, to be shown if it fails; ``"sys"``: what Python
            prints. What a library prints then goes out as it comes, and outlives a crash.

    Raises:
        PolicyError: as :func:`run` does, which also names the other errors.
    """
    _run(_Plugin(lanes, clauses, listener or Listener(), ledger, loop=loop), clauses, capture)


def _run(plugin: _Plugin, clauses: Sequence[str], capture: str = "fd") -> None:
    file = Path(__file__).with_name("suite.py")
    arguments = ["-p", "no:terminal", "-p", "no:cacheprovider", "--noconftest", "-c", os.devnull]
    arguments += [f"--capture={capture}"]
    arguments += ["--rootdir", str(file.parent), "--import-mode=append", str(file)]
    with _no_other_pytest():
        code = pytest.main(arguments, plugins=[plugin])
    if code == pytest.ExitCode.INTERRUPTED and not plugin.trouble:
        raise KeyboardInterrupt
    if plugin.unknown:
        raise PolicyError(
            f"run(clauses={list(clauses)!r}): no clause is called {' or '.join(plugin.unknown)}. Names are a tier's "
            "and a clause's, such as 'probe.seed' or 'scaling.*'."
        )
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise RuntimeError(f"pytest ended with {code!s}: {plugin.trouble or 'it gave no reason'}")


@contextlib.contextmanager
def _no_other_pytest() -> Iterator[None]:
    """Hide the options and plugins that the environment names for other tests."""
    with mock.patch.dict(os.environ, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1"):
        for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS"):
            os.environ.pop(name, None)
        yield


class _Plugin:
    """A pytest plugin that selects clauses and keeps their results."""

    def __init__(
        self,
        lanes: Sequence[Lane],
        clauses: Sequence[str],
        listener: Listener,
        ledger: str,
        *,
        until: Callable[[Result], bool] | None = None,
        loop: Loop | None = None,
    ) -> None:
        self._lanes = lanes
        self._ledger = ledger
        self._wanted = clauses
        self._selecting = False  # a clause itself may ask later which clauses there are
        self._listener = listener
        self._until = until
        self._loop = loop
        self._session: pytest.Session | None = None
        self._phases: list[pytest.TestReport] = []
        self._names: dict[str, tuple[str, str]] = {}
        self.results: list[Result] = []
        self.chosen = 0
        self.ended = False
        self.unknown: list[str] = []
        self.trouble = ""

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Keep the session, to end it."""
        self._session = session

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Iterator[None]:
        """Fill the module to collect. It is imported only here, so that pytest can explain the asserts in it."""
        from xamp.testing import suite

        with suite.on(self._lanes, self._ledger):
            self._selecting = bool(self._wanted)
            try:
                return (yield)
            finally:
                self._selecting = False

    def pytest_pycollect_makeitem(self, collector: pytest.Collector, name: str) -> list[pytest.Item] | None:
        """Make no items of clauses that are not wanted: there may be a thousand, and a run of one clause is short."""
        if not self._selecting or not isinstance(collector, pytest.Class) or not name.startswith("test_"):
            return None
        plain = clause_without_parameters(collector.obj, name)
        return None if any(_may_be_wanted(plain, wanted) for wanted in self._wanted) else []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the selected clauses only."""
        names = {clause_of(item) for item in items}
        self.unknown = [wanted for wanted in self._wanted if not any(_is_wanted(name, [wanted]) for name in names)]
        items[:] = [item for item in items if not self._wanted or _is_wanted(clause_of(item), self._wanted)]
        if self.unknown:
            items.clear()
        self.chosen = len(items)
        counts: dict[tuple[str, str], int] = {}
        for item in items:
            owner: Any = item.getparent(pytest.Class)
            lane, clause = owner.obj.title, clause_of(item)
            self._names[item.nodeid] = lane, clause
            key = lane, clause.partition(".")[0]
            counts[key] = counts.get(key, 0) + 1
        self._listener.begin(counts)

    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Leave it to the loop what runs, if there is one; else pytest runs all."""
        if self._loop is None or session.testsfailed:  # where collecting failed pytest's own loop says so
            return None
        self._loop(session.items)
        return True

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Tell the listener."""
        self._phases = []
        self._listener.start(*self._names[nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the report of a phase: set-up, call, tear-down."""
        self._phases.append(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Combine the phases into one result."""
        result = _result(*self._names[nodeid], self._phases)
        self.results.append(result)
        self._listener.end(result)
        if self._until is not None and self._session is not None and self._until(result):
            self.ended = True
            self._session.shouldfail = "the caller has seen enough"

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep the reason why collecting failed."""
        if report.failed:
            self.trouble = report.longreprtext

    def pytest_internalerror(self, excrepr: object) -> None:
        """Keep what went wrong inside pytest."""
        self.trouble = str(excrepr)


def _may_be_wanted(plain: str, wanted: str) -> bool:
    """Return whether a clause called ``plain``, with some parameters or none, may be ``wanted``."""
    return fnmatch.fnmatchcase(plain, wanted) or wanted.startswith(f"{plain}[")


def _is_wanted(clause: str, wanted: Iterable[str]) -> bool:
    plain = clause.partition("[")[0]
    return any(clause == name or fnmatch.fnmatchcase(plain, name) for name in wanted)


def _result(lane: str, clause: str, phases: Sequence[pytest.TestReport]) -> Result:
    seconds = sum(phase.duration for phase in phases)
    for phase in phases:
        if phase.failed:
            return Result(lane, clause, "failed", _headline(phase), seconds, "\n".join(_text(phase)))
    for phase in phases:
        if phase.skipped:
            return Result(lane, clause, *_excuse(phase), seconds)
    return Result(lane, clause, "passed", "", seconds)


def _excuse(phase: pytest.TestReport) -> tuple[str, str]:
    if hasattr(phase, "wasxfail"):
        return "known gap", phase.wasxfail
    reason = phase.longrepr[2] if isinstance(phase.longrepr, tuple) else str(phase.longrepr)
    reason = reason.removeprefix("Skipped: ")
    if reason.startswith(UNDECLARED):
        return "not declared", reason.removeprefix(UNDECLARED)
    return "skipped", reason.removeprefix(SKIPPED)


def _headline(phase: pytest.TestReport) -> str:
    crash = getattr(phase.longrepr, "reprcrash", None)
    message = phase.longreprtext if crash is None else crash.message
    message = message.replace("[XPASS(strict)]", "in the ledger as a known gap, and passes; take it out:")
    return next((line.strip() for line in message.splitlines() if line.strip()), "failed")


def _text(phase: pytest.TestReport) -> Iterator[str]:
    yield re.sub(r"\x1b\[[0-9;]*m", "", phase.longreprtext)
    for title, content in phase.sections:
        yield f"--- {title}\n{content}"
