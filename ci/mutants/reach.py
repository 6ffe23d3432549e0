"""Which tests reach which lines, and what each costs: the map by which ``__main__`` chooses tests.

``ci/mutants.sh --map`` makes it: the tests run once with their coverage measured, each in a context of its own. It says
of each function which tests reach each of its lines; a function that changed since then is known as a whole. Where the
map knows nothing, the test files of the module's own room are taken.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import coverage
import pytest

from ci.mutants.made import Mutant, Span, spans
from ci.mutants.run import Run

__all__ = ["LIMIT", "Choice", "Reach", "make_map", "room_of"]

LIMIT = 20.0
"""Seconds of tests on one mutant. Of a line that most tests reach those that come last are left out."""

_FOLDER = "XAMP_MAP_FOLDER"
"""The variable that names the folder for what is measured, where this module is a plugin of pytest."""


@dataclasses.dataclass
class Reach:
    """The map.

    Attributes:
        tests: node ids.
        costs: seconds, one for each test.
        functions: for each file, and each function in it: a hash of its text, and the tests that reach a line of it,
            by their numbers. Lines are counted from the function's first.
        files: a hash of each test file.
    """

    tests: list[str] = dataclasses.field(default_factory=list)
    costs: list[float] = dataclasses.field(default_factory=list)
    functions: dict[str, dict[str, tuple[str, dict[int, list[int]]]]] = dataclasses.field(default_factory=dict)
    files: dict[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Reach:
        """Read what :meth:`write` wrote; an empty map where there is no such file."""
        if not path.exists():
            return cls()
        found = json.loads(path.read_text(encoding="utf-8"))
        rows = found["rows"]
        functions = {
            file: {
                name: (digest, {int(line): rows[row] for line, row in lines.items()})
                for name, (digest, lines) in named.items()
            }
            for file, named in found["functions"].items()
        }
        return cls(found["tests"], found["costs"], functions, found["files"])

    def write(self, path: Path) -> None:
        """Write the map as JSON. Most lines of a function are reached by the same tests, which stand there once."""
        rows: dict[tuple[int, ...], int] = {}
        functions = {
            file: {
                name: (digest, {line: rows.setdefault(tuple(tests), len(rows)) for line, tests in lines.items()})
                for name, (digest, lines) in named.items()
            }
            for file, named in self.functions.items()
        }
        kept = {
            "tests": self.tests,
            "costs": self.costs,
            "rows": list(rows),
            "functions": functions,
            "files": self.files,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(kept), encoding="utf-8")

    def tests_of(self, file: str, among: Iterable[Span], lines: range, limit: float) -> list[str]:
        """Return the tests that reach one of ``lines``, in the order in which to run them.

        First one case of each test function, then 3 more of each, 12 more, and so on: one with many cases is not to
        take all the time. Before others come those that reach a line of the function that few reach, for they are about
        it; then the cheapest. Within a row a file's tests stand together: a change of file costs a quarter of a second.

        Args:
            file: the path of the module below the root.
            among: the functions in which the lines are. One that has changed counts as a whole.
            lines: line numbers in the file.
            limit: seconds; those at the end that would pass this sum are left out.
        """
        numbers, rarest = set[int](), dict[int, int]()
        for span in among:
            digest, known = self.functions.get(file, {}).get(span.name, ("", {}))
            for line, tests in known.items():
                if digest != span.digest or line + span.lines.start in lines:
                    numbers.update(tests)
                for test in tests:
                    rarest[test] = min(len(tests), rarest.get(test, len(tests)))
        order = sorted(numbers, key=lambda number: (rarest[number], self.costs[number], number))
        return [self.tests[number] for number in self._within(order, limit)]

    def unknown(self, files: Iterable[str], root: Path) -> list[str]:
        """Return those of ``files``, test files, that are new, or have changed since the map was made."""
        return [file for file in files if self.files.get(file) != _digest(root / file)]

    def _within(self, order: Sequence[int], limit: float) -> list[int]:
        cases: collections.Counter[str] = collections.Counter()
        rows: dict[int, list[int]] = {}
        for number in order:
            function = self.tests[number].partition("[")[0]
            rows.setdefault((cases[function].bit_length() + 1) // 2, []).append(number)
            cases[function] += 1
        chosen, spent = list[int](), 0.0
        for _, row in sorted(rows.items()):
            taken = list[int]()
            for number in row:
                if spent + self.costs[number] <= limit or not (chosen or taken):
                    spent += self.costs[number]
                    taken.append(number)
            chosen += self._by_file(taken)
        return chosen

    def _by_file(self, row: Sequence[int]) -> list[int]:
        files: dict[str, list[int]] = {}
        for number in row:
            files.setdefault(self.tests[number].partition("::")[0], []).append(number)
        return [number for numbers in files.values() for number in numbers]


@dataclasses.dataclass(frozen=True)
class Choice:
    """Which tests to run on a mutant.

    Attributes:
        reach: the map.
        root: the root of the tree.
        killers: by identity, the test that killed it last time.
        also: by file, tests to run after those of the map or the room.
        limit: seconds of tests, as the map has them, for one mutant.
    """

    reach: Reach
    root: Path
    killers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    also: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    limit: float = LIMIT

    def run(self, mutant: Mutant, tests: Sequence[str]) -> Run:
        """Return the run of ``tests`` on a mutant."""
        text = (self.root / mutant.file).read_text(encoding="utf-8")
        return Run(tests, mutant.file, mutant.source(text), about=mutant)

    def last(self, mutant: Mutant) -> list[str]:
        """Return the test that killed it last time, or none."""
        return [self.killers[mutant.identity]] if mutant.identity in self.killers else []

    def mapped(self, mutant: Mutant) -> list[str]:
        """Return those that reach its line, else its function, else its module; none where the map knows nothing.

        After these come the files of its room that the map does not know as they are now.
        """
        module = range(10**6)
        here = [mutant.span] if mutant.span.name != "<module>" else []
        whole = spans((self.root / mutant.file).read_text(encoding="utf-8"))
        for among, lines in ((here, mutant.lines), (here, module), (whole, module)):
            if found := self.reach.tests_of(mutant.file, among, lines, self.limit):
                new = self.reach.unknown(room_of(mutant.file, self.root), self.root)
                return [*found, *new, *self.also.get(mutant.file, ())]
        return []

    def of_room(self, mutant: Mutant) -> list[str]:
        """Return the test files of its room."""
        return [*room_of(mutant.file, self.root), *self.also.get(mutant.file, ())]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def room_of(file: str, root: Path) -> list[str]:
    """Return the test files of the room of ``file``: xamp/scaling/scale.py has those in tests/unit/scaling.

    There are none where neither a folder above the module has its own tests, nor the module itself.
    """
    room = Path(file).parent.relative_to("xamp")
    while room.parts and not (root / "tests" / "unit" / room).is_dir():
        room = room.parent
    if not room.parts:
        alone = f"tests/unit/test_{Path(file).stem}.py"
        return [alone] if (root / alone).is_file() else []
    named = sorted((root / "tests" / "unit" / room).glob("test_*.py"))
    own = f"test_{Path(file).stem}"
    ordered = sorted(named, key=lambda path: (not path.stem.startswith(own), path))
    return [str(path.relative_to(root)) for path in ordered]


# ---------------------------------------------------------------- making it


def make_map(files: Sequence[str], tests: Sequence[str], root: Path, folder: Path, workers: int) -> Reach:
    """Run ``tests``, but for the slow ones and those that compile, and return what of ``files`` each reaches.

    pytest-cov would do, but then tests/conftest.py has only some cases of each test measured. The others reach the same
    lines of the module that a test is for, but not of all others. So this module is a plugin of pytest, see below.

    Raises:
        RuntimeError: tests failed, so that the map would lack what they reach.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = folder / "coveragerc"
    include = "".join(f"\n    {root / file}" for file in files)
    settings.write_text(
        f"[run]\ncore = ctrace\nparallel = true\ndata_file = {folder}/coverage\ninclude ={include}\n", encoding="utf-8"
    )
    for old in folder.glob("coverage.*"):
        old.unlink()
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-p", "hypothesispytest", "-p", "ci.mutants.reach"]
    command += ["-q", "--tb=short", "-m", "not slow", "-k", "not compil"]
    command += [f"--numprocesses={workers}", "--dist=loadfile", *tests]
    here = str(Path(__file__).resolve().parent.parent.parent)
    paths = os.pathsep.join(filter(None, (str(root), here, os.environ.get("PYTHONPATH"))))
    told = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": paths, _FOLDER: str(folder)}
    done = subprocess.run(command, cwd=root, env=os.environ | told, check=False)
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)}\nended with {done.returncode}: mend what fails, then make the map again"
        )
    times = json.loads((folder / "times.json").read_text(encoding="utf-8"))
    measured = coverage.Coverage(data_file=str(folder / "coverage"), config_file=str(settings))
    measured.combine([str(folder)])
    return _map_of(files, measured.get_data(), times, root)


def _map_of(files: Sequence[str], measured: coverage.CoverageData, times: Mapping[str, float], root: Path) -> Reach:
    reach = Reach(list(times), [round(seconds, 4) for seconds in times.values()])
    reach.files = {file: _digest(root / file) for file in {test.partition("::")[0] for test in times}}
    numbers = {test: number for number, test in enumerate(reach.tests)}
    for file in files:
        contexts = measured.contexts_by_lineno(str(root / file))
        by_line = {line: sorted(numbers[name] for name in names if name in numbers) for line, names in contexts.items()}
        reach.functions[file] = {
            span.name: (
                span.digest,
                {line - span.lines.start: by_line[line] for line in span.lines if by_line.get(line)},
            )
            for span in spans((root / file).read_text(encoding="utf-8"))
        }
    return reach


class _Measure:
    """A plugin of pytest: each test is a context of coverage, and its seconds are counted, its fixtures included."""

    def __init__(self, folder: Path, is_worker: bool) -> None:
        self._folder, self._is_worker = folder, is_worker
        self._seconds: dict[str, float] = collections.defaultdict(float)
        self._measured = coverage.Coverage(config_file=str(folder / "coveragerc"))

    def pytest_collection_finish(self) -> None:
        if self._is_worker:
            self._measured.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Iterator[None]:
        if self._is_worker:
            self._measured.switch_context(item.nodeid)
        found = yield
        if self._is_worker:
            self._measured.switch_context("")
        return found

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        if self._is_worker:
            self._measured.stop()
            self._measured.save()
        else:  # all reports come here
            (self._folder / "times.json").write_text(json.dumps(self._seconds), encoding="utf-8")


def pytest_configure(config: Any) -> None:
    """As a plugin of pytest: measure."""
    config.pluginmanager.register(_Measure(Path(os.environ[_FOLDER]), hasattr(config, "workerinput")))
