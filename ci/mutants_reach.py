"""Which tests reach which lines, and what each costs: the map by which ci/mutants.py chooses tests.

``ci/mutants.sh --map`` makes it: the tests run once with pytest-cov, each in a context of its own. It says of each
function of xamp which tests reach each of its lines; a function that changed since then is known as a whole. Where the
map knows nothing, the test files of the module's own room are taken.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from ci.mutants_made import Span, spans

__all__ = ["Reach", "make_map", "room_of"]

_TIMES = "XAMP_TEST_TIMES"
"""The variable that names the file for the tests' times, where this module is a plugin of pytest."""

Lines = Mapping[int, Sequence[int]]
"""The tests that reach a line, by their numbers. Lines are counted from the function's first."""


@dataclasses.dataclass
class Reach:
    """The map.

    Attributes:
        tests: node ids.
        costs: seconds, one for each test.
        functions: for each file, and each function in it (``<module>`` for what stands outside of all): a hash of its
            text, and its lines.
    """

    tests: list[str] = dataclasses.field(default_factory=list)
    costs: list[float] = dataclasses.field(default_factory=list)
    functions: dict[str, dict[str, tuple[str, dict[int, list[int]]]]] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Reach:
        """Read what :meth:`write` wrote; an empty map where there is no such file."""
        if not path.exists():
            return cls()
        found = json.loads(path.read_text(encoding="utf-8"))
        functions = {
            file: {
                name: (digest, {int(line): tests for line, tests in lines.items()})
                for name, (digest, lines) in named.items()
            }
            for file, named in found["functions"].items()
        }
        return cls(found["tests"], found["costs"], functions)

    def write(self, path: Path) -> None:
        """Write the map as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    def tests_of(self, file: str, among: Iterable[Span], lines: range, limit: float) -> list[str]:
        """Return the tests that reach one of ``lines``, in the order in which to run them.

        First one case of each test function, the cheapest functions first; then the other cases. Within each of these
        two rows a file's tests stand together, for each change of file costs a quarter of a second.

        Args:
            file: the path of the module below the root.
            among: the functions in which the lines are. One that has changed counts as a whole.
            lines: line numbers in the file.
            limit: seconds; those at the end that would pass this sum are left out.
        """
        numbers: set[int] = set()
        for span in among:
            digest, known = self.functions.get(file, {}).get(span.name, ("", {}))
            for line, tests in known.items():
                if digest != span.digest or line + span.lines.start in lines:
                    numbers.update(tests)
        return [self.tests[number] for number in self._in_order(numbers, limit)]

    def cost(self, tests: Iterable[str]) -> float:
        """Return the seconds that ``tests`` take together; those that the map does not know count 1 s."""
        costs = dict(zip(self.tests, self.costs, strict=True))
        return sum(costs.get(test, 1.0) for test in tests)

    def _in_order(self, numbers: Iterable[int], limit: float) -> list[int]:
        cheap = sorted(numbers, key=lambda number: (self.costs[number], number))
        seen, first, rest, spent = set(), [], [], 0.0
        for number in cheap:
            function = self.tests[number].partition("[")[0]
            (rest if function in seen else first).append(number)
            seen.add(function)
        chosen: list[list[int]] = [[], []]
        for place, row in enumerate((first, rest)):
            for number in row:
                spent += self.costs[number]
                if spent > limit and chosen[0]:
                    break
                chosen[place].append(number)
        return [number for row in chosen for number in self._by_file(row)]

    def _by_file(self, row: Sequence[int]) -> list[int]:
        files: dict[str, list[int]] = {}
        for number in row:
            files.setdefault(self.tests[number].partition("::")[0], []).append(number)
        return [number for numbers in files.values() for number in numbers]


def room_of(file: str, root: Path) -> list[str]:
    """Return the test files of the room of ``file``: xamp/scaling/scale.py has those in tests/unit/scaling."""
    room = Path(file).parent.relative_to("xamp")
    while room.parts and not (root / "tests" / "unit" / room).is_dir():
        room = room.parent
    if not room.parts:
        return [f"tests/unit/test_{Path(file).stem}.py"]
    named = sorted((root / "tests" / "unit" / room).glob("test_*.py"))
    own = f"test_{Path(file).stem}"
    ordered = sorted(named, key=lambda path: (not path.stem.startswith(own), path))
    return [str(path.relative_to(root)) for path in ordered]


# ---------------------------------------------------------------- making it


def make_map(files: Sequence[str], tests: Sequence[str], root: Path, folder: Path, workers: int) -> Reach:
    """Run ``tests`` and return what of ``files`` each reaches. What no_cover marks is not run.

    Raises:
        RuntimeError: tests failed, so that the map would lack what they reach.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings, data, times = folder / "coveragerc", folder / "coverage", folder / "times.json"
    include = "".join(f"\n    {root / file}" for file in files)
    settings.write_text(f"[run]\nparallel = true\ndata_file = {data}\ninclude ={include}\n", encoding="utf-8")
    for old in folder.glob("coverage*"):
        if old != settings:
            old.unlink()
    command = [sys.executable, "-m", "pytest", "-p", "pytest_cov", "-p", "xdist", "-p", "hypothesispytest"]
    command += ["-p", "ci.mutants_reach", f"--cov-config={settings}", "--cov", "--cov-context=test", "--cov-report="]
    command += ["-m", "not no_cover", "-q", "--tb=short", f"--numprocesses={workers}", "--dist=loadfile", *tests]
    paths = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    told = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": paths, _TIMES: str(times)}
    done = subprocess.run(command, cwd=root, env=os.environ | told, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\nended with {done.returncode}: mend what fails, then make the map again")
    return _map_of(files, data, json.loads(times.read_text(encoding="utf-8")), root)


def _map_of(files: Sequence[str], data: Path, times: Mapping[str, float], root: Path) -> Reach:
    import coverage

    reach = Reach(list(times), [round(seconds, 4) for seconds in times.values()])
    numbers = {test: number for number, test in enumerate(reach.tests)}
    measured = coverage.CoverageData(str(data))
    measured.read()
    for file in files:
        contexts = measured.contexts_by_lineno(str(root / file))
        by_line: dict[int, list[int]] = {}
        for line, names in contexts.items():
            found = {numbers[test] for name in names if (test := name.rpartition("|")[0]) in numbers}
            if found:
                by_line[line] = sorted(found)
        of_file: dict[str, tuple[str, dict[int, list[int]]]] = {}
        for span in spans((root / file).read_text(encoding="utf-8")):
            own = {line - span.lines.start: by_line[line] for line in span.lines if line in by_line}
            of_file[span.name] = span.digest, own
        reach.functions[file] = of_file
    return reach


_seconds: dict[str, float] = collections.defaultdict(float)


def pytest_runtest_logreport(report: Any) -> None:
    """As a plugin of pytest: count what a test takes, its fixtures included."""
    _seconds[report.nodeid] += report.duration


def pytest_sessionfinish(session: Any) -> None:
    """As a plugin of pytest: write the times, in the process that all reports come to."""
    if not hasattr(session.config, "workerinput"):
        Path(os.environ[_TIMES]).write_text(json.dumps(_seconds), encoding="utf-8")
