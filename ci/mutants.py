"""Runs the mutation gate: see ci/mutants.sh.

A mutation is a deliberate fault: a piece of a source file and what stands in its place, with the test that must fail on
it. They are data, in ci/mutations/**/*.toml, by source file::

    [["xamp/scaling/scale.py"]]
    name = "an update does not count as a new version"
    old = '''the text, which the file must have exactly once'''
    new = '''what stands in its place'''
    test = "tests/unit/scaling/test_step_scale.py::test_it_moves"

In place of ``test`` there may be ``equivalent``, the reason why no test can tell the two apart; or ``look``, files to
search with ``--find``. ``hangs = true`` says that the fault makes the test hang.

This process imports torch and pytest once, and no xamp. Each mutation runs in a fork of it, where an import hook gives
out the changed source. Before that, all tests run without a fault: one that fails by itself catches nothing.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import datetime
import importlib
import importlib.machinery
import importlib.util
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

tomllib: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

ROOT = Path(__file__).resolve().parent.parent
LISTS = ROOT / "ci" / "mutations"
BOUND = 0.95
CPU_LIMIT = 60
"""Seconds of CPU time after which a test counts as hanging, however busy the machine is."""
_LOOK_LIMIT = 10 * CPU_LIMIT  # for whole files

_IMPORTED = (
    *("torch", "torch.distributed", "torch.fx", "torch.nn.parallel", "torch.optim", "torch.testing", "numpy"),
    *("torch.utils.checkpoint", "torch.optim.swa_utils", "torch.amp", "_pytest.terminal", "_pytest.assertion.rewrite"),
    *("pytest", "hypothesis"),
)
_ARGUMENTS = ("-q", "-p", "no:cacheprovider", "--tb=short", f"--rootdir={ROOT}", f"--config-file={ROOT}/pyproject.toml")


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One deliberate fault; see the text of this module for the fields."""

    file: str
    name: str
    old: str
    new: str
    test: str = ""
    equivalent: str = ""
    look: Sequence[str] = ()
    hangs: bool = False

    @property
    def module(self) -> str:
        """The name of the module to change."""
        return self.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def source(self) -> str:
        """Return the changed source. Raises ValueError where the entry is not true."""
        text = (ROOT / self.file).read_text(encoding="utf-8")
        if (found := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: its old text is {found} times in {self.file}, and must be there once")
        return text.replace(self.old, self.new)


def read(paths: Iterable[Path]) -> list[Mutation]:
    """Return the mutations of the files in ``paths``."""
    found = []
    for path in paths:
        for file, entries in tomllib.loads(path.read_text(encoding="utf-8")).items():
            found += [Mutation(file, **entry) for entry in entries]
    return found


def untrue(mutations: Iterable[Mutation]) -> list[str]:
    """Return what is wrong with the list itself, one line for each."""
    problems, seen = [], set()
    for each in mutations:
        if (each.file, each.name) in seen:
            problems.append(f"{each.name}: two of {each.file} have that name")
        seen.add((each.file, each.name))
        if bool(each.test) + bool(each.equivalent) + bool(each.look) != 1:
            problems.append(f"{each.name}: must have one of test, equivalent and look")
        if each.old == each.new:
            problems.append(f"{each.name}: old and new are the same")
        try:
            each.source()
        except (ValueError, OSError) as error:
            problems.append(f"{each.name}: {error}")
    return problems


# ---------------------------------------------------------------- one run, in a fork


class _Finder:
    """Gives out a changed source when its module is imported."""

    def __init__(self, module: str, file: str, source: str) -> None:
        self._module, self._path, self._source = module, str(ROOT / file), source

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if name != self._module:
            return None
        is_package = self._path.endswith("__init__.py")
        places = [os.path.dirname(self._path)] if is_package else None
        loader = _Loader(name, self._path, self._source)
        return importlib.util.spec_from_file_location(
            name, self._path, loader=loader, submodule_search_locations=places
        )


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, source: str) -> None:
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str) -> CodeType:  # noqa: ARG002
        return compile(self._source, self.path, "exec", dont_inherit=True)


class _Recorder:
    """A plugin of pytest that notes which tests passed and which failed."""

    def __init__(self) -> None:
        self.passed: list[str] = []
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid)
        elif report.when == "call" and report.passed:
            self.passed.append(report.nodeid)


@dataclasses.dataclass
class Result:
    """How a run ended.

    Attributes:
        ended: ``"ran"``; or ``"hung"``, ``"died"``, ``"no import"``.
        code: the exit code of pytest.
        passed, failed: node ids.
        seconds: how long it took.
        output: the end of what it printed.
    """

    ended: str
    code: int = -1
    passed: Sequence[str] = ()
    failed: Sequence[str] = ()
    seconds: float = 0.0
    output: str = ""

    @property
    def caught(self) -> bool:
        """Whether a test failed, or the process died of the fault."""
        return (self.ended == "ran" and self.code == 1 and bool(self.failed)) or self.ended == "died"


def _work(mutation: Mutation | None, tests: Sequence[str], stop: bool, limit: int) -> dict[str, Any]:
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
    if mutation is not None:
        sys.meta_path.insert(0, _Finder(mutation.module, mutation.file, mutation.source()))
        try:
            importlib.import_module(mutation.module)
        except Exception as error:
            print(repr(error))
            return {"ended": "no import"}
    import pytest

    recorder = _Recorder()
    code = pytest.main([*_ARGUMENTS, *(["-x"] if stop else []), *tests], plugins=[recorder])
    return {"ended": "ran", "code": int(code), "passed": recorder.passed, "failed": recorder.failed}


@dataclasses.dataclass
class Run:
    """A fork that works on one mutation (None: on none)."""

    mutation: Mutation | None
    tests: Sequence[str]
    stop: bool = True
    limit: int = CPU_LIMIT

    def start(self) -> None:
        """Fork."""
        self._files = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._since = time.monotonic()
        sys.stdout.flush()
        self._pid = os.fork()
        if self._pid == 0:
            self._be_the_fork()

    def _be_the_fork(self) -> None:
        try:
            os.setsid()
            result, output = self._files
            for number in (1, 2):
                os.dup2(output.fileno(), number)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            json.dump(_work(self.mutation, self.tests, self.stop, self.limit), result)
            result.flush()
            sys.stdout.flush()
        finally:
            os._exit(0)

    def ended(self) -> Result | None:
        """Return the result, or None where it is not there yet."""
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        seconds = time.monotonic() - self._since
        if pid == 0 and seconds < 3 * self.limit:
            return None
        if pid == 0:
            os.killpg(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        written, printed = (_all_of(file) for file in self._files)
        output = "\n".join(printed.splitlines()[-12:])
        if pid == 0 or (os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL)):
            return Result("hung", seconds=seconds, output=output)
        if not written:
            return Result("died", seconds=seconds, output=output)
        return Result(**json.loads(written), seconds=seconds, output=output)


def _all_of(file: Any) -> str:
    file.seek(0)
    text: str = file.read()
    file.close()
    return text


def run_all(runs: Sequence[Run], workers: int) -> Iterable[tuple[Run, Result]]:
    """Run all, ``workers`` at a time; yield each with its result as it ends."""
    waiting, running = collections.deque(runs), list[Run]()
    while waiting or running:
        while waiting and len(running) < workers:
            running.append(waiting.popleft())
            running[-1].start()
        for run in list(running):
            if (result := run.ended()) is not None:
                running.remove(run)
                yield run, result
        time.sleep(0.02)


# ---------------------------------------------------------------- the gate


def prepare() -> None:
    """Import what all forks need, and nothing of xamp."""
    os.chdir(ROOT)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # none is needed, and some start threads
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support"), str(ROOT / "tests" / "conformance")]
    for name in _IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)
    assert "xamp" not in sys.modules, "its modules could not be changed"


def control(tests: Sequence[str]) -> list[str]:
    """Run ``tests`` without a fault; return those that do not pass, with what they printed."""
    ((_, result),) = run_all([Run(None, tests, stop=False, limit=30 * CPU_LIMIT)], 1)
    failed = [test for test in tests if not _passed(test, result)]
    if result.code == 4:  # one is not there, so that none was run
        alone = run_all([Run(None, [test], stop=False) for test in failed], 1)
        return [f"{run.tests[0]}\n{found.output}" for run, found in alone if not _passed(run.tests[0], found)]
    return [f"{test}\n{result.output}" for test in failed]


def _passed(test: str, result: Result) -> bool:
    def is_of(node: str) -> bool:
        return node == test or node.startswith((f"{test}[", f"{test}::"))

    return any(map(is_of, result.passed)) and not any(map(is_of, result.failed))


def gate(mutations: Sequence[Mutation], workers: int) -> int:
    """Run ``mutations``, report, and return the exit code."""
    real = [each for each in mutations if not each.equivalent]
    wrong = control(sorted({each.test for each in real}))
    for line in wrong:
        print("fails without a fault:", line)
    left: list[Mutation] = []
    by_file: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for each in mutations:
        by_file[each.file]["equivalent" if each.equivalent else "all"] += 1
    for run, result in run_all([Run(each, [each.test]) for each in real], workers):
        assert run.mutation is not None
        if result.caught or (result.ended == "hung" and run.mutation.hangs):
            by_file[run.mutation.file]["caught"] += 1
        else:
            left.append(run.mutation)
            print(f"not caught ({result.ended}, {result.code}): {run.mutation.file}: {run.mutation.name}")
            print(result.output, flush=True)
    for file, counts in sorted(by_file.items()):
        print(f"{file:40} {counts['caught']:3} of {counts['all']:3} caught, {counts['equivalent']} equivalent")
    caught, share = len(real) - len(left), 1 - len(left) / max(1, len(real))
    names = "; not caught: " + "; ".join(f"{each.file}: {each.name}" for each in left) if left else ""
    tests = f"; {len(wrong)} tests fail without a fault" if wrong else ""
    print(
        f"{caught} of {len(real)} mutations caught ({share:.1%}), {len(mutations) - len(real)} equivalent{tests}{names}"
    )
    return int(bool(wrong) or share < BOUND)


def find(mutations: Sequence[Mutation], workers: int) -> int:
    """Search a test for each entry that has ``look``, and write it into the list."""
    open_ones = [each for each in mutations if each.look]
    left = 0
    runs = [Run(each, [_path_of(found) for found in each.look], limit=_LOOK_LIMIT) for each in open_ones]
    for run, result in run_all(runs, workers):
        assert run.mutation is not None
        if result.ended == "ran" and result.failed:
            _write_test(run.mutation, result.failed[0])
            print(f"{result.seconds:4.0f} s  {run.mutation.name}: {result.failed[0]}")
        else:
            left += 1
            print(f"{result.seconds:4.0f} s  {run.mutation.name}: NOT CAUGHT ({result.ended}, {result.code})")
            print(result.output if result.ended != "ran" or result.code > 1 else "", end="\n", flush=True)
        sys.stdout.flush()
    print(f"{len(open_ones) - left} of {len(open_ones)} found")
    return int(left > 0)


def _path_of(found: str) -> str:
    """Return what ``look`` means: a path, in which ``tests/unit/`` may be left out."""
    return found if found.startswith("tests/") else f"tests/unit/{found}"


def _write_test(mutation: Mutation, test: str) -> None:
    for path in LISTS.rglob("*.toml"):
        text = path.read_text(encoding="utf-8")
        head, mark, tail = text.partition(f'[["{mutation.file}"]]\nname = {json.dumps(mutation.name)}\n')
        if mark and tail.partition("\n[[")[0].count("\nlook = ") == 1:
            tail = re.sub(r"\nlook = .*", lambda _: f"\ntest = {json.dumps(test)}", tail, count=1)
            path.write_text(head + mark + tail, encoding="utf-8")


def _seed() -> str:
    """Return what chooses the sample: the commit, so that samples differ and can be repeated; else the date."""
    done = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or datetime.date.today().isoformat()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the gate as the command line says."""
    parser = argparse.ArgumentParser(description="the mutation gate; see ci/mutants.sh")
    parser.add_argument("--sample", type=int, metavar="N", help="run N of them, chosen by --seed")
    parser.add_argument("--seed", help="any text or number; by default the commit")
    parser.add_argument("--only", metavar="NAME", help="run those whose name or file has NAME in it")
    parser.add_argument("--find", action="store_true", help="fill in the tests of entries that have `look`")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="how many run at a time (1)")
    parser.add_argument("--list", type=Path, metavar="FILE", help="another list than ci/mutations/**/*.toml")
    given = parser.parse_args(arguments)
    mutations = read([given.list] if given.list else sorted(LISTS.rglob("*.toml")))
    if problems := untrue(mutations):
        print("\n".join(problems))
        print(f"{len(problems)} entries of the list are not true; correct or remove them")
        return 1
    if given.only is not None:
        mutations = [each for each in mutations if given.only in each.name or given.only in each.file]
        if not mutations:
            print(f"no mutation has {given.only!r} in its name or file")
            return 1
        if all(each.equivalent for each in mutations):
            print("\n".join(f"{each.name}: equivalent, because {each.equivalent}" for each in mutations))
            return 0
    if given.sample is not None:
        seed = given.seed or _seed()
        real = [each for each in mutations if each.test]
        mutations = random.Random(seed).sample(real, min(given.sample, len(real)))
        print(f"a sample of {len(mutations)} of {len(real)}, --seed {seed}", flush=True)
    prepare()
    if given.find:
        return find(mutations, given.workers)
    if open_ones := [each for each in mutations if each.look]:
        print(f"{len(open_ones)} entries have no test yet, and are left out; --find searches them", flush=True)
    return gate([each for each in mutations if not each.look], given.workers)


if __name__ == "__main__":
    sys.exit(main())
