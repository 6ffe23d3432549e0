"""Runs a part of ``doctor``'s examination in a child process, and reports how that process ended.

The child runs third-party code, so it may crash, hang, exit or print without end. It writes its results to a file, the
journal. What it prints goes through a pipe; this module keeps the last bytes of each step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

__all__ = ["Outcome", "kill_children", "run_child"]

# The child takes over sys.path of the parent, so that it finds the same modules.
_START = (
    "import json, sys; plan = json.load(open(sys.argv[1], encoding='utf-8')); sys.path[:] = plan['path']; "
    "from xamp.doctor.examine import main; main(plan)"
)
_TAIL = 8192  # bytes of a step's output that are kept
_LINES, _LINES_BEFORE, _LINE_LENGTH = 6, 1, 120
_NOISE = ("Extension modules:", '  File "<frozen importlib')  # in a traceback that the interpreter dumps
_ASKED = "Fatal Python error: Aborted"  # how the answer to :func:`_ask_where` begins
_running: set[subprocess.Popen[bytes]] = set()
_POLL_SECONDS, _DRAIN_SECONDS = 0.1, 2.0


@dataclasses.dataclass
class Printed:
    """What one step of a child printed: the number of bytes, and the last ones."""

    size: int = 0
    tail: bytes = b""

    def add(self, data: bytes) -> None:
        """Append ``data``."""
        self.size += len(data)
        self.tail = (self.tail + data)[-_TAIL:]

    @property
    def text(self) -> str:
        """The kept bytes as text."""
        return self.tail.decode("utf-8", "backslashreplace")

    @property
    def lines(self) -> list[str]:
        """The most useful lines: those around the head of a traceback that the interpreter dumped, else the last."""
        lines = [line[:_LINE_LENGTH].rstrip() for line in self.text.splitlines() if line.strip()]
        lines = [line for line, _ in itertools.groupby(lines) if not line.startswith(_NOISE)]
        for number, line in enumerate(lines):
            if line.startswith("Fatal Python error"):
                start = max(0, number - _LINES_BEFORE)
                return lines[start : start + _LINES]
        return lines[-_LINES:]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a child ended, and what it found.

    Attributes:
        records: what the child found, in order; each record has ``at``, the step that it belongs to.
        kind: ``""`` where the child finished, else ``"crash"`` or ``"timeout"``.
        how: how the child ended; the end of a sentence whose subject is the child.
        open_step: the step during which the child ended; None where it had begun none.
        printed: what the child printed, by step; the key ``("", "")`` has what it printed before the first step.
    """

    records: Sequence[Mapping[str, Any]]
    kind: str
    how: str
    open_step: tuple[str, str] | None
    printed: Mapping[tuple[str, str], Printed]

    @property
    def last_text(self) -> str:
        """The last text that the child printed, during the step in which it ended."""
        return self.printed.get(self.open_step or ("", ""), Printed()).text

    @property
    def last_lines(self) -> list[str]:
        """The most useful lines of :attr:`last_text`."""
        lines = self.printed.get(self.open_step or ("", ""), Printed()).lines
        return [line for line in lines if line != _ASKED] if self.kind == "timeout" else lines


def run_child(plan: Mapping[str, Any], limit: float, variables: Mapping[str, str] | None = None) -> Outcome:
    """Run the examination that ``plan`` describes in a new process.

    Args:
        plan: see :func:`xamp.doctor.examine.main`.
        limit: seconds that one step may take. After that the process, and all that it has started, is killed.
        variables: environment variables to set in the child, over those of this process.
    """
    mark = b"\x1e" + secrets.token_hex(16).encode()
    with tempfile.TemporaryDirectory(prefix="xamp-doctor-", ignore_cleanup_errors=True) as folder:
        plan_file, journal = Path(folder, "plan.json"), Path(folder, "journal")
        path = [str(entry) for entry in sys.path]
        whole = {**plan, "path": path, "journal": str(journal), "mark": mark.decode()}
        plan_file.write_text(json.dumps(whole), encoding="utf-8")
        command = [sys.executable, *_flags(), "-X", "faulthandler", "-c", _START, str(plan_file)]
        try:
            code, reader = _run(command, journal, mark, limit, {**os.environ, **(variables or {})})
        except OSError as error:
            return Outcome([], "crash", f"cannot be started: {error}", None, {})
        return _outcome(_read(journal), code, limit, reader.parts)


def kill_children() -> None:
    """Kill every child that other threads wait for."""
    for process in list(_running):
        _kill(process)


def _flags() -> list[str]:
    flags = {"I": sys.flags.isolated, "E": sys.flags.ignore_environment, "s": sys.flags.no_user_site}
    return [f"-{letter}" for letter, is_set in flags.items() if is_set]


def _run(
    command: list[str], journal: Path, mark: bytes, limit: float, environment: Mapping[str, str]
) -> tuple[int | None, _Reader]:
    """Run ``command``; return its exit code (None: it was killed) and what it printed."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        bufsize=0,
        env=environment,
        start_new_session=True,  # a process group of its own, so that its own children are killed with it
    )
    assert process.stdout is not None
    reader = _Reader(process.stdout, mark)
    reader.start()
    _running.add(process)
    try:
        code = _wait(process, journal, limit)
    finally:
        _running.discard(process)
        _kill(process)
    reader.join(_DRAIN_SECONDS)  # a grandchild that left the group may hold the pipe open for ever
    return code, reader


def _wait(process: subprocess.Popen[bytes], journal: Path, limit: float) -> int | None:
    """Wait for the exit code; return None once nothing was written to ``journal`` for ``limit`` seconds."""
    size, deadline = 0, time.monotonic() + limit
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(_POLL_SECONDS)
        with contextlib.suppress(OSError):
            if journal.stat().st_size != size:
                size, deadline = journal.stat().st_size, time.monotonic() + limit
        if time.monotonic() > deadline:
            _ask_where(process)
            return None


def _ask_where(process: subprocess.Popen[bytes]) -> None:
    """Let a child that hangs print where, before it ends.

    faulthandler does so in the child's own thread at this signal. Its timer would look from another thread, and that
    may crash where the frames move on meanwhile: in a child that is slow and does not hang.
    """
    process.send_signal(signal.SIGABRT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_DRAIN_SECONDS)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and all that it started."""
    killpg = getattr(os, "killpg", None)
    with contextlib.suppress(OSError):
        if killpg is not None:
            killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.wait()


class _Reader(threading.Thread):
    """Reads all that a child prints, and keeps the last bytes of each step. ``mark`` separates the steps."""

    def __init__(self, stream: IO[bytes], mark: bytes) -> None:
        super().__init__(daemon=True)
        self.parts = [Printed()]
        self._stream = stream
        self._mark = mark

    def run(self) -> None:
        pending, most = b"", len(self._mark) - 1  # one read may cut a mark in two: that many bytes wait
        while data := self._stream.read(1 << 16):
            *ended, rest = (pending + data).split(self._mark)
            for part in ended:
                self.parts[-1].add(part)
                self.parts.append(Printed())
            self.parts[-1].add(rest[:-most])
            pending = rest[-most:]
        self.parts[-1].add(pending)
        self._stream.close()


def _read(journal: Path) -> list[dict[str, Any]]:
    records = []
    with contextlib.suppress(OSError, ValueError):  # the last line may be incomplete
        for line in journal.read_bytes().splitlines():
            records.append(json.loads(line))
    return records


def _outcome(journal: list[dict[str, Any]], code: int | None, limit: float, parts: list[Printed]) -> Outcome:
    begun = [(str(at), str(subject)) for at, subject in (line["begin"] for line in journal if "begin" in line)]
    printed: dict[tuple[str, str], Printed] = {}
    for step, part in zip([("", ""), *begun], parts, strict=False):
        printed[step] = part
    records = [line for line in journal if "at" in line]
    if any("done" in line for line in journal):
        return Outcome(records, "", "finished", None, printed)
    kind, how = ("timeout", f"does not finish within {limit:g} s") if code is None else ("crash", _exit_text(code))
    last = begun[-1] if begun else None
    flood = printed.get(last or ("", ""), Printed()).size
    if flood >= 1e6:
        how += f", and prints {flood / 1e6:,.0f} MB"
    return Outcome(records, kind, how, last, printed)


def _exit_text(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"ends its process by {signal.Signals(-code).name} ({(signal.strsignal(-code) or '').lower()})"
    return f"ends its process with exit code {code if code < 256 else hex(code)}"
