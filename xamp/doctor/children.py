"""Runs a part of ``doctor``'s examination in a process of its own, and says how that process ended.

Third-party code runs there, so the process may crash, hang, leave, or print without end. Its results come by a file of
their own; what it prints comes by a pipe, of which the end is kept, by step of the examination.
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

__all__ = ["Outcome", "end_children", "run_child"]

# The parent's path as it is: the child must find the modules that the asking process would.
_START = (
    "import json, sys; plan = json.load(open(sys.argv[1], encoding='utf-8')); sys.path[:] = plan['path']; "
    "from xamp.doctor.examine import main; main(plan)"
)
_TAIL = 8192  # bytes of a step's output that are kept
_LINES, _LINES_BEFORE, _LINE_LENGTH = 6, 1, 120
_NOISE = ("Extension modules:", '  File "<frozen importlib')  # in a traceback that the interpreter dumps
_running: set[subprocess.Popen[bytes]] = set()
_POLL_SECONDS, _DRAIN_SECONDS = 0.1, 2.0


@dataclasses.dataclass
class Printed:
    """What one step of a child printed: how many bytes, and the last of them."""

    size: int = 0
    tail: bytes = b""

    def add(self, data: bytes) -> None:
        """Append ``data``."""
        self.size += len(data)
        self.tail = (self.tail + data)[-_TAIL:]

    @property
    def text(self) -> str:
        """The end of it."""
        return self.tail.decode("utf-8", "backslashreplace")

    @property
    def lines(self) -> list[str]:
        """The lines that say most: around the head of a traceback that the interpreter dumped, else the last ones."""
        lines = [line[:_LINE_LENGTH].rstrip() for line in self.text.splitlines() if line.strip()]
        lines = [line for line, _ in itertools.groupby(lines) if not line.startswith(_NOISE)]
        for number, line in enumerate(lines):
            if line.startswith(("Fatal Python error", "Timeout (")):
                start = max(0, number - _LINES_BEFORE)
                return lines[start : start + _LINES]
        return lines[-_LINES:]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a child.

    Attributes:
        records: what it found, in order; each has ``at``, the step it belongs to.
        kind: ``""`` where it finished, else ``"crash"`` or ``"timeout"``.
        how: how it ended, to follow its subject in a sentence.
        open_step: the step it was at when it ended; None where it had begun none.
        printed: by step, what it printed; before the first step under ``("", "")``.
    """

    records: Sequence[Mapping[str, Any]]
    kind: str
    how: str
    open_step: tuple[str, str] | None
    printed: Mapping[tuple[str, str], Printed]

    @property
    def last_text(self) -> str:
        """The end of what it printed during the step at which it ended."""
        return self.printed.get(self.open_step or ("", ""), Printed()).text

    @property
    def last_words(self) -> list[str]:
        """The lines of that which say most."""
        return self.printed.get(self.open_step or ("", ""), Printed()).lines


def run_child(plan: Mapping[str, Any], limit: float, variables: Mapping[str, str] | None = None) -> Outcome:
    """Examine what ``plan`` says in a new process.

    Args:
        plan: see :func:`xamp.doctor.examine.main`.
        limit: seconds that one step may take; then the process, and what it has started, is ended.
        variables: environment variables to set over the present ones.
    """
    mark = b"\x1e" + secrets.token_hex(16).encode()
    with tempfile.TemporaryDirectory(prefix="xamp-doctor-", ignore_cleanup_errors=True) as folder:
        plan_file, journal = Path(folder, "plan.json"), Path(folder, "journal")
        path = [str(entry) for entry in sys.path]
        whole = {**plan, "path": path, "journal": str(journal), "mark": mark.decode(), "limit": limit}
        plan_file.write_text(json.dumps(whole), encoding="utf-8")
        command = [sys.executable, *_flags(), "-X", "faulthandler", "-c", _START, str(plan_file)]
        try:
            code, reader = _run(command, journal, mark, limit, {**os.environ, **(variables or {})})
        except OSError as error:
            return Outcome([], "crash", f"cannot be started: {error}", None, {})
        return _outcome(_read(journal), code, limit, reader.parts)


def end_children() -> None:
    """End every child that other threads wait for."""
    for process in list(_running):
        _end(process)


def _flags() -> list[str]:
    flags = {"I": sys.flags.isolated, "E": sys.flags.ignore_environment, "s": sys.flags.no_user_site}
    return [f"-{letter}" for letter, is_set in flags.items() if is_set]


def _run(
    command: list[str], journal: Path, mark: bytes, limit: float, environment: Mapping[str, str]
) -> tuple[int | None, _Reader]:
    """The exit code (None: it had to be ended) and what was printed."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        bufsize=0,
        env=environment,
        start_new_session=True,  # so that what it starts ends with it
    )
    assert process.stdout is not None
    reader = _Reader(process.stdout, mark)
    reader.start()
    _running.add(process)
    try:
        code = _wait(process, journal, limit)
    finally:
        _running.discard(process)
        _end(process)
    reader.join(_DRAIN_SECONDS)  # a grandchild that got away may hold the pipe open for ever
    return code, reader


def _wait(process: subprocess.Popen[bytes], journal: Path, limit: float) -> int | None:
    """The exit code; None where nothing was written to ``journal`` for ``limit`` seconds."""
    size, deadline = 0, time.monotonic() + limit
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(_POLL_SECONDS)
        with contextlib.suppress(OSError):
            if journal.stat().st_size != size:
                size, deadline = journal.stat().st_size, time.monotonic() + limit
        if time.monotonic() > deadline:
            return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and all that it started."""
    killpg = getattr(os, "killpg", None)
    with contextlib.suppress(OSError):
        if killpg is not None:
            killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.wait()


class _Reader(threading.Thread):
    """Reads what a child prints, however much, and keeps the end of each step's; ``mark`` begins the next step."""

    def __init__(self, stream: IO[bytes], mark: bytes) -> None:
        super().__init__(daemon=True)
        self.parts = [Printed()]
        self._stream = stream
        self._mark = mark

    def run(self) -> None:
        pending, most = b"", len(self._mark) - 1  # of a mark that one read cuts in two
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
    with contextlib.suppress(OSError, ValueError):  # the last line may be cut off
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
    kind, how = ("timeout", f"does not finish within {limit:g} s") if code is None else ("crash", _ended_by(code))
    last = begun[-1] if begun else None
    flood = printed.get(last or ("", ""), Printed()).size
    if flood >= 1e6:
        how += f", and prints {flood / 1e6:,.0f} MB"
    return Outcome(records, kind, how, last, printed)


def _ended_by(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"ends its process by {signal.Signals(-code).name} ({(signal.strsignal(-code) or '').lower()})"
    return f"ends its process with exit code {code if code < 256 else hex(code)}"
