"""Runs a command with all its children in a group, which ends with it, after a limit of time, or with this process."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

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


def run(command: Sequence[str], environment: Mapping[str, str], limit: float, folder: Path) -> Ended:
    """Run a command, and show what it prints.

    At ``limit`` seconds its group gets SIGTERM, and :data:`GRACE` later SIGKILL. What the command leaves running when
    it ends is killed.
    """
    began = time.monotonic()
    words = [sys.executable, "-S", "-c", _ENDS_WITH_PARENT, *command]
    process = subprocess.Popen(
        words,
        env=environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    tail = bytearray()
    shown = threading.Thread(target=_show, args=(process.stdout, tail), daemon=True)
    shown.start()
    cut = True
    try:
        cut = not _has_ended(process, began + limit)
    finally:
        if cut:
            _signal(process, signal.SIGTERM)
            _has_ended(process, time.monotonic() + GRACE)
        _signal(process, signal.SIGKILL)
        code = process.wait()
        shown.join(5.0)  # what has left the group may hold the pipe
    return Ended(code, time.monotonic() - began, cut, tail.decode(errors="replace"))


def _has_ended(process: subprocess.Popen[bytes], until: float) -> bool:
    """Wait for its end, without taking its number away: it is that of the group, too."""
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() >= until:
            return False
        time.sleep(0.02)
    return True


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _show(pipe: IO[bytes], tail: bytearray) -> None:
    """Pass on what comes, until no process has the other end."""
    with pipe:
        while found := os.read(pipe.fileno(), 65536):
            sys.stdout.write(found.decode(errors="replace"))
            sys.stdout.flush()
            tail += found
            del tail[:-_TAIL]
