"""Memory of this process and of this machine, in bytes, from what the operating system tells."""

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
_seen = 0  # the highest figure told since the last reset: the kernel's own counts lag by some pages


def resident() -> int:
    """The resident set of the process.

    Raises:
        UnsupportedPolicy: the system does not tell.
    """
    return _note(_now())


def peak() -> int:
    """The highest resident set of the process since it started, or since :func:`reset_peak` where that works.

    Raises:
        UnsupportedPolicy: the system does not tell.
    """
    marked = _figure(PROC / "self/status", "VmHWM")
    _note(_highest_ever() if marked is None else max(marked, _now()))
    return _seen


def reset_peak() -> None:
    """Begin the peak anew. Linux does that; elsewhere it stays that of the whole process."""
    global _seen
    with contextlib.suppress(OSError):
        (PROC / "self/clear_refs").write_text("5")  # the one value that resets VmHWM, and nothing else
        _seen = 0


def total() -> int:
    """Memory of the machine, or of the container where that has less.

    Raises:
        UnsupportedPolicy: the system does not tell.
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
    """What may still be asked for without swapping, on the machine or in the container.

    Raises:
        UnsupportedPolicy: the system does not tell.
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
    """A line such as ``VmRSS:  1024 kB`` of ``path``, in bytes; None where there is none."""
    try:
        found = re.search(rf"^{name}:\s+(\d+) kB$", path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else int(found[1]) * 1024


def _container() -> tuple[int | None, int]:
    """The limit of the control group that the process sees as the root, and what of it is taken; None without one.

    Files that the kernel may drop when memory runs short count as free, as they do in MemAvailable.
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
