"""Which tests have their coverage measured, and which of the processes that they start."""

from __future__ import annotations

import subprocess
import sys

import coverage
import pytest

IS_MEASURED = "import coverage; print(coverage.Coverage.current() is not None)"


def child_is_measured() -> bool:
    found = subprocess.run([sys.executable, "-c", IS_MEASURED], capture_output=True, text=True, check=True)
    return {"True": True, "False": False}[found.stdout.strip()]


@pytest.mark.no_cover
def test_no_coverage_runs_in_a_test_marked_no_cover() -> None:
    """A worker of pytest-xdist had three; pytest-cov paused one of them."""
    assert coverage.Coverage.current() is None


@pytest.mark.no_cover
def test_no_coverage_runs_in_a_process_that_such_a_test_starts() -> None:
    assert not child_is_measured()


def test_any_other_test_is_measured_together_with_the_processes_it_starts() -> None:
    assert child_is_measured() == (coverage.Coverage.current() is not None)
