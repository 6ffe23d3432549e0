"""A plugin of pytest, ``-p ci.gpu.keep``: each test's outcome goes into the log as it ends.

A run that is cut short has all up to there on disk. Tests that are named in the file ``XAMP_STAGE_DONE``, a line each,
passed in an earlier run, and are left out. Where several processes share the tests, only the first one writes. A test
or a file of tests that cannot import a package which is not there has not failed: it is lacking something.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator
from pathlib import Path

import pytest

from ci.gpu.log import LACKING, Log
from ci.gpu.stage import is_there

__all__ = ["DONE", "LOG", "STAGE"]

LOG, STAGE, DONE = "XAMP_STAGE_LOG", "XAMP_STAGE_NAME", "XAMP_STAGE_DONE"
_TEXT = 3000  # characters of a failure's text
_MISSING = re.compile(r"ModuleNotFoundError: No module named '(\w+)[\w.]*'")
_worker = os.environ.get("PYTEST_XDIST_WORKER", "")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what has passed before. Every worker reads the same file, so all have the same tests."""
    path = os.environ.get(DONE)
    done = set(Path(path).read_text(encoding="utf-8").splitlines()) if path else set()
    if left := [item for item in items if item.nodeid in done]:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item.nodeid not in done]


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Let a file that lacks a package be skipped."""
    report = yield
    _excuse(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let a test that lacks a package be skipped."""
    report = yield
    _excuse(report)
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write down how a test went. One that fails after its call, when it is torn down, is written anew as failed."""
    if not _worker and (report.when == "call" or report.outcome != "passed"):
        _write(report.nodeid, _outcome(report), report.longrepr, report.duration)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Write down a file that cannot be imported, or says that something is missing."""
    if _worker in ("", "gw0") and report.outcome != "passed":
        _write(report.nodeid, report.outcome, report.longrepr, 0.0, file=True)


def _excuse(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.outcome == "failed" and (package := _missing(report.longreprtext)):
        report.outcome, report.longrepr = "skipped", (report.nodeid, 0, f"{LACKING}: {package}")


def _missing(text: str) -> str:
    """The package for want of which an import failed last; empty if that is not why."""
    names = _MISSING.findall(text)
    return names[-1] if names and names[-1] != "xamp" and not is_there(names[-1]) else ""


def _outcome(report: pytest.TestReport) -> str:
    if hasattr(report, "wasxfail"):
        return "xfailed" if report.skipped else report.outcome
    return report.outcome


def _write(name: str, outcome: str, shown: object, seconds: float, **more: bool) -> None:
    reason = shown[2].removeprefix("Skipped: ") if isinstance(shown, tuple) else _headline(shown)
    if reason.startswith(f"{LACKING}: "):
        outcome, reason = LACKING, reason.removeprefix(f"{LACKING}: ")
    text = str(shown)[-_TEXT:] if outcome == "failed" else ""
    about = {"outcome": outcome, "seconds": round(seconds, 2), "reason": reason, "text": text, **more}
    Log(Path(os.environ[LOG])).add(os.environ[STAGE], "test", test=name, **about)


def _headline(shown: object) -> str:
    crash = getattr(shown, "reprcrash", None)
    text = str(shown or "") if crash is None else crash.message
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines[0] if crash is not None else lines[-1])[:500] if lines else ""
