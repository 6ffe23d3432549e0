"""The parent's side of :mod:`xamp.testing.worker`: a process, its messages, and how it ended."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from xamp.testing.lane import Lane
from xamp.testing.processes import described, environment
from xamp.testing.worker import INTERRUPTED

__all__ = ["Crash", "Inbox", "Message", "Worker"]

_GRACE = 5.0  # seconds in which a worker that is interrupted ends its ranks and itself
_LOOK = 1.0  # seconds after which the inbox looks whether a silent worker lives
_SHOWN = 4000  # characters of a worker's stderr to show
_number = itertools.count(1)

Message = dict[str, Any]
"""What a worker sends; see :mod:`xamp.testing.worker`."""


@dataclasses.dataclass(frozen=True)
class Crash:
    """A worker ended that was to go on.

    Attributes:
        how: Such as ``"ended by SIGSEGV"``.
        said: The end of its stderr.
        interrupted: It ended by a ``KeyboardInterrupt``.
        was_ready: It had said that it can run clauses.
    """

    how: str
    said: str
    interrupted: bool
    was_ready: bool


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
        self._stderr = folder / f"worker{next(_number)}.txt"
        variables = {"OMP_NUM_THREADS": str(threads), "TORCHINDUCTOR_COMPILE_THREADS": "1"}  # else it starts processes
        with self._stderr.open("wb") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "xamp.testing.worker", described(lane), json.dumps(choice)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=environment(**{name: value for name, value in variables.items() if name not in os.environ}),
                text=True,
                encoding="utf-8",
            )
        threading.Thread(target=self._listen, args=(inbox, self._process.stdout), daemon=True).start()

    @property
    def is_dead(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def ask(self, clauses: Sequence[str]) -> None:
        """Let it run these clauses. If it has ended, the inbox says so."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(json.dumps(clauses) + "\n")
            self._process.stdin.flush()

    def read(self, line: str) -> Message | Crash:
        """What a line says; an empty one: how the process ended."""
        if line:
            found: Message = json.loads(line)
            self._was_ready = self._was_ready or "ready" in found
            return found
        code = self._process.wait()
        how = f"ended with code {code}" if code >= 0 else f"ended by {signal.Signals(-code).name}"
        said = self._stderr.read_text(encoding="utf-8", errors="replace")[-_SHOWN:]
        return Crash(how, said, code == INTERRUPTED, self._was_ready)

    def interrupt(self) -> None:
        """Tell it to end what it does. :meth:`stop` waits for that."""
        self._process.terminate()

    def finish(self) -> None:
        """Tell it that there is nothing else to do."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def stop(self) -> None:
        """End it: close its input, wait a moment, then kill it."""
        self.finish()
        try:
            self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _listen(self, inbox: Inbox, stdout: IO[str]) -> None:
        with stdout:
            for line in stdout:
                inbox.put(self, line)
        inbox.put(self, "")
