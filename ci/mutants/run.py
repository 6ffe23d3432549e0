"""Runs tests on a mutant, in a fork of this process and a copy of the tree. ``__main__`` chooses which.

This process imports torch and pytest once, and no xamp. Each run is a fork that has a copy of the tree for itself, with
the mutant's file in it: so tests find it also in the interpreters that they start. The checkout is never changed.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import importlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ci.tree import files

__all__ = ["CPU_LIMIT", "Result", "Run", "Trees", "prepare", "run_all"]

CPU_LIMIT = 40
"""Seconds of computing after which a test counts as hanging; of clock time three times as many."""

_IMPORTED = (
    *("torch", "torch.distributed", "torch.fx", "torch.nn.parallel", "torch.optim", "torch.testing", "numpy"),
    *("torch.utils.checkpoint", "torch.optim.swa_utils", "torch.amp", "_pytest.terminal", "_pytest.assertion.rewrite"),
    *("pytest", "hypothesis"),
)
_PLUGINS = ("-p", "hypothesispytest", "-p", "no:cacheprovider")


class Trees:
    """Copies of the tree, one for each of the processes that run at a time.

    Use it as a context manager, which removes them at the end.
    """

    def __init__(self, root: Path, workers: int) -> None:
        self._root, self._workers = root, workers

    def __enter__(self) -> list[Path]:
        self._folder = Path(tempfile.mkdtemp(prefix="xamp-mutants-"))
        try:
            return self._copies()
        except BaseException:
            self.__exit__()
            raise

    def _copies(self) -> list[Path]:
        first = self._folder / "0"
        for name in files(self._root):
            (first / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(self._root / name, first / name, follow_symlinks=False)
        subprocess.run([sys.executable, "-m", "compileall", "-qq", "xamp", "backends"], cwd=first, check=False)
        trees = [first, *(self._folder / str(number) for number in range(1, self._workers))]
        for tree in trees[1:]:
            shutil.copytree(first, tree, symlinks=True)
        return trees

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


@dataclasses.dataclass
class Result:
    """How a run ended.

    Attributes:
        ended: ``passed``, ``failed``; ``no import`` (of the module); ``time`` (a test took too long), ``died``;
            ``not run`` (pytest found none of the tests, or not all).
        test: the test that failed, took too long or died.
        passed: the tests that passed.
        seconds: how long it took.
        output: the end of what it printed.
    """

    ended: str
    test: str = ""
    passed: Sequence[str] = ()
    seconds: float = 0.0
    output: str = ""

    @property
    def killed(self) -> bool:
        """Whether something noticed the fault."""
        return self.ended in {"failed", "no import", "time", "died"}


class _Watch:
    """A plugin of pytest: writes down how far the tests have come, and gives each its time."""

    def __init__(self, notes: Any) -> None:
        self._notes = notes

    def _note(self, kind: str, what: str) -> None:
        self._notes.write(f"{kind} {what}\n")
        self._notes.flush()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._note("start", nodeid)
        used = resource.getrusage(resource.RUSAGE_SELF)
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + CPU_LIMIT, hard))

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self._note("failed", report.nodeid)
        elif report.when == "call" and report.passed:
            self._note("passed", report.nodeid)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._note("ended", str(int(exitstatus)))


@dataclasses.dataclass
class Run:
    """A fork that runs tests.

    Attributes:
        tests: node ids or files, in this order.
        file: the path of the file that has a fault, below the root; empty: none.
        source: what stands in it.
        stop: end at the first failure.
        about: whatever the caller wants to find again.
    """

    tests: Sequence[str]
    file: str = ""
    source: str = ""
    stop: bool = True
    about: Any = None

    def start(self, tree: Path) -> None:
        """Fork, with the fault in ``tree``, which nobody else uses until this has ended."""
        self.tree = tree
        self._notes = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._printed = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._since = self._heard = time.monotonic()
        self._size = 0
        if self.file:
            self._before = tree / ".before"
            shutil.move(tree / self.file, self._before)
            (tree / self.file).write_text(self.source, encoding="utf-8")
            _forget_compiled(tree / self.file)
        sys.stdout.flush()
        self._pid = os.fork()
        if self._pid == 0:
            self._be_the_fork()

    def _be_the_fork(self) -> None:
        try:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            for number in (1, 2):
                os.dup2(self._printed.fileno(), number)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            self._work()
            sys.stdout.flush()
        finally:
            os._exit(0)

    def _work(self) -> None:
        tree = str(self.tree)
        os.chdir(tree)
        os.environ["PYTHONPATH"] = tree
        sys.path[:0] = [tree, f"{tree}/tests/support", f"{tree}/tests/conformance"]
        for name in [name for name in sys.modules if name.partition(".")[0] == "ci"]:
            del sys.modules[name]
        if self.file:
            try:
                importlib.import_module(self.file.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
            except Exception as error:
                print(repr(error))
                print("no import", file=self._notes, flush=True)
                return
        import pytest

        arguments = [*_PLUGINS, "-q", "--tb=short", f"--rootdir={tree}", f"--config-file={tree}/pyproject.toml"]
        pytest.main([*arguments, *(["-x"] if self.stop else []), *self.tests], plugins=[_Watch(self._notes)])

    def abandon(self) -> None:
        """End it without a result."""
        self._kill(waits=True)

    def _kill(self, *, waits: bool) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)  # what the tests started, too
        if waits:
            os.waitpid(self._pid, 0)

    def ended(self) -> Result | None:
        """Return the result, or None where it is not there yet."""
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        now, size = time.monotonic(), os.fstat(self._notes.fileno()).st_size
        if size != self._size:
            self._size, self._heard = size, now
        if pid == 0 and now - self._heard < 3 * CPU_LIMIT:
            return None
        self._kill(waits=pid == 0)
        if self.file:
            shutil.move(self._before, self.tree / self.file)
            _forget_compiled(self.tree / self.file)
        notes, printed = _all_of(self._notes), _all_of(self._printed)
        took_long = pid == 0 or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU)
        result = _result(notes, took_long)
        result.seconds, result.output = now - self._since, "\n".join(printed.splitlines()[-15:])
        return result


def _result(notes: str, took_long: bool) -> Result:
    found: dict[str, list[str]] = collections.defaultdict(list)
    for line in notes.splitlines():
        kind, _, what = line.partition(" ")
        found[kind].append(what)
    passed = found["passed"]
    if found["no"]:
        return Result("no import")
    if found["failed"]:
        return Result("failed", found["failed"][0], passed)
    if not found["ended"]:
        return Result("time" if took_long else "died", (found["start"] or [""])[-1], passed)
    return Result("passed" if found["ended"] == ["0"] else "not run", passed=passed)


def _forget_compiled(path: Path) -> None:
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def _all_of(file: Any) -> str:
    file.seek(0)
    text: str = file.read()
    file.close()
    return text


def run_all(runs: Iterable[Run], trees: Sequence[Path]) -> Iterator[tuple[Run, Result]]:
    """Run all, as many at a time as there are trees; yield each with its result as it ends."""
    waiting, free, running = collections.deque(runs), [*trees], list[Run]()
    try:
        while waiting or running:
            while waiting and free:
                running.append(waiting.popleft())
                running[-1].start(free.pop())
            for run in list(running):
                if (result := run.ended()) is not None:
                    running.remove(run)
                    free.append(run.tree)
                    yield run, result
            time.sleep(0.02)
    finally:
        for run in running:
            run.abandon()


def prepare() -> None:
    """Import what all forks need, and nothing of xamp."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # none is needed, and some start threads
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # what is compiled of a fault must not stay
    sys.dont_write_bytecode = True
    for name in _IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)
    assert "xamp" not in sys.modules, "the forks could not import a copy"
