"""The tests that are known to fail on some versions: ``tests/ledger.toml``, held to strictly.

A test that an entry names must fail where the entry holds. An entry that holds here and names no test of its file is a
test of its own, which fails. A run that asks for a part of the file cannot tell, and leaves that out.
"""

from __future__ import annotations

import dataclasses
import importlib
import platform
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

__all__ = ["LEDGER", "Entry", "hold", "read"]

tomllib: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

LEDGER = Path(__file__).parents[1] / "ledger.toml"
TORCH, PYTHON = str(torch.__version__), platform.python_version()


@dataclasses.dataclass(frozen=True)
class Entry:
    """A test, or several, and where they fail.

    Attributes:
        test: the id of a test as pytest prints it; after ``::`` a ``*`` stands for any text.
        why: what is the matter, in one sentence.
        torch: the versions of torch on which they fail, such as ``2.11``, which means each 2.11.x; none: on all.
        python: the same of Python.
        hangs: they do not end there, or end the process, and are not run.
    """

    test: str
    why: str
    torch: tuple[str, ...] = ()
    python: tuple[str, ...] = ()
    hangs: bool = False

    def holds(self, torch_version: str = TORCH, python_version: str = PYTHON) -> bool:
        """Whether the tests fail on these versions; by default on those that run."""
        return _is_one_of(torch_version, self.torch) and _is_one_of(python_version, self.python)

    def names(self, nodeid: str) -> bool:
        """Whether a test is among those that are meant."""
        return re.fullmatch(re.escape(self.test).replace(r"\*", ".*"), nodeid, re.DOTALL) is not None

    @property
    def file(self) -> str:
        """Where they stand, from the root of the checkout."""
        return self.test.partition("::")[0]


def read(path: Path = LEDGER) -> list[Entry]:
    """Return the entries of a file.

    Raises:
        UsageError: one of them has a key too many or too few, or a value of a wrong kind.
    """
    found = tomllib.loads(path.read_text(encoding="utf-8"))
    rows = found.pop("fails", [])
    if found or not isinstance(rows, list):
        raise pytest.UsageError(f"{path.name}: its tables are written [[fails]], and there are no others")
    return [_entry(row, f"{path.name}: [[fails]] number {place}") for place, row in enumerate(rows, 1)]


def hold(
    session: pytest.Session,
    items: Sequence[pytest.Item],
    entries: list[Entry],
    *,
    in_part: bool = False,
    checkout: Path = LEDGER.parents[1],
) -> list[pytest.Item]:
    """Mark each test that an entry names, where that holds: it must fail.

    Args:
        session: of pytest.
        items: all tests that it collected, before any is deselected.
        entries: of the ledger.
        in_part: files were collected in part, so that a test may exist and not be among ``items``.
        checkout: what the paths of entries start from.

    Returns:
        Tests that fail, for the entries that hold and name no test.
    """
    holding = [entry for entry in entries if entry.holds()]
    unused = [entry for entry in holding if not _mark(items, entry)]
    if in_part or session.config.getoption("lf", False):
        return []
    whole = [(session.config.invocation_params.dir / argument).resolve() for argument in session.config.args]
    asked = [e for e in unused if any((checkout / e.file).is_relative_to(path) for path in whole)]
    there = {item.nodeid.partition("::")[0] for item in items}  # but what --ignore names, or needs what is missing
    return [NamesNoTest.of(e, session) for e in asked if e.file in there or not (checkout / e.file).exists()]


def _mark(items: Iterable[pytest.Item], entry: Entry) -> bool:
    """Return whether there was any to mark."""
    named = [item for item in items if entry.names(item.nodeid)]
    for item in named:
        item.add_marker(pytest.mark.xfail(strict=True, reason=entry.why, run=not entry.hangs))
    return bool(named)


class NamesNoTest(pytest.Item):
    """Stands for an entry that names no test, and fails."""

    entry: Entry

    @classmethod
    def of(cls, entry: Entry, session: pytest.Session) -> NamesNoTest:
        """Make the one for ``entry``."""
        made: NamesNoTest = cls.from_parent(session, name=entry.test, nodeid=f"tests/{LEDGER.name}::{entry.test}")
        made.entry = entry
        return made

    def runtest(self) -> NoReturn:
        """Fail."""
        pytest.fail(
            f"tests/{LEDGER.name} says that {self.entry.test} fails here, and {self.entry.file} has no such test. "
            "Was it renamed? Then correct the entry. Is it gone? Then take the entry out.",
            pytrace=False,
        )

    def reportinfo(self) -> tuple[Path, int, str]:
        """Where it stands, for the report."""
        return LEDGER, 0, self.entry.test


def _is_one_of(version: str, known: tuple[str, ...]) -> bool:
    return not known or any(re.match(rf"{re.escape(each)}(?!\d)", version) for each in known)


def _entry(row: dict[str, Any], where: str) -> Entry:
    extra = set(row) - {field.name for field in dataclasses.fields(Entry)}
    _check(not extra, where, f"{', '.join(sorted(extra))} is no key of it; there are test, why, torch, python, hangs")
    for key in ("test", "why"):
        _check(isinstance(row.get(key), str) and row[key].strip(), where, f"{key} is missing, or no text")
    right: object = re.fullmatch(r"tests/[^*:]+\.py::.+", row["test"], re.DOTALL)
    _check(right, where, "test is an id such as tests/unit/test_policy.py::test_name, with * after :: only")
    lists = {key: row.get(key, []) for key in ("torch", "python")}
    for key, values in lists.items():
        right = isinstance(values, list) and all(re.fullmatch(r"\d+(\.\d+)*", str(each)) for each in values)
        _check(right, where, f'{key} is a list of versions such as ["2.11"], and not {values!r}')
    hangs = row.get("hangs", False)
    _check(isinstance(hangs, bool), where, f"hangs is true or false, and not {hangs!r}")
    _check(any(lists.values()), where, "neither torch nor python says where it fails")
    return Entry(row["test"], row["why"], tuple(lists["torch"]), tuple(lists["python"]), hangs)


def _check(right: object, where: str, what: str) -> None:
    if not right:
        raise pytest.UsageError(f"{where}: {what}")
