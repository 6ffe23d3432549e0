"""The parent's side of :mod:`xamp.testing.worker`: a process, its messages, and how it ended."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from xamp.testing.lane import Lane
from xamp.testing.processes import described, environment
from xamp.testing.worker import INTERRUPTED

__all__ = ["Crash", "Inbox", "Message", "Worker"]

_GRACE = 5.0  # seconds in which a worker that is interrupted ends its ranks and itself
_LOOK = 1.0  # seconds after which the inbox looks whether a silent worker lives
_END = 60.0  # seconds in which a worker with nothing more to do ends
_SHOWN = 4000  # characters of a worker's stderr to show
_number = itertools.count(1)

Message = dict[str, Any]
"""What a worker sends; see :mod:`xamp.testing.worker`."""


@dataclasses.dataclass(frozen=True)
class Crash:
    """How a worker ended.

    Attributes:
        how: Such as ``"ended by SIGSEGV"``.
        said: The end of its stderr.
        interrupted: It ended by a ``KeyboardInterrupt``.
        was_ready: It had said that it can run clauses.
        was_due: There was nothing more to do for it, and it ended without an error.
    """

    how: str
    said: str
    interrupted: bool
    was_ready: bool
    was_due: bool


class Inbox:
    """The messages of all workers, in the order in which they come."""

    def __init__(self) -> None:
        self._messages: queue.Queue[tuple[Worker, str]] = queue.Queue()

    def put(self, worker: Worker, line: str) -> None:
        """Add a line; an empty one says that there will be no other."""
        self._messages.put((worker, line))

    def next(self, workers: Collection[Worker]) -> tuple[Worker, Message | Crash]:
        """Wait for the next message, or the end, of one of ``workers``."""
        while True:
            try:
                worker, line = self._messages.get(timeout=_LOOK)
            except queue.Empty:
                for worker in workers:
                    worker.kill_overdue()
                # A process that a clause forked may keep the pipe of its dead worker open.
                dead = next((worker for worker in workers if worker.is_dead), None)
                if dead is None:
                    continue
                worker, line = dead, ""
            if worker in workers:
                return worker, worker.read(line)


class Worker:
    """A worker on one lane.

    Args:
        lane: Where its clauses run.
        choice: The clauses and the ledger of the run.
        folder: For the file of its stderr.
        inbox: Where its messages arrive.
        threads: So many threads its operators may take on the host.
    """

    def __init__(self, lane: Lane, choice: Mapping[str, object], folder: Path, inbox: Inbox, threads: int) -> None:
        self._was_ready = False
        self._finished = math.inf  # when it was told that there is nothing more to do
        self._overdue = False
        self._stderr = folder / f"worker{next(_number)}.txt"
        variables = {"OMP_NUM_THREADS": str(threads), "TORCHINDUCTOR_COMPILE_THREADS": "1"}  # else it starts processes
        with self._stderr.open("wb") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "xamp.testing.worker", described(lane)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=environment(**{name: value for name, value in variables.items() if name not in os.environ}),
                text=True,
                encoding="utf-8",
            )
        threading.Thread(target=self._talk, args=(inbox, json.dumps(choice)), daemon=True).start()

    @property
    def is_dead(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def ask(self, clauses: Sequence[str]) -> None:
        """Let it run these clauses. If it has ended, the inbox says so."""
        self._write(json.dumps(clauses))

    def read(self, line: str) -> Message | Crash:
        """What a line says; an empty one: how the process ended."""
        if line:
            found: Message = json.loads(line)
            self._was_ready = self._was_ready or "ready" in found
            return found
        code = self._process.wait()
        how = f"ended with code {code}" if code >= 0 else f"ended by {signal.Signals(-code).name}"
        if self._overdue:
            how = f"was still there {_END:.0f} s after its last clause"
        said = self._stderr.read_text(encoding="utf-8", errors="replace")[-_SHOWN:]
        due = self._finished < math.inf and code == 0
        return Crash(how, said, code == INTERRUPTED, self._was_ready, due)

    def interrupt(self) -> None:
        """Tell it to end what it does. :meth:`stop` waits for that."""
        self._process.terminate()

    def finish(self) -> None:
        """Tell it that there is nothing more to do."""
        self._finished = min(self._finished, time.monotonic())
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def kill_overdue(self) -> None:
        """Kill it if it should have ended long ago."""
        if not self._overdue and time.monotonic() - self._finished > _END:
            self._overdue = True
            self._process.kill()

    def stop(self) -> None:
        """End it: close its input, wait a moment, then kill it."""
        self.finish()
        try:
            self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _talk(self, inbox: Inbox, choice: str) -> None:
        """Send what the process asks for first, which may be more than its pipe holds; then pass on what it says."""
        self._write(choice)
        assert self._process.stdout is not None
        with self._process.stdout as stdout:
            for line in stdout:
                inbox.put(self, line)
        inbox.put(self, "")

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended, or its input was closed meanwhile
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
