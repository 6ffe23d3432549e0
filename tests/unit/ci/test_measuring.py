"""Whose coverage is measured, of tests and of the processes that they start."""

from __future__ import annotations

import os
import subprocess
import sys

import coverage
import pytest

ASK = "import coverage; print(coverage.Coverage.current() is not None)"


@pytest.mark.no_cover
def test_nothing_measures_a_test_of_which_the_coverage_is_not_asked() -> None:
    """Compilers take twice their time, were it only one of several that goes on."""
    assert coverage.Coverage.current() is None


@pytest.mark.no_cover
def test_nothing_measures_what_such_a_test_starts() -> None:
    found = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True, env=os.environ)
    assert found.stdout.strip() == "False"


def test_what_another_test_starts_is_measured_as_that_test_is() -> None:
    found = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True, env=os.environ)
    assert found.stdout.strip() == str(coverage.Coverage.current() is not None)
