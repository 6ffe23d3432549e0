"""What is kept of runs of mutants: results, by which a run goes on, and the tests that killed. See ci/mutants.sh."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ci.mutants.made import Mutant
from ci.mutants.run import Result

__all__ = ["Results", "read_killers", "write_killers"]


class Results:
    """What is known of mutants, in a file.

    That one survived counts while its module and the tests are the same; that a test killed it, while its module and
    the file of that test are.

    Args:
        path: the file.
        tests: folders and files of the tests that count.
    """

    def __init__(self, path: Path, tests: Sequence[str], root: Path) -> None:
        self._path, self._root = path, root
        self._found: dict[str, dict[str, Any]] = json.loads(path.read_text("utf-8")) if path.exists() else {}
        self._tests = [root / name for name in (*tests, "tests/support", "tests/conftest.py")]

    def get(self, mutant: Mutant) -> dict[str, Any] | None:
        """Return what is known of a mutant, or None."""
        found = self._found.get(mutant.identity)
        return found if found is not None and found["key"] == self._key(mutant, found["test"]) else None

    def put(self, mutant: Mutant, result: Result) -> None:
        """Keep a result, in the file too: a run that is stopped goes on from there."""
        found = {"key": self._key(mutant, result.test), "ended": result.ended, "killed": result.killed}
        found |= {"test": result.test, "seconds": round(result.seconds, 1), "tests": len(result.passed)}
        self._found[mutant.identity] = found
        self._write()

    def forget(self, mutant: Mutant) -> None:
        """Keep nothing of a mutant."""
        self._found.pop(mutant.identity, None)
        self._write()

    def _key(self, mutant: Mutant, test: str) -> str:
        tests = _hash_of(self._root / test.partition("::")[0]) if test else self._hash_of_all
        return hashlib.sha256(f"{_hash_of(self._root / mutant.file)} {tests}".encode()).hexdigest()[:16]

    @functools.cached_property
    def _hash_of_all(self) -> str:
        files = [file for path in self._tests for file in ([path] if path.suffix else sorted(path.rglob("*.py")))]
        return " ".join(map(_hash_of, files))

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(self._found, indent=1, sort_keys=True), encoding="utf-8")
        new.replace(self._path)


@functools.cache
def _hash_of(path: Path) -> str:
    """A hash of a file as it was when this process first asked; empty where there is none."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def read_killers(path: Path) -> dict[str, str]:
    """Return the test that last killed each mutant, as ``--keep`` wrote it; none where there is no such file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return dict(line.split("\t", 1) for line in lines if line)


def write_killers(mutants: Iterable[Mutant], results: Results, path: Path) -> None:
    """Write which test killed each of ``mutants``, in a line; where its result is not known, the old line stays."""
    old, new = read_killers(path), dict[str, str]()
    for mutant in mutants:
        found = results.get(mutant)
        test = old.get(mutant.identity, "") if found is None else found["test"] if found["ended"] == "failed" else ""
        if test:
            new[mutant.identity] = test
    path.write_text("".join(f"{name}\t{test}\n" for name, test in sorted(new.items())), encoding="utf-8")
