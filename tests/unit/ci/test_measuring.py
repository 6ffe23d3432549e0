"""Which run measures coverage; which tests have theirs measured then, and which of the processes that they start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import coverage
import pytest
from ci_scripts import ROOT

from ci.devices import DATA

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


def given_to_pytest(folder: Path, *words: str) -> list[str]:
    """What a script of ``ci/`` calls pytest with."""
    stand_in = folder / "python"
    stand_in.write_text('#!/bin/sh\n[ "$2" = compileall ] || printf "<%s>\\n" "$@"\n', encoding="utf-8")
    stand_in.chmod(0o755)
    settings = {**os.environ, "XAMP_NO_VENV": "1", "PYTHON": str(stand_in)}
    command: list[str | Path] = [ROOT / "ci" / words[0], *words[1:]]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, check=True)
    found = [line[1:-1] for line in done.stdout.splitlines() if line.startswith("<")]
    assert found[:2] == ["-m", "pytest"]
    return found[2:]


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ((), ("--tier=usual",)),
        (("--quick", "-x"), ("--tier=quick", "-x")),
        (("--slow",), ("--tier=slow",)),
        (("--all", "tests/unit"), ("--all", "tests/unit")),
        (("-k", "scale"), ("-k", "scale")),
    ],
    ids=str,
)
def test_a_run_of_the_tests_measures_none(words: tuple[str, ...], given: tuple[str, ...], tmp_path: Path) -> None:
    found = given_to_pytest(tmp_path, "test.sh", *words)
    assert [word for word in found if word.startswith("--cov")] == []
    assert set(given) <= set(found)


def test_ci_does_not_call_it() -> None:
    pipeline = [path.read_text(encoding="utf-8") for path in (ROOT / ".github").rglob("*.yml")]
    assert "coverage" not in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "--cov" not in "".join(pipeline) + DATA.read_text(encoding="utf-8")
