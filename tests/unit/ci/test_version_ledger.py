"""The ledger of tests that fail on some versions: what an entry means, and that a run is held to it both ways.

Covers: tests/support/version_ledger.py, tests/ledger.toml.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import version_ledger
from ci_scripts import ROOT
from version_ledger import read

from xamp.testing import Conformance

CONFTEST = """
from pathlib import Path
import pytest, version_ledger

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session, config, items):
    here = Path(__file__).parent
    entries = version_ledger.read(here / "ledger.toml")
    items += version_ledger.hold(session, items, entries, in_part=False, checkout=here.parent)
"""
TESTS = """
import pytest
@pytest.mark.parametrize("level", [1, 2])
def test_fails(level): assert 0
def test_passes(): pass
"""
ENTRY = '[[fails]]\ntest = "tests/test_some.py::{}"\ntorch = ["{}"]\nwhy = "It must."\n'


def outcome(project: Path, ledger: str, *words: str) -> dict[str, int]:
    """How many tests passed, failed and so on."""
    (project / "tests").mkdir(exist_ok=True)
    for name, text in {"conftest.py": CONFTEST, "test_some.py": TESTS, "ledger.toml": ledger}.items():
        (project / "tests" / name).write_text(text)
    (project / "torch.py").write_text('__version__ = "2.11.0+cpu"\n')  # which takes a second less to import
    environment = {**os.environ, "PYTHONPATH": f"{project}{os.pathsep}{ROOT / 'tests' / 'support'}"}
    command = [sys.executable, "-m", "pytest", "-q", f"--rootdir={project}", "-c", os.devnull, *words]
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)
    last = done.stdout.splitlines()[-1]
    return {what: int(number) for number, what in re.findall(r"(\d+) (\w+)", last.partition(" in ")[0])}


def test_what_it_names_must_fail_here_and_nothing_else_may(tmp_path: Path) -> None:
    known = ENTRY.format("test_fails*", "2.11")
    assert outcome(tmp_path, known) == {"passed": 1, "xfailed": 2}
    assert outcome(tmp_path, ENTRY.format("test_fails[1]", "2.11")) == {"passed": 1, "xfailed": 1, "failed": 1}
    assert outcome(tmp_path, known + ENTRY.format("test_passes", "2.11")) == {"xfailed": 2, "failed": 1}
    assert outcome(tmp_path, known + ENTRY.format("test_gone", "2.11")) == {"passed": 1, "xfailed": 2, "failed": 1}
    assert outcome(tmp_path, known, "-k", "passes") == {"passed": 1, "deselected": 2}  # a part gives no alarm


def test_the_projects_own_name_functions_of_files_that_are_there() -> None:
    """On any version: where none of those runs on which they hold, nothing else would see it."""
    for entry in read():
        of_class, _, function = entry.test.partition("::")[2].partition("[")[0].rpartition("::")
        text = (version_ledger.LEDGER.parents[1] / entry.file).read_text(encoding="utf-8")
        # only the clauses stand in classes, one a device
        assert hasattr(Conformance, function) if of_class else f"\ndef {function}(" in text, entry.test
