"""A plugin of pytest, ``-p ci.gpu.keep``: each test's outcome goes into the log as it ends.

A run that is cut short has all up to there on disk. Tests that are named in the file ``XAMP_GPU_DONE``, a line each,
passed in an earlier run, and are left out. Where several processes share the tests, only the first one writes.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ci.gpu.log import Log

__all__ = ["DONE", "LOG", "STAGE"]

LOG, STAGE, DONE = "XAMP_GPU_LOG", "XAMP_GPU_STAGE", "XAMP_GPU_DONE"
_TEXT = 3000  # characters of a failure's text
_worker = os.environ.get("PYTEST_XDIST_WORKER", "")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what has passed before. Every worker reads the same file, so all have the same tests."""
    path = os.environ.get(DONE)
    done = set(Path(path).read_text(encoding="utf-8").splitlines()) if path else set()
    if left := [item for item in items if item.nodeid in done]:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item.nodeid not in done]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write down how a test went. One that fails after its call, when it is torn down, is written anew as failed."""
    if not _worker and (report.when == "call" or report.outcome != "passed"):
        _write(report.nodeid, _outcome(report), report.longrepr, report.duration)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Write down a file that cannot be imported, or says that something is missing."""
    if _worker in ("", "gw0") and report.outcome != "passed":
        _write(report.nodeid, report.outcome, report.longrepr, 0.0)


def _outcome(report: pytest.TestReport) -> str:
    if hasattr(report, "wasxfail"):
        return "xfailed" if report.skipped else report.outcome
    return report.outcome


def _write(name: str, outcome: str, shown: object, seconds: float) -> None:
    reason = shown[2] if isinstance(shown, tuple) else _headline(shown)
    text = str(shown)[-_TEXT:] if outcome == "failed" else ""
    Log(Path(os.environ[LOG])).add(
        os.environ[STAGE], "test", test=name, outcome=outcome, seconds=round(seconds, 2), reason=reason, text=text
    )


def _headline(shown: object) -> str:
    crash = getattr(shown, "reprcrash", None)
    text = str(shown or "") if crash is None else crash.message
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines[0] if crash is not None else lines[-1])[:500] if lines else ""
