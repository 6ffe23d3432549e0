"""ci/versions.sh: environments of releases of torch, and what runs in them. Small programs pass for their Pythons."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from ci_scripts import ROOT
from version_standins import call, calls, environment, interpreter

from ci.devices import load, pins
from ci.nightly.parts import of_releases, parts
from ci.versions import environments, table
from ci.versions.environments import Environment, NotMade, make
from ci.versions.interpreters import NoInterpreter, find

OLDEST, NEWEST = load().whole[0], load().whole[-1]
TESTS = """
import pytest

def test_a(): pass

def test_b(): pytest.skip("not here")

@pytest.mark.xfail
def test_c(): assert False
"""


def link(folder: Path, there: Environment, **versions: str) -> Path:
    """An environment of the user's own, which a link names."""
    found = {"version": there.python, "torch": there.torch, **versions}
    own = environment(folder / f"own-{there.torch}", found["version"], found["torch"])
    (folder / there.path.name).symlink_to(own)
    return own


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    """An environment that is not there yet, and a Python for it."""
    monkeypatch.setenv("XAMP_VERSIONS", str(tmp_path / "made"))
    monkeypatch.setenv("PYTHON3_10", str(interpreter(tmp_path / "python", "3.10")))
    return Environment("2.7.1", "3.10")


def installed(tmp_path: Path) -> list[str]:
    return [line for line in calls(tmp_path / "python") if line.startswith("-m pip install")]


# ---------------------------------------------------------------- a Python of a version


def test_each_that_may_be_one_is_asked(tmp_path: Path) -> None:
    (tmp_path / "shims").mkdir()
    (tmp_path / "shims" / "python3.10").write_text("#!/bin/sh\necho 'pyenv: 3.10 is not selected' >&2\nexit 127\n")
    (tmp_path / "shims" / "python3.10").chmod(0o755)
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "python3.10").write_text("#!/bin/sh\necho 'no module named ensurepip' >&2\nexit 1\n")
    (tmp_path / "bare" / "python3.10").chmod(0o755)
    plain = interpreter(tmp_path / "plain" / "python3", "3.10")
    path = os.pathsep.join(str(tmp_path / name) for name in ("shims", "bare", "plain"))
    environ: Mapping[str, str] = {"PATH": path, "PYENV_ROOT": str(tmp_path / "pyenv")}
    assert find("3.10", environ) == str(plain)
    ours = interpreter(tmp_path / "pyenv" / "versions" / "3.10.7" / "bin" / "python", "3.10")
    assert find("3.10", environ) == str(ours)
    with pytest.raises(NoInterpreter, match=r"no Python 3\.1 here; name one: PYTHON3_1=/path/to/python3\.1"):
        find("3.1", environ)
    this = "{}.{}".format(*sys.version_info[:2])
    assert find(this, {"PYENV_ROOT": str(tmp_path / "nowhere")}) == sys.executable


def test_a_python_that_is_named(tmp_path: Path) -> None:
    named = interpreter(tmp_path / "mine", "3.10")
    assert find("3.10", {"PYTHON3_10": str(named)}) == str(named)
    with pytest.raises(NoInterpreter, match=r"PYTHON3_12=.*/mine: it must be a Python 3\.12, and is 3\.10"):
        find("3.12", {"PYTHON3_12": str(named)})
    with pytest.raises(NoInterpreter, match="and is not there, or without the modules venv and ensurepip"):
        find("3.12", {"PYTHON3_12": str(tmp_path / "nowhere")})


# ---------------------------------------------------------------- environments


def test_it_is_made_once(there: Environment, tmp_path: Path) -> None:
    assert there.why_not() == "it is not there"
    make(there)
    (words,) = installed(tmp_path)
    assert f"--constraint {there.path}/pins.txt torch==2.7.1 " in words
    assert all(name in words for name in ("hypothesis", "pytest-xdist", "scikit-learn", "rich"))
    assert (there.path / "pins.txt").read_text() == pins("2.7.1")
    assert there.why_not() == ""
    make(there)
    assert len(installed(tmp_path)) == 1


def test_it_is_made_anew_where_other_things_go_in(
    there: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(there)
    (there.path / "old").touch()
    monkeypatch.setattr(environments, "pins", lambda torch: f"{pins(torch)}numpy==0\n")
    assert "has changed since it was made" in there.why_not()
    make(there)
    assert len(installed(tmp_path)) == 2
    assert not (there.path / "old").exists()
    (there.path / "bin" / "python").unlink()
    assert there.why_not() == "it does not work any more"


def test_one_that_was_cut_short_is_made_anew(
    there: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_REFUSED", "torch==2.7.1")
    with pytest.raises(NotMade, match=r"-m pip install \.\.\. ended with code 1, see above"):
        make(there)
    assert there.why_not().endswith("or it was cut short")
    monkeypatch.delenv("STANDIN_REFUSED")
    make(there)
    assert there.why_not() == ""


def test_pins_that_do_not_fit_count_only_for_what_is_tested(
    there: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_REFUSED", "--constraint")
    with pytest.raises(NotMade):
        make(there)
    make(Environment("2.99.0", "3.10", name="newest", loose=True))
    assert [" --constraint " in words for words in installed(tmp_path)] == [True, True, False]


def test_what_it_did_not_make_is_left_alone(there: Environment) -> None:
    there.path.mkdir(parents=True)
    (there.path / "mine").touch()
    with pytest.raises(NotMade, match=r"it was not made by ci/versions\.sh\. Remove it, or name another folder"):
        make(there)
    assert (there.path / "mine").exists()


def test_a_link_is_used_as_it_is(there: Environment, tmp_path: Path) -> None:
    there.path.parent.mkdir()
    own = link(there.path.parent, there, torch="2.8.0")
    with pytest.raises(NotMade, match=r"what it links to has Python and torch 3\.10 2\.8\.0\. Remove it"):
        make(there)
    (own / "bin" / "torch").write_text("2.7.1\n")
    make(there)
    assert installed(tmp_path) == [] == [line for line in calls(own / "bin" / "python") if " pip " in line]


def test_what_cannot_be_made_is_told_and_the_others_are_made(tmp_path: Path) -> None:
    python = str(interpreter(tmp_path / "python", "3.12"))
    nowhere = str(tmp_path / "nowhere")
    done = call("make", "2.7.1", "2.11.0", folder=tmp_path / "made", PYTHON3_10=nowhere, PYTHON3_12=python)
    assert done.returncode == 1
    assert f"torch 2.7.1 is left out: PYTHON3_10={nowhere}: it must be a Python 3.10" in done.stderr
    assert (tmp_path / "made" / "torch-2.11.0-python-3.12" / "bin" / "torch").read_text() == "2.11.0\n"
    listed = call("list", folder=tmp_path / "made").stdout.splitlines()
    assert listed[0] == "torch 2.7.1, Python 3.10: it is not there"
    assert listed[2] == f"torch 2.11.0, Python 3.12: {tmp_path}/made/torch-2.11.0-python-3.12"
    assert len(listed) == len(load().whole)


def test_wrong_use(tmp_path: Path) -> None:
    for words, text in (
        ([], "name one of make, run, smoke, list, newest"),
        (["mak"], "name one of make"),
        (["make", "2.9"], "'2.9' is no release of ci/devices.toml: there are 2.7.1, "),
        (["run", "2.9"], "'2.9' is no release on which all tests run: there are 2.7.1, "),
    ):
        done = call(*words, folder=tmp_path)
        assert (done.returncode, text in done.stderr) == (2, True), done.stderr


# ---------------------------------------------------------------- what runs in them


def test_all_that_runs_on_a_release(tmp_path: Path) -> None:
    own = link(tmp_path, Environment(OLDEST.torch, OLDEST.python))
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_some.py").write_text(TESTS)
    words = ["run", OLDEST.torch, "--quick", "--out", str(tmp_path / "out"), "--jobs", "1"]
    done = call(*words, folder=tmp_path, STANDIN_TESTS=str(tmp_path / "tests"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out" / f"versions-{OLDEST.torch}-quick.json").read_text())
    assert (found["torch"], found["python"], found["outcome"]) == (OLDEST.torch, OLDEST.python, "passed")
    assert found["counts"] == {"passed": 1, "skipped": 1, "xfailed": 1}
    heads, line = (done.stdout.partition("releases of torch\n")[2].splitlines())[:2]
    assert heads.split() == list(table.HEADS[:-1])
    assert line.split()[:7] == [OLDEST.torch, "passed", OLDEST.python, "1", "1", "1", "0"]
    tests, ranks = (words for words in calls(own / "bin" / "python") if words.startswith("-m pytest"))
    assert "--device=cpu --tier=quick tests/unit tests/conformance" in tests
    assert "tests/distributed/" in ranks
    assert any(words.strip() == "examples/demo.py" for words in calls(own / "bin" / "python"))
    assert "left torch" in done.stdout


def test_a_release_that_cannot_be_had_is_left_out(tmp_path: Path) -> None:
    words = ["run", OLDEST.torch, "--quick", "--out", str(tmp_path / "out")]
    done = call(*words, folder=tmp_path, PYTHON3_10=str(tmp_path / "nowhere"))
    assert done.returncode == 0
    assert f"versions-{OLDEST.torch}-quick: left out after 0 s: PYTHON3_10=" in done.stdout


def test_nothing_runs_where_no_environment_is_made(tmp_path: Path) -> None:
    link(tmp_path, Environment(OLDEST.torch, OLDEST.python), torch="2.8.0")
    python = str(interpreter(tmp_path / "python", OLDEST.python))
    words = ["run", OLDEST.torch, "--quick", "--out", str(tmp_path / "out")]
    done = call(*words, folder=tmp_path, PYTHON3_10=python)
    assert done.returncode == 1
    assert "failed after" in done.stdout
    assert "make ended with code 1\n" in done.stdout
    assert not any("pytest" in line for line in calls(tmp_path / f"own-{OLDEST.torch}" / "bin" / "python"))


def test_the_smoke_is_of_the_oldest_and_the_newest_that_are_there(tmp_path: Path) -> None:
    done = call("smoke", folder=tmp_path)
    assert done.returncode == 0
    for release in (OLDEST, NEWEST):
        text = f"== torch {release.torch} is left out, it is not there: ci/versions.sh make {release.torch}\n"
        assert text in done.stdout
    own = link(tmp_path, Environment(NEWEST.torch, NEWEST.python))
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_some.py").write_text(TESTS)
    done = call("smoke", folder=tmp_path, STANDIN_TESTS=str(tmp_path / "tests"))
    assert (done.returncode, f"smoke-{NEWEST.torch}: passed" in done.stdout) == (0, True), done.stdout + done.stderr
    (words,) = (line for line in calls(own / "bin" / "python") if "pytest" in line)
    named = [word for word in words.split() if word.startswith("tests/")]
    for name in named:
        file, _, test = name.partition("::")
        assert (ROOT / file).is_file()
        assert not test or f"def {test.rpartition('::')[2]}(" in _text_of(file)
    (tmp_path / "tests" / "test_some.py").write_text("def test_a(): assert 0\n")
    assert call("smoke", folder=tmp_path, STANDIN_TESTS=str(tmp_path / "tests")).returncode == 1


def _text_of(file: str) -> str:
    """What may define a test of a file: the clauses stand in xamp/testing."""
    paths = [ROOT / file, *sorted((ROOT / "xamp" / "testing").glob("*.py"))]
    return "\n".join(path.read_text(encoding="utf-8") for path in paths)


def test_the_table_adds_up_outcomes() -> None:
    counts = {"passed": 5, "skipped": 1, "not declared": 2, "lacking": 3, "xfailed": 4, "known gap": 1, "failed": 7}
    about = {"outcome": "failed", "seconds": 9, "reason": "7 failed"}
    found = [
        {**about, "torch": "2.7.1", "python": "3.10", "counts": counts},
        {**about, "torch": "2.8.0", "python": "3.13", "counts": {}, "outcome": "left out", "reason": "no Python"},
    ]
    assert table.rows(found) == [
        ("2.7.1", "failed", "3.10", "5", "6", "5", "7", "9", "7 failed"),
        ("2.8.0", "left out", "3.13", "", "", "", "", "9", "no Python"),
    ]


def test_each_release_has_its_part_and_its_job() -> None:
    names = [f"versions-{release.torch}" for release in load().whole]
    found = [part for part in parts(2) if part.about]
    assert [part.stage.name for part in found] == names
    assert [part.stage.name for part in of_releases(2)] == names
    jobs = {job.name: job for job in load().jobs}
    for part in found:
        job = jobs[part.stage.name]
        assert (job.torch, job.python, job.nightly) == (part.about["torch"], part.about["python"], True)
        assert job.run == f"ci/nightly.sh {job.name}"
        assert part.stage.limit <= 3600
    assert jobs["newest"].nightly


def test_ci_run_ends_with_the_tests() -> None:
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert lines[-2:] == ["ci/test.sh --quick </dev/null", "ci/test.sh --slow </dev/null"]
    assert any(line.endswith("&& ci/versions.sh smoke") for line in lines)
