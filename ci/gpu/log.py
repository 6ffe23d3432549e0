"""The log of a run: a line of JSON for each thing that happened, written as it happens.

It is all that a run keeps. The result is made from it, and a run that was ended by a kill goes on from it. Of a line
that was cut short nothing is taken. Each record has a ``stage`` and an ``event``:

    start    a stage is taken up; ``when``
    test     a test or clause has ended: ``test``, ``outcome``, ``seconds``, ``reason``, ``text``; ``file``
             where it is a file that was not collected, which each attempt finds out anew
    step     a command has ended: ``step``, ``code``, ``seconds``, ``cut``, ``tail``, and ``data``, what it found
    end      a stage has ended: ``outcome``, ``seconds``, ``reason``
    forget   what stands before it does not count any more
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["BAD", "GOOD", "LACKING", "Kept", "Log", "Record"]

Record = dict[str, Any]
GOOD = ("passed", "skipped", "known gap", "not declared", "xfailed")
"""Outcomes of tests that need not be run again."""
LACKING = "lacking"
"""The outcome of a test that needs a package which is not there; its reason is the package."""
BAD = ("failed", "killed", "cut off", "not reached")
"""Outcomes of stages for which the exit code is 1."""


@dataclasses.dataclass
class Kept:
    """What the log has of one stage.

    Attributes:
        tests: the last record of each test, in the order in which they came first.
        steps: the last record of each command.
        end: the record of its end; None where it never began, or was cut short.
        seconds: the time of its commands, in all attempts.
        began: whether it was ever taken up.
    """

    tests: dict[str, Record] = dataclasses.field(default_factory=dict)
    steps: dict[str, Record] = dataclasses.field(default_factory=dict)
    end: Record | None = None
    seconds: float = 0.0
    began: bool = False

    def take(self, record: Record) -> None:
        """Add the next record."""
        event = record["event"]
        if event == "test":
            self.tests[record["test"]] = record
        elif event == "step":
            self.steps[record["step"]] = record
            self.seconds += record["seconds"]
        elif event == "start":
            self.began, self.end = True, None
            self.tests = {name: test for name, test in self.tests.items() if not test.get("file")}
        elif event == "end":
            self.end = record

    @property
    def outcome(self) -> str:
        """The stage's."""
        if self.end is not None:
            return str(self.end["outcome"])
        return "killed" if self.began else "not run"


class Log:
    """A log file.

    Args:
        path: the file; it need not be there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, stage: str, event: str, **more: Any) -> None:
        """Append a record. Several processes may, since each record is one write."""
        line = json.dumps({"stage": stage, "event": event, **more}) + "\n"
        torn = b"\n" if self._is_torn() else b""
        with open(os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644), "wb", buffering=0) as file:
            file.write(torn + line.encode())

    def of(self, stage: str) -> Kept:
        """What counts of one stage."""
        found = Kept()
        for record in self._records():
            if record["stage"] == stage:
                found = Kept() if record["event"] == "forget" else found
                found.take(record)
        return found

    def _is_torn(self) -> bool:
        """Whether a kill has cut the last line short."""
        try:
            with self.path.open("rb") as file:
                file.seek(-1, os.SEEK_END)
                return file.read(1) != b"\n"
        except OSError:  # no file, or an empty one
            return False

    def _records(self) -> Iterator[Record]:
        if not self.path.exists():
            return
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and {"stage", "event"} <= record.keys():
                yield record
