"""The standard streams of a command: closed ones, and those that cannot be written to any more."""

from __future__ import annotations

import contextlib
import errno
import os
import sys

__all__ = ["READER_GONE", "flush", "open_closed_streams", "output_failed", "tells_of_output"]

READER_GONE = 141  # the exit code that a shell gives a process ended by SIGPIPE: 128 + 13
_OUTPUT = (errno.EPIPE, errno.ENOSPC, errno.EIO, errno.EFBIG, errno.EDQUOT)


def open_closed_streams() -> None:
    """Put the null device in place of standard streams that the caller has closed (``>&-``).

    Else the next file that is opened, such as a journal, becomes the standard output.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # open takes the lowest number that is free
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def flush() -> None:
    """Write out what was printed. Raises an OSError where that fails, which Python would tell of at its exit only.

    A script under ``xamp run`` may have closed the output, or put an object without ``flush`` in its place.
    """
    with contextlib.suppress(ValueError, AttributeError):
        sys.stdout.flush()


def tells_of_output(error: OSError) -> bool:
    """Whether ``error`` says that something could not be written that was open already."""
    return error.errno in _OUTPUT and error.filename is None


def output_failed(error: OSError) -> int:
    """Return the exit code for an output that failed: its reader has left (``| head``), or its disk is full."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is buffered goes there
    if error.errno == errno.EPIPE:
        return READER_GONE
    with contextlib.suppress(OSError):
        print(f"xamp: the output cannot be written: {error.strerror}", file=sys.stderr)
    return 2
