"""ci/versions.sh newest: a torch that is out and not in the table is tried, and what fails on it is told."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from gathering import cases
from version_standins import call, calls, interpreter

from ci.devices import load
from ci.nightly.parts import parts
from ci.versions.newest import UNTESTED_FAILS, newer

LAST = load().releases[-1]
PASSES = "def test_a(): pass\n"
FAILS = f"{PASSES}def test_b(): assert 'this' == 'that'\n"
NEWER = [
    (["2.14.1", "2.15.0"], ""),
    (["2.15.0+cpu"], ""),
    (["2.15.0rc3"], ""),
    (["2.14.1", "2.15.1"], "2.15.1"),
    (["2.16.0.dev20270101+cpu", "2.15.1"], "2.16.0.dev20270101"),
    (["2.16.0rc1", "2.16.0", "2.15.0"], "2.16.0"),
    (["2.15.0.post1"], "2.15.0.post1"),
]


@pytest.fixture
def tests(tmp_path: Path) -> Path:
    """The file of tests that run in place of those of the project."""
    (tmp_path / "tests").mkdir()
    return tmp_path / "tests" / "test_some.py"


def tried(tmp_path: Path, offered: str) -> subprocess.CompletedProcess[str]:
    """The command, on a machine whose index has these versions of torch."""
    interpreter(tmp_path / "python", LAST.python)
    told = {"STANDIN_TESTS": str(tmp_path / "tests"), "STANDIN_OFFERED": offered}
    told[f"PYTHON{LAST.python.replace('.', '_')}"] = str(tmp_path / "python")
    return call("newest", "--jobs", "1", "--out", str(tmp_path / "out"), folder=tmp_path / "made", **told)


def test_which_is_newer() -> None:
    with cases() as case:
        for versions, found in NEWER:
            with case(", ".join(versions)):
                assert newer(versions, "2.15.0") == found


def test_nothing_to_do(tmp_path: Path) -> None:
    done = tried(tmp_path, f"{LAST.torch}+cpu, 2.14.1")
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        f"torch {LAST.torch} is in ci/devices.toml, and the index has none that is newer: nothing to do\n"
    )
    assert not (tmp_path / "made" / "newest").exists()


def test_what_fails_is_told(tests: Path, tmp_path: Path) -> None:
    tests.write_text(FAILS)
    done = tried(tmp_path, f"2.99.0rc1, {LAST.torch}")
    assert done.returncode == UNTESTED_FAILS == 4
    end = done.stdout.splitlines()[-2:]
    assert end[0].startswith("test_some.py::test_b: ")
    assert end[1].startswith("torch 2.99.0rc1: 1 tests fail, 1 pass; ")
    found = json.loads((tmp_path / "out" / "newest.json").read_text())
    assert [failure["test"] for failure in found["failures"]] == ["test_some.py::test_b"]
    assert (found["torch"], found["python"], found["counts"]) == ("2.99.0rc1", LAST.python, {"passed": 1, "failed": 1})
    asked, *_ = (line for line in calls(tmp_path / "python") if "index" in line)
    assert "--pre" in asked


def test_each_release_is_tried_once(tests: Path, tmp_path: Path) -> None:
    told = "torch 2.99.0rc1: all tests of the quick tier pass, 1"
    tests.write_text(PASSES)
    done = tried(tmp_path, "2.99.0rc1")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, told)
    tests.write_text(FAILS)  # which is not run
    done = tried(tmp_path, "2.99.0rc1")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, told)
    done = tried(tmp_path, "2.99.0")
    assert done.returncode == UNTESTED_FAILS
    assert (tmp_path / "made" / "newest" / "bin" / "torch").read_text() == "2.99.0\n"
    assert [line for line in calls(tmp_path / "python") if "index" in line][1:] != []


def test_what_cannot_be_tried_is_an_error(tests: Path, tmp_path: Path) -> None:
    done = tried(tmp_path, "")
    assert done.returncode == 1
    assert "pip does not say which versions of torch the index has: no index answers" in done.stderr
    tests.write_text("import\n")
    done = tried(tmp_path, "2.99.0")
    assert done.returncode == UNTESTED_FAILS  # a file of tests that cannot be read is one that fails
    tests.write_text("")
    done = tried(tmp_path, "2.99.1")
    assert done.returncode == 1
    assert "torch 2.99.1: failed: there were no tests" in done.stderr


def test_the_night_does_not_fail_for_it() -> None:
    (part,) = (part for part in parts(2) if part.stage.name == "newest")
    (step,) = part.stage.steps
    assert part.stage.anew
    assert step.command == ["ci/versions.sh", "newest"]
    assert list(step.accepts) == [0, UNTESTED_FAILS]
    assert "not in ci/devices.toml yet" in step.says[UNTESTED_FAILS]
