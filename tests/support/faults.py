"""Faults for a training run: a kill at any moment, truncated files, and wrong values in states.

A :class:`Runs` starts a worker script as a real process and kills it with SIGKILL. The script calls :func:`serve` with
its functions: one process imports torch once, and forks for each run, which then starts at once. That process uses
only the CPU, because the runtimes of other devices do not survive a fork once they have started. Where one has started
in it all the same, each run is a process of its own.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import forking

Spec = dict[str, Any]
"""A worker's arguments, as JSON. ``folder`` is the folder that it works in; ``device`` names its lane."""

CHECKPOINT = "checkpoint.pt"
"""The file in ``folder`` that a run replaces with each checkpoint; kills are timed by these."""

Moment = tuple[int, float]
"""When to kill: after this many checkpoints, and then this many seconds."""

_POLL = 0.0005  # seconds between two checks; a step of a small model takes as long
_LIMIT = 300.0  # the largest number of seconds that a run may take


@dataclasses.dataclass(frozen=True)
class Ending:
    """How a run ended.

    Attributes:
        killed: whether SIGKILL ended it; else it finished.
        checkpoints: how many checkpoints were seen; some may have been missed.
        seconds: the time from the first seen checkpoint to the end.
    """

    killed: bool
    checkpoints: int
    seconds: float


class Runs:
    """Starts runs of ``script`` and kills them. A context manager."""

    def __init__(self, script: Path, *, fork: bool) -> None:
        self._command = [sys.executable, str(script)]
        self._environment = {
            **os.environ,
            **forking.SETTINGS,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        }
        self._fork = fork
        self._server: subprocess.Popen[str] | None = None

    def __enter__(self) -> Runs:
        if self._fork:
            self._server = subprocess.Popen(
                [*self._command, "serve"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=self._environment,
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.communicate()  # closes its standard input, which ends it
            self._server = None

    def run(self, spec: Spec, kill: Moment | None = None) -> Ending:
        """Let the worker run ``spec``; kill it at the moment ``kill`` if it still runs then.

        Raises:
            RuntimeError: the worker ended with an error, which is on standard error.
        """
        if self._server is None:
            pid = os.posix_spawn(self._command[0], [*self._command, "run", json.dumps(spec)], self._environment)
            return _watch(pid, spec, kill)
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps({"spec": spec, "kill": kill}) + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        if not answer or "error" in (found := json.loads(answer)):
            raise RuntimeError(f"the worker failed on {spec}: {answer or 'it is gone'}")
        return Ending(**found)


def serve(arguments: list[str], work: Callable[[Spec], None], warm: Callable[[], None]) -> None:
    """What a worker script does with its ``arguments``: one run, or one for each line of standard input.

    Args:
        arguments: ``["run", spec]``, or ``["serve"]``.
        work: one run.
        warm: called once before the first fork; whatever is slow and the same for all. It must start no thread and no
            device.
    """
    if arguments[0] == "run":
        work(json.loads(arguments[1]))
        return
    warm()
    forks = forking.may_fork()
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork() if forks else _start(request["spec"])
        if pid == 0:
            _exit_after(work, request["spec"])
        try:
            answer = dataclasses.asdict(_watch(pid, request["spec"], request["kill"]))
        except RuntimeError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


def _start(spec: Spec) -> int:
    return os.posix_spawn(sys.executable, [sys.executable, sys.argv[0], "run", json.dumps(spec)], os.environ)


def _exit_after(work: Callable[[Spec], None], spec: Spec) -> None:
    """Ends the forked process, which must not return into the server's loop."""
    code = 1
    try:
        work(spec)
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)


def _watch(pid: int, spec: Spec, kill: Moment | None) -> Ending:
    """Wait for the child ``pid``, and kill it in time. Until we reap it, no other process can have its number."""
    path = Path(spec["folder"]) / CHECKPOINT
    last, began = _written(path), time.monotonic()
    seen: list[float] = []  # the time of each checkpoint
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        now = time.monotonic()
        if found:
            break
        if (written := _written(path)) != last:
            last = written
            seen.append(now)
        due = kill is not None and len(seen) >= kill[0] and now - (seen[kill[0] - 1] if kill[0] else began) >= kill[1]
        if due or now - began > _LIMIT:
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            break
        time.sleep(_POLL)
    code = os.waitstatus_to_exitcode(status)
    if code not in (0, -signal.SIGKILL) or now - began > _LIMIT:
        raise RuntimeError(f"it ended with {code} after {now - began:.1f} s")
    return Ending(code != 0, len(seen), now - (seen[0] if seen else began))


def _written(path: Path) -> int:
    try:
        found = path.stat()
        return found.st_ino << 64 | found.st_mtime_ns
    except FileNotFoundError:
        return 0


# ---------------------------------------------------------------- dying at a given point


class DyingFile:
    """A file that kills its own process with SIGKILL once so many bytes have been written to it."""

    def __init__(self, file: IO[bytes], bytes_left: int) -> None:
        self._file = file
        self._left = bytes_left

    def write(self, data: Any) -> int:
        data = memoryview(data).cast("B")
        if len(data) >= self._left:
            self._file.write(data[: self._left])
            self._file.flush()
            die()
        self._left -= len(data)
        return self._file.write(data)

    def __enter__(self) -> DyingFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class DyingOs:
    """The module ``os``, except that the ``nth`` call of ``name`` kills the process, before or after the work."""

    def __init__(self, name: str, nth: int, *, after: bool) -> None:
        self._name, self._left, self._after = name, nth, after

    def __getattr__(self, name: str) -> Any:
        found = getattr(os, name)
        if name != self._name:
            return found

        def call(*args: Any) -> Any:
            self._left -= 1
            result = found(*args) if self._left or self._after else None
            if not self._left:
                die()
            return result

        return call


def die() -> None:
    """End this process as ``kill -9`` does."""
    os.kill(os.getpid(), signal.SIGKILL)


# ---------------------------------------------------------------- broken files and numbers


def truncated(data: bytes, every: int) -> Iterator[bytes]:
    """``data`` cut off after each ``every``-th byte, and one byte before its end."""
    yield from (data[:length] for length in range(0, len(data), every))
    yield data[:-1]


def flipped(data: bytes, count: int, rng: random.Random) -> Iterator[bytes]:
    """``count`` copies of ``data``, each with one changed byte."""
    for _ in range(count):
        broken = bytearray(data)
        broken[rng.randrange(len(data))] ^= rng.randrange(1, 256)
        yield bytes(broken)


POISON: tuple[Any, ...] = (
    None,
    True,
    -1,
    2**31,
    2**63,
    10**400,
    0.0,
    -0.0,
    5e-324,
    1e300,
    float("nan"),
    float("inf"),
    -float("inf"),
    struct.pack("d", 1.0),
    "",
    "1.0",
    (),
    [],
    [[]],
    {},
    {"a": 1},
    {1: 2},
    1j,
    object(),
    Spec,
)
"""Values that stand where a number, a string, a list or a dict should."""


def places(state: Any) -> list[tuple[Any, Any]]:
    """Each place in nested dicts and lists: (container, key)."""
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    return [place for key, value in list(items) for place in ((state, key), *places(value))]
