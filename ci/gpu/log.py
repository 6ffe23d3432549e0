"""The log of a run: a line of JSON for each thing that happened, written as it happens.

It is all that a run keeps. The result is made from it, and a run that was ended by a kill goes on from it. Of a line
that was cut short nothing is taken. Each record has a ``stage`` and an ``event``:

    start    a stage is taken up: of its tests those count from here on that need not be run again
    test     a test or clause has ended: ``test``, ``outcome``, ``seconds``, ``reason``, ``text``
    step     a command has ended: ``step``, ``code``, ``seconds``, ``cut``, ``tail``, and ``data``, what it found
    end      a stage has ended: ``outcome``, ``reason``, ``when``
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

__all__ = ["BAD", "GOOD", "LACKING", "Kept", "add", "add_test", "done", "of", "told"]

GOOD = ("passed", "skipped", "known gap", "not declared", "xfailed")
"""Outcomes of tests that need not be run again."""
LACKING = "lacking"
"""The outcome of a test that needs a package which is not there; its reason is the package."""
BAD = ("failed", "killed", "cut off", "not reached")
"""Outcomes of stages for which the exit code is 1."""
_LOG, _STAGE, _SIZE = "XAMP_STAGE_LOG", "XAMP_STAGE_NAME", "XAMP_STAGE_SIZE"
Record = dict[str, Any]


@dataclasses.dataclass
class Kept:
    """What counts of a stage: the last record of each test and each command, its end, the time of all attempts."""

    tests: dict[str, Record] = dataclasses.field(default_factory=dict)
    steps: dict[str, Record] = dataclasses.field(default_factory=dict)
    end: Record = dataclasses.field(default_factory=lambda: {"outcome": "not run", "reason": "", "when": ""})
    seconds: float = 0.0

    def take(self, record: Record) -> None:
        """Add the next record."""
        if record["event"] == "test":
            self.tests[record["test"]] = record
        elif record["event"] == "step":
            self.steps[record["step"]] = record
            self.seconds += record["seconds"]
        elif record["event"] == "start":
            self.end = {"outcome": "killed", "reason": "it was cut short", "when": ""}
            self.tests = {name: test for name, test in self.tests.items() if test["outcome"] in GOOD}
        else:
            self.end = record


def add(log: Path, stage: str, event: str, **more: Any) -> None:
    """Append a record. Several processes may, since each record is one write; a line that was torn ends before it."""
    line = "\n" + json.dumps({"stage": stage, "event": event, **more}) + "\n"
    with open(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644), "wb", buffering=0) as file:
        file.write(line.encode())


def of(log: Path, stage: str, size: int | None = None) -> Kept:
    """What the log, or its first ``size`` bytes, has of one stage."""
    found = Kept()
    for line in log.read_bytes()[:size].splitlines() if log.exists() else ():
        try:
            record = json.loads(line)
            if record["stage"] == stage:
                found.take(record)
        except (ValueError, TypeError, KeyError):
            continue
    return found


def told(log: Path, stage: str) -> dict[str, str]:
    """The variables that tell a command where it writes its tests, and which of them are done."""
    return {_LOG: str(log), _STAGE: stage, _SIZE: str(log.stat().st_size)}


def done() -> set[str]:
    """In a command: the tests that need not be run again. All its processes see the same ones."""
    kept = of(Path(os.environ[_LOG]), os.environ[_STAGE], int(os.environ[_SIZE]))
    return {name for name, test in kept.tests.items() if test["outcome"] in GOOD}


def add_test(test: str, **more: Any) -> None:
    """In a command: write down how a test went."""
    add(Path(os.environ[_LOG]), os.environ[_STAGE], "test", test=test, **more)
