"""Writes each test's outcome into the log as it ends; those that passed in an earlier run are left out.

A plugin of pytest, ``-p ci.gpu.keep``; ``python -m ci.gpu.keep DEVICE JOBS [CLAUSE ...]`` runs the suite of clauses.
Where several processes share the tests, only the first one writes. A test or a file of tests that cannot import a
package which is not there has not failed: it is lacking something.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import sys
from collections.abc import Generator
from typing import TypeVar

import pytest

from ci.gpu.log import LACKING, add_test, done

_TEXT = 3000  # characters of a failure's text
_MISSING = re.compile(r"ModuleNotFoundError: No module named '(\w+)[\w.]*'")
_worker = os.environ.get("PYTEST_XDIST_WORKER", "")
Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what has passed before."""
    before = done()
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in before])
    items[:] = [item for item in items if item.nodeid not in before]


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Let a file that lacks a package be skipped."""
    return _excused((yield))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let a test that lacks a package be skipped."""
    return _excused((yield))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write down how a test went. One that fails after its call, when it is torn down, is written anew as failed."""
    if not _worker and (report.when == "call" or report.outcome != "passed"):
        expected = hasattr(report, "wasxfail") and report.skipped
        _write(report.nodeid, "xfailed" if expected else report.outcome, report.longrepr, report.duration)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Write down a file that cannot be imported, or says that something is missing."""
    if _worker in ("", "gw0") and report.outcome != "passed":
        _write(report.nodeid, report.outcome, report.longrepr, 0.0)


def _excused(report: Report) -> Report:
    names = _MISSING.findall(report.longreprtext) if report.outcome == "failed" else []
    if names and names[-1] != "xamp" and importlib.util.find_spec(names[-1]) is None:
        report.outcome, report.longrepr = "skipped", (report.nodeid, 0, f"{LACKING}: {names[-1]}")
    return report


def _write(name: str, outcome: str, shown: object, seconds: float) -> None:
    crash = getattr(shown, "reprcrash", None)
    lines = str(shown or "").strip().splitlines() if crash is None else crash.message.strip().splitlines()[:1]
    reason = shown[2].removeprefix("Skipped: ") if isinstance(shown, tuple) else "".join(lines[-1:])[:500]
    if reason.startswith(f"{LACKING}: "):
        outcome, reason = LACKING, reason.removeprefix(f"{LACKING}: ")
    text = str(shown)[-_TEXT:] if outcome == "failed" else ""
    add_test(name, outcome=outcome, seconds=round(seconds, 2), reason=reason, text=text)


def _suite(device: str, count: str, *wanted: str) -> int:
    """Run the conformance suite, and say how far it is; 1 if a clause failed."""
    from xamp.testing import jobs
    from xamp.testing.lane import open_lane
    from xamp.testing.run import Listener, Result, run_by
    from xamp.testing.tier import clause_of

    class Keeper(Listener):
        count = 0

        def end(self, result: Result) -> None:
            about = {"outcome": result.outcome, "seconds": round(result.seconds, 2), "reason": result.reason}
            add_test(result.clause, text=result.text[-_TEXT:], **about)
            self.count += 1
            if result.outcome == "failed" or self.count % 50 == 0:
                print(f"{self.count} clauses, {result.clause} {result.outcome}: {result.reason}", flush=True)

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # which ends the workers too
    lane, before, left = open_lane("auto", device), done(), list(wanted)
    if before:
        left = []
        run_by(lambda items: left.extend(clause_of(item) for item in items), [lane], wanted)
        left = [clause for clause in left if clause not in before]
        if not left:
            return 0
    return int(any(result.outcome == "failed" for result in jobs.run([lane], left, Keeper(), jobs=int(count))))


if __name__ == "__main__":
    sys.exit(_suite(*sys.argv[1:]))
