"""Runs stages, keeps what they do in the log, and goes on from there."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import json
import os
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ci.gpu.keep import DONE, LOG, STAGE
from ci.gpu.log import GOOD, LACKING, Kept, Log
from ci.gpu.process import Ended, run
from ci.gpu.stage import FILE, Stage, Step, is_there

__all__ = ["Runner", "Stopped", "surroundings"]

LEAST = 20.0
"""A stage is not taken up with fewer seconds left."""


class Stopped(BaseException):
    """A signal asks this process to end. Its argument is the signal's number."""


@dataclasses.dataclass
class Runner:
    """Runs stages.

    Attributes:
        log: what they do is kept there.
        folder: where their commands run.
        environment: of their commands.
        until: when, by ``time.monotonic``, all must be over.
    """

    log: Log
    folder: Path
    environment: Mapping[str, str]
    until: float = float("inf")

    def run(self, stage: Stage, *, again: bool = False) -> None:
        """Run a stage, or what is left of it. One that came to its end is kept, unless ``again`` and it failed."""
        kept = self.log.of(stage.name)
        if kept.outcome == "passed" or (kept.outcome == "failed" and not again):
            print(f"== {stage.name}: {kept.outcome} before, and kept", flush=True)
            return
        left = min(stage.limit, self.until - time.monotonic())
        if not stage.lacks and left < min(LEAST, stage.limit):
            self._end(stage, "not reached", "no time was left")
            return
        print(f"== {stage.name}: {stage.what}", flush=True)
        self.log.add(stage.name, "start", when=_now())
        try:
            outcome, reason = self._outcome(stage, kept, time.monotonic() + left)
        except (KeyboardInterrupt, Stopped):
            self._end(stage, "killed", "the run was ended")
            raise
        self._end(stage, outcome, reason)

    def _outcome(self, stage: Stage, kept: Kept, until: float) -> tuple[str, str]:
        if stage.lacks:
            return "left out", stage.lacks
        missing: list[str] = []
        for step in stage.steps:
            if _is_done(step, kept):
                continue
            if lacking := [name for name in step.needs if not is_there(name)]:
                missing.append(f"{', '.join(lacking)} is not there")
                continue
            ended = self._step(stage, step, kept, until - time.monotonic())
            if ended.cut:
                return "cut off", f"{step.name} was not done when its time was over"
            if ended.code < 0:
                return "killed", f"{step.name} ended by {signal.Signals(-ended.code).name}"
        if missing and len(missing) == len(stage.steps):
            return "left out", "; ".join(missing)
        return _verdict(stage, self.log.of(stage.name), missing)

    def _step(self, stage: Stage, step: Step, kept: Kept, limit: float) -> Ended:
        with tempfile.TemporaryDirectory(prefix="xamp-gpu-") as folder:
            file, done = Path(folder) / "found.json", Path(folder) / "done.txt"
            told = {LOG: str(self.log.path), STAGE: stage.name}
            if passed := [name for name, test in kept.tests.items() if test["outcome"] in GOOD]:
                done.write_text("".join(f"{name}\n" for name in passed), encoding="utf-8")
                told[DONE] = str(done)
                print(f"== {stage.name}: {len(passed)} passed before, and are not run again", flush=True)
            words = [str(file) if word == FILE else word for word in step.command]
            ended = run(words, {**self.environment, **told}, max(limit, 0.0), self.folder)
            found = _read(file)
        about = {"code": ended.code, "seconds": round(ended.seconds, 1), "cut": ended.cut, "tail": ended.tail}
        self.log.add(stage.name, "step", step=step.name, data=found, **about)
        return ended

    def _end(self, stage: Stage, outcome: str, reason: str) -> None:
        self.log.add(stage.name, "end", outcome=outcome, reason=reason, when=_now())
        seconds = self.log.of(stage.name).seconds
        print(f"== {stage.name}: {outcome} after {seconds:.0f} s{f': {reason}' if reason else ''}", flush=True)


def _verdict(stage: Stage, kept: Kept, missing: Sequence[str]) -> tuple[str, str]:
    """Of a stage whose commands all came to an end."""
    wrong = [_told(step, kept.steps[step.name]["code"]) for step in stage.steps if _is_wrong(step, kept)]
    lacking = [test["reason"] for test in kept.tests.values() if test["outcome"] == LACKING]
    if lacking:
        missing = [*missing, f"not there: {', '.join(sorted(set(lacking)))}"]
    if stage.tests:
        counts = collections.Counter(test["outcome"] for test in kept.tests.values())
        if counts and counts[LACKING] == len(kept.tests):
            return "left out", "; ".join(missing)
        if counts["failed"]:
            wrong.insert(0, f"{counts['failed']} failed")
        elif broken := [step.name for step in stage.steps if step.tests and _code(step, kept) == 1]:
            wrong.append(f"{broken[0]} ended with code 1, and no test had failed")
        elif not kept.tests:
            wrong.append("there were no tests")
    if wrong:
        return "failed", "; ".join(wrong)
    told = [step.says[code] for step in stage.steps if (code := _code(step, kept)) is not None and code in step.says]
    return "passed", "; ".join([*missing, *told])


def _is_done(step: Step, kept: Kept) -> bool:
    """Whether a command has done its work. One that runs tests is run again: it leaves out those that passed."""
    before = kept.steps.get(step.name)
    return before is not None and not step.tests and before["code"] in step.accepts and not before["cut"]


def _is_wrong(step: Step, kept: Kept) -> bool:
    return _code(step, kept) not in (None, *step.accepts)


def _code(step: Step, kept: Kept) -> int | None:
    """The exit code of a command; None where it did not run."""
    return int(kept.steps[step.name]["code"]) if step.name in kept.steps else None


def _told(step: Step, code: int) -> str:
    return f"{step.name}: {step.says[code]}" if code in step.says else f"{step.name} ended with code {code}"


def _read(file: Path) -> Any:
    """What a command has written; None where it has not, or was ended while it did."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%MZ")


def surroundings(folder: Path) -> dict[str, str]:
    """The environment of commands: this checkout first among what is imported, and pytest without any plugin around.

    None of them is a worker of pytest, even where this process is.
    """
    path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    more = {"PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return {**{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST_")}, **more}
