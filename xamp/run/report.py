"""Counts what was redirected, and where it was first asked for, and says it at the end as a list of what to port."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import sysconfig
import threading
from pathlib import Path
from types import FrameType

import torch

import xamp

__all__ = ["Report", "Row", "place_of_caller"]

_XAMP = os.path.dirname(os.path.abspath(xamp.__file__))
_INSIDE = tuple(
    os.path.join(folder, "")
    for folder in (
        _XAMP,
        os.path.join(os.path.dirname(_XAMP), "backends"),
        os.path.dirname(os.path.abspath(torch.__file__)),
    )
)
_PYTHON = os.path.join(sysconfig.get_path("stdlib"), "")
_HEADINGS = {
    "redirected": "redirected to {device}, as a list of what to port",
    "told": "asked and told the truth",
    "pretended": "pretended, because of --pretend-cuda",
    "launch": "changed so that the launch works",
    "refused": "refused, because nothing could answer",
}


_WIDTH = 44


@dataclasses.dataclass
class Row:
    """One line of the report.

    Attributes:
        kind: a key of the headings: what happened.
        what: the call, as a script spells it.
        port: what to write in its place; may be empty.
        count: how often.
        first: where first, ``file:line``.
    """

    kind: str
    what: str
    port: str
    count: int = 0
    first: str = ""


class Report:
    """What was redirected in this process, and in the processes it started.

    Args:
        device: the device that answered, as text.
        folder: where child processes leave their rows; None where there is none.
    """

    def __init__(self, device: str, folder: str | None = None) -> None:
        self.device, self.folder = device, folder
        self._rows: dict[tuple[str, str], Row] = {}
        self._lock = threading.Lock()

    def note(self, kind: str, what: str, port: str = "") -> None:
        """Count one call."""
        row = self._rows.get((kind, what))
        if row is None:
            place = place_of_caller()
            with self._lock:
                row = self._rows.setdefault((kind, what), Row(kind, what, port, 0, place))
        with self._lock:
            row.count += 1

    def rows(self, kind: str | None = None) -> list[Row]:
        """The rows of one kind, or all, the most frequent first."""
        found = [row for row in list(self._rows.values()) if kind in (None, row.kind)]
        return sorted(found, key=lambda row: (-row.count, row.what))

    def clear(self) -> None:
        """Forget all rows: those of a parent process are not this process's."""
        self._rows.clear()
        self._lock = threading.Lock()

    def leave(self) -> None:
        """Write the rows into the folder, for the parent process."""
        if self.folder is None or not self._rows:
            return
        path = Path(self.folder, f"{os.getpid()}.json")
        with contextlib.suppress(OSError):  # the parent has ended and removed the folder
            path.write_text(json.dumps([dataclasses.asdict(row) for row in self.rows()]))

    def collect(self) -> None:
        """Add the rows that child processes have left."""
        for path in sorted(Path(self.folder).glob("*.json")) if self.folder is not None else ():
            for line in json.loads(path.read_text()):
                row = Row(**line)
                mine = self._rows.setdefault((row.kind, row.what), dataclasses.replace(row, count=0))
                mine.count += row.count

    def text(self) -> str:
        """The report, one line for each call; empty where nothing happened."""
        lines = []
        for kind, heading in _HEADINGS.items():
            rows = self.rows(kind)
            if rows:
                lines.append(f"xamp run: {heading.format(device=self.device)}")
                lines += _table(rows)
        return "\n".join(lines)


def _table(rows: list[Row]) -> list[str]:
    called = min(_WIDTH, max(len(row.what) for row in rows))
    placed = min(_WIDTH, max(len(row.first) for row in rows))
    return [_line(row, called, placed) for row in rows]


def _line(row: Row, called: int, placed: int) -> str:
    port = f"-> {row.port}" if row.port else ""
    return f"  {row.count:>7}  {row.what:<{called}}  {row.first:<{placed}}  {port}".rstrip()


def place_of_caller() -> str:
    """The innermost ``file:line`` outside torch, xamp and Python itself, in the script or in a library it uses."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_inside(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return "?"
    return f"{frame.f_code.co_filename.removeprefix(os.path.join(os.getcwd(), ''))}:{frame.f_lineno}"


def _is_inside(name: str) -> bool:
    if name.startswith((*_INSIDE, "<frozen")) or name.endswith("typing_extensions.py"):
        return True
    return name.startswith(_PYTHON) and "site-packages" not in name
