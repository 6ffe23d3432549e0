"""Memory of this process and of this machine, in bytes, as the operating system reports it."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

from xamp.errors import UnsupportedPolicy

__all__ = ["free", "peak", "reset_peak", "resident", "total"]

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")
_seen = 0  # the highest figure returned since the last reset; the kernel's own peak lags by some pages


def resident() -> int:
    """The resident set of the process.

    Raises:
        UnsupportedPolicy: the system does not report it.
    """
    return _note(_now())


def peak() -> int:
    """The highest resident set of the process since its start, or since :func:`reset_peak` if that works.

    Raises:
        UnsupportedPolicy: the system does not report it.
    """
    marked = _figure(PROC / "self/status", "VmHWM")
    _note(_highest_ever() if marked is None else max(marked, _now()))
    return _seen


def reset_peak() -> None:
    """Restart the peak. That works on Linux; elsewhere the peak stays that of the whole process."""
    global _seen
    with contextlib.suppress(OSError):
        (PROC / "self/clear_refs").write_text("5")  # the one value that resets VmHWM, and nothing else
        _seen = 0


def total() -> int:
    """Memory of the machine, or of the container if that has less.

    Raises:
        UnsupportedPolicy: the system does not report it.
    """
    machine = _figure(PROC / "meminfo", "MemTotal")
    if machine is None:
        try:
            machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (AttributeError, ValueError, OSError):
            raise _untold("the memory of the machine") from None
    limit, _ = _container()
    return machine if limit is None else min(machine, limit)


def free() -> int:
    """Memory that can still be allocated without swapping, on the machine or in the container.

    Raises:
        UnsupportedPolicy: the system does not report it.
    """
    machine = _figure(PROC / "meminfo", "MemAvailable")
    if machine is None:
        raise _untold("the memory that is free")
    limit, used = _container()
    return machine if limit is None else min(machine, max(0, limit - used))


def _note(figure: int) -> int:
    global _seen
    _seen = max(_seen, figure)
    return figure


def _now() -> int:
    figure = _figure(PROC / "self/status", "VmRSS")
    if figure is not None:
        return figure
    try:
        shown = subprocess.run(
            ["ps", "-o", "rss=", "-p", str(os.getpid())], capture_output=True, text=True, timeout=5, check=True
        )
        return int(shown.stdout) * 1024
    except (OSError, ValueError, subprocess.SubprocessError):
        raise _untold("the resident set of this process") from None


def _highest_ever() -> int:
    try:
        import resource
    except ImportError:
        raise _untold("the peak of this process") from None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _figure(path: Path, name: str) -> int | None:
    """The value of a line such as ``VmRSS:  1024 kB`` in ``path``, in bytes; None if there is no such line."""
    try:
        found = re.search(rf"^{name}:\s+(\d+) kB$", path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else int(found[1]) * 1024


def _container() -> tuple[int | None, int]:
    """Limit and use of the control group that the process sees as the root; the limit is None if there is none.

    Cached files that the kernel can drop count as free, as in MemAvailable.
    """
    for limit, used, droppable in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        with contextlib.suppress(OSError, ValueError):  # ValueError: "max", which is no limit
            bound, taken = int((CGROUP / limit).read_text()), int((CGROUP / used).read_text())
            stat = (CGROUP / used).with_name("memory.stat").read_text()
            files = re.search(rf"^{droppable} (\d+)$", stat, re.MULTILINE)
            return bound, max(0, taken - (0 if files is None else int(files[1])))
    return None, 0


def _untold(what: str) -> UnsupportedPolicy:
    return UnsupportedPolicy(
        f"xamp.accel on a CPU: {sys.platform} does not tell {what}. Guard the call: if xamp.is_available()."
    )
