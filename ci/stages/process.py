"""Runs a command with all its children in a group, which ends with it, after a limit of time, or with this process."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["Ended", "run"]

GRACE = 15.0
"""Seconds in which a command that is told to end may write down what it has."""
_TAIL = 4000  # bytes of the output that are kept
_ENDS_WITH_PARENT = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
os.execvp(sys.argv[1], sys.argv[1:])
"""
# Else a run that was ended by SIGKILL would leave its command behind, beside which the next run would start.


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        code: its exit code; below 0: the signal that ended it.
        seconds: how long it ran.
        cut: whether it was ended at its limit.
        tail: the end of what it printed.
    """

    code: int
    seconds: float
    cut: bool
    tail: str

    @property
    def how(self) -> str:
        """The end in words."""
        return f"ended by {signal.Signals(-self.code).name}" if self.code < 0 else f"ended with code {self.code}"


def run(command: Sequence[str], environment: Mapping[str, str], limit: float, folder: Path) -> Ended:
    """Run a command, and show what it prints.

    At ``limit`` seconds its group gets SIGTERM, and :data:`GRACE` later SIGKILL. What the command leaves running when
    it ends is killed.
    """
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", _ENDS_WITH_PARENT, *command],
        env=environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    output = _Output(process)
    try:
        cut = not output.follow(began + limit)
        if cut:
            _end(process, output)
    except BaseException:
        _end(process, output)
        raise
    finally:
        _signal(process, signal.SIGKILL)
        code = process.wait()
        output.close()
    return Ended(code, time.monotonic() - began, cut, output.tail)


def _end(process: subprocess.Popen[bytes], output: _Output) -> None:
    _signal(process, signal.SIGTERM)
    output.follow(time.monotonic() + GRACE)


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to the group. Its first process was not waited for, so the number is still the group's."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


class _Output:
    """What a process prints: it goes on to standard output as it comes."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self._process, self._pipe, self._kept = process, process.stdout, b""
        os.set_blocking(self._pipe.fileno(), False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._pipe, selectors.EVENT_READ)

    @property
    def tail(self) -> str:
        """The end of it."""
        return self._kept.decode(errors="replace")

    def follow(self, until: float) -> bool:
        """Show what comes until the process has ended; False if it goes on at ``until``."""
        while not self._has_ended():
            if time.monotonic() >= until:
                return False
            if self._selector.select(min(0.2, max(0.0, until - time.monotonic()))) and not self._show():
                time.sleep(0.05)  # it has closed its output
        while self._show():
            pass
        return True

    def close(self) -> None:
        """Give the pipe back."""
        self._selector.close()
        self._pipe.close()

    def _has_ended(self) -> bool:
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _show(self) -> bool:
        """Pass on what is there; whether there was anything."""
        found = self._pipe.read(65536) or b""
        sys.stdout.write(found.decode(errors="replace"))
        sys.stdout.flush()
        self._kept = (self._kept + found)[-_TAIL:]
        return bool(found)
