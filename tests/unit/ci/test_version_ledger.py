"""The ledger of tests that fail on some versions: what an entry means, and that a run is held to it both ways."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import version_ledger
from ci_scripts import ROOT
from gathering import cases
from version_ledger import Entry, read

from xamp.testing import Conformance

HERE = "2.11"
CONFTEST = """
from pathlib import Path
import pytest, version_ledger

def pytest_addoption(parser):
    parser.addoption("--in-part", action="store_true")

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session, config, items):
    here = Path(__file__).parent
    entries = version_ledger.read(here / "ledger.toml")
    in_part = config.getoption("--in-part")
    items += version_ledger.hold(session, items, entries, in_part=in_part, checkout=here.parent)
"""
TESTS = """
import pytest

@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("number", [1, 2])
def test_fails(level, number):
    assert False

def test_passes():
    pass
"""
ENTRY = '[[fails]]\ntest = "tests/test_some.py::{}"\n{} = ["{}"]\nwhy = "It must."\n'


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "conftest.py").write_text(CONFTEST)
    (tmp_path / "tests" / "test_some.py").write_text(TESTS)
    (tmp_path / "tests" / "test_other.py").write_text("def test_other():\n    pass\n")
    (tmp_path / "torch.py").write_text(f'__version__ = "{HERE}.0+cpu"\n')  # which takes a second less to import
    return tmp_path


def outcome(project: Path, *arguments: str, ledger: str, cwd: Path | None = None) -> tuple[dict[str, int], str]:
    """How many tests passed, failed and so on, and what a run printed."""
    (project / "tests" / "ledger.toml").write_text(ledger)
    environment = {**os.environ, "PYTHONPATH": f"{project}{os.pathsep}{ROOT / 'tests' / 'support'}"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "xdist",
        "-q",
        "-rA",
        f"--rootdir={project}",
        "-c",
        os.devnull,
        *arguments,
    ]
    done = subprocess.run(command, cwd=cwd or project, env=environment, capture_output=True, text=True, check=False)
    assert "INTERNALERROR" not in done.stdout, done.stdout
    last = done.stdout.splitlines()[-1]
    return {what: int(number) for number, what in re.findall(r"(\d+) (\w+)", last.partition(" in ")[0])}, done.stdout


ALL = ENTRY.format("test_fails*", "torch", HERE)


def test_what_it_names_must_fail(project: Path) -> None:
    found, text = outcome(project, ledger=ALL)
    assert found == {"passed": 2, "xfailed": 4}
    assert "XFAIL tests/test_some.py::test_fails[1-O1] - It must." in text


def test_what_it_does_not_name_is_not_excused(project: Path) -> None:
    found, _ = outcome(project, ledger=ENTRY.format("test_fails[*-O1]", "torch", HERE))
    assert found == {"passed": 2, "xfailed": 2, "failed": 2}


def test_what_it_names_and_passes_fails(project: Path) -> None:
    found, text = outcome(project, ledger=ALL + ENTRY.format("test_passes", "torch", HERE))
    assert found == {"passed": 1, "xfailed": 4, "failed": 1}
    assert "[XPASS(strict)] It must." in text


def test_what_hangs_is_not_run(project: Path) -> None:
    found, text = outcome(project, ledger=ALL + ENTRY.format("test_passes", "torch", HERE) + "hangs = true\n")
    assert found == {"passed": 1, "xfailed": 5}
    assert "[NOTRUN] It must." in text


def test_elsewhere_it_means_nothing(project: Path) -> None:
    for key, version in (("torch", "0.1"), ("python", "3.1"), ("torch", "2.1")):
        ledger = "".join(ENTRY.format(name, key, version) for name in ("test_fails*", "test_renamed"))
        found, _ = outcome(project, ledger=ledger)
        assert found == {"passed": 2, "failed": 4}


GONE = ALL + ENTRY.format("test_renamed", "torch", HERE)


@pytest.mark.parametrize(
    "arguments",
    [(), ("tests",), ("tests/test_some.py",), ("tests/test_other.py::test_other", "tests"), ("-n1", "--dist=loadfile")],
    ids=" ".join,
)
def test_a_test_that_is_not_there_is_told(arguments: tuple[str, ...], project: Path) -> None:
    found, text = outcome(project, *arguments, ledger=GONE)
    assert found["failed"] == 1
    assert found["xfailed"] == 4
    assert "says that tests/test_some.py::test_renamed fails here, and tests/test_some.py has no such test." in text
    assert "FAILED tests/ledger.toml::tests/test_some.py::test_renamed" in text


def test_a_file_that_is_not_there_is_told(project: Path) -> None:
    ledger = ALL + ENTRY.format("test_passes", "torch", HERE).replace("test_some", "test_moved")
    found, text = outcome(project, ledger=ledger)
    assert found == {"passed": 2, "xfailed": 4, "failed": 1}
    assert "tests/test_moved.py has no such test." in text


def test_paths_are_from_where_pytest_was_called(project: Path) -> None:
    found, _ = outcome(project, "test_some.py", ledger=GONE, cwd=project / "tests")
    assert found == {"passed": 1, "xfailed": 4, "failed": 1}


@pytest.mark.parametrize(
    ("arguments", "left"),
    [
        (("tests/test_some.py::test_passes",), {"passed": 1}),
        (("tests/test_some.py::test_fails[1-O1]",), {"xfailed": 1}),
        (("tests/test_other.py",), {"passed": 1}),
        (("-k", "passes"), {"passed": 1, "deselected": 5}),
        (("-k", "O1"), {"xfailed": 2, "deselected": 4}),
        (("--deselect=tests/test_some.py::test_fails",), {"passed": 2, "deselected": 4}),
        (("--ignore=tests/test_some.py",), {"passed": 1}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_run_of_a_part_raises_no_false_alarm(arguments: tuple[str, ...], left: dict[str, int], project: Path) -> None:
    found, _ = outcome(project, *arguments, ledger=ALL)
    assert found == left


def test_files_collected_in_part_cannot_tell(project: Path) -> None:
    for arguments in (("--in-part",), ("--lf",)):
        found, _ = outcome(project, *arguments, ledger=GONE)
        assert found == {"passed": 2, "xfailed": 4}


HOLDS = [
    ("torch", ("2.11",), "2.11.0+cu130", True),
    ("torch", ("2.11",), "2.11.1", True),
    ("torch", ("2.11",), "2.11", True),
    ("torch", ("2.11",), "2.11.0a0+git1", True),
    ("torch", ("2.1",), "2.11.0", False),
    ("torch", ("2.12", "2.13"), "2.11.0", False),
    ("torch", ("2.12", "2.11"), "2.11.0", True),
    ("python", ("3.12",), "3.12.3", True),
    ("python", ("3.1",), "3.12.3", False),
]


def test_where_it_holds() -> None:
    with cases() as case:
        for key, known, there, holds in HOLDS:
            versions = {"torch_version": "2.99.0", "python_version": "3.99.0", f"{key}_version": there}
            with case(f"{known} on {there}"):
                lists = {"torch": (), "python": (), key: known}
                entry = Entry("tests/a.py::b", "So.", lists["torch"], lists["python"])
                assert entry.holds(**versions) is holds


def test_both_versions_must_be_those() -> None:
    entry = Entry("tests/a.py::b", "So.", torch=("2.11",), python=("3.12",))
    assert entry.holds("2.11.0", "3.12.1")
    assert not entry.holds("2.11.0", "3.11.7")
    assert not entry.holds("2.13.0", "3.12.1")


def test_only_a_star_is_special() -> None:
    entry = Entry("tests/a.py::test_b[O1-(*)?]", "So.")
    assert entry.names("tests/a.py::test_b[O1-(x\ny)?]")
    assert not entry.names("tests/a.py::test_b[O1-()]")
    assert not entry.names("tests/a.py::test_b[O1-()?] more")


GOOD = 'test = "tests/a.py::b"\nwhy = "So."\ntorch = ["2.11"]\n'


WRONG = [
    (GOOD, "its tables are written"),
    ("[fails]\n" + GOOD, "its tables are written"),
    ("[[fails]]\n" + GOOD + 'reason = "x"\n', r"number 1: reason is no key of it; there are test, why, torch"),
    ("[[fails]]\n" + GOOD.replace("why", "#"), "why is missing, or no text"),
    ("[[fails]]\n" + GOOD.replace("So.", " "), "why is missing, or no text"),
    ("[[fails]]\n" + GOOD.replace("a.py", "*.py"), r"with \* after :: only"),
    ("[[fails]]\n" + GOOD.replace("::b", ""), "test is an id such as"),
    ("[[fails]]\n" + GOOD.replace('["2.11"]', '"2.11"'), r"torch is a list of versions such as \[\"2.11\"\]"),
    ("[[fails]]\n" + GOOD.replace('["2.11"]', '["<2.12"]'), "torch is a list of versions"),
    ("[[fails]]\n" + GOOD.replace("torch", "#"), "neither torch nor python says where it fails"),
    ("[[fails]]\n" + GOOD + 'hangs = "yes"\n', "hangs is true or false, and not 'yes'"),
    ("[[fails]]\n" + GOOD + "[[fails]]\n", "number 2: test is missing"),
]


def test_a_wrong_file_is_told(tmp_path: Path) -> None:
    path = tmp_path / "ledger.toml"
    with cases() as case:
        for text, told in WRONG:
            path.write_text(text)
            with case(text), pytest.raises(pytest.UsageError, match=told):
                read(path)


def test_the_projects_own_name_functions_of_files_that_are_there() -> None:
    """On any version: where none of those runs on which they hold, nothing else would see it."""
    with cases() as case:
        for entry in read():
            of_class, _, function = entry.test.partition("::")[2].partition("[")[0].rpartition("::")
            with case(entry.test):
                text = (version_ledger.LEDGER.parents[1] / entry.file).read_text(encoding="utf-8")
                if of_class:  # only the clauses stand in classes, one a device
                    assert "Conformance" in text
                    assert hasattr(Conformance, function)
                else:
                    assert re.search(rf"^def {re.escape(function)}\(", text, re.MULTILINE) is not None
                assert entry.why.endswith(".")
