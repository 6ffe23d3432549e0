"""Runs a stage, keeps what it does in the log, and goes on from there."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ci.gpu.log import LACKING, Kept, add, of, told
from ci.gpu.result import now
from ci.gpu.stages import FILE, Stage, Step, is_there

__all__ = ["Ended", "run_stage"]

ROOT = Path(__file__).resolve().parent.parent.parent
GRACE = 15.0
"""Seconds in which a command that is told to end may write down what it has."""
LEAST = 20.0
"""A stage is not taken up with fewer seconds left."""


class Ended(BaseException):
    """A signal asks this process to end. Its argument is the signal's number."""


def run_stage(log: Path, stage: Stage, environment: Mapping[str, str], until: float, *, again: bool = False) -> None:
    """Run a stage, or what is left of it. One that came to its end is kept, unless ``again`` and it failed.

    ``until`` is when, by ``time.monotonic``, all must be over.
    """
    kept = of(log, stage.name)
    before = kept.end["outcome"]
    if before == "passed" or (before == "failed" and not again):
        print(f"== {stage.name}: {before} before, and kept", flush=True)
        return
    left = min(stage.limit, until - time.monotonic())
    if stage.lacks:
        outcome, reason = "left out", stage.lacks
    elif left < min(LEAST, stage.limit):
        outcome, reason = "not reached", "no time was left"
    else:
        print(f"== {stage.name}: {stage.what}", flush=True)
        add(log, stage.name, "start")
        try:
            outcome, reason = _outcome(log, stage, kept, environment, time.monotonic() + left)
        except BaseException:
            add(log, stage.name, "end", outcome="killed", reason="the run was ended", when=now())
            raise
    add(log, stage.name, "end", outcome=outcome, reason=reason, when=now())
    seconds = of(log, stage.name).seconds
    print(f"== {stage.name}: {outcome} after {seconds:.0f} s{f': {reason}' if reason else ''}", flush=True)


def _outcome(log: Path, stage: Stage, kept: Kept, environment: Mapping[str, str], until: float) -> tuple[str, str]:
    missing = [f"{step.needs} is not there" for step in stage.steps if not is_there(step.needs)]
    if len(missing) == len(stage.steps):
        return "left out", missing[0]
    for step in stage.steps:
        old = kept.steps.get(step.name)
        if old and old["code"] in step.accepts and not old["cut"] and not step.tests:
            continue  # a command that runs tests is run again: it leaves out those that passed
        if is_there(step.needs):
            told_of = {**environment, **told(log, stage.name)}
            ended = _step(step, told_of, until - time.monotonic())
            add(log, stage.name, "step", step=step.name, **ended)
            if ended["cut"]:
                return "cut off", f"{step.name} was not done when its time was over"
            if ended["code"] < 0:
                return "killed", f"{step.name} ended by {signal.Signals(-ended['code']).name}"
    return _verdict(stage, of(log, stage.name), missing)


def _verdict(stage: Stage, kept: Kept, missing: Sequence[str]) -> tuple[str, str]:
    """Of a stage whose commands all came to an end."""
    ran = [(step, kept.steps[step.name]) for step in stage.steps if step.name in kept.steps]
    wrong = [f"{step.name} ended with code {end['code']}" for step, end in ran if end["code"] not in step.accepts]
    outcomes = [test["outcome"] for test in kept.tests.values()]
    lacking = sorted({test["reason"] for test in kept.tests.values() if test["outcome"] == LACKING})
    told_of = "; ".join([*missing, *([f"not there: {', '.join(lacking)}"] if lacking else [])])
    if any(step.tests for step in stage.steps):
        if lacking and outcomes.count(LACKING) == len(outcomes):
            return "left out", told_of
        if "failed" in outcomes:
            wrong.insert(0, f"{outcomes.count('failed')} failed")
        elif not outcomes:
            wrong.append("there were no tests")
        elif any(step.tests and end["code"] == 1 for step, end in ran):
            wrong.append("it ended with code 1, and no test had failed")
    return ("failed", "; ".join(wrong)) if wrong else ("passed", told_of)


def _step(step: Step, environment: Mapping[str, str], limit: float) -> dict[str, Any]:
    """Run a command in a group of processes of its own, which ends with it, and show what it prints.

    At ``limit`` seconds the group gets SIGTERM, and :data:`GRACE` later SIGKILL.
    """
    began, cut, shown = time.monotonic(), False, list[str]()
    with tempfile.TemporaryDirectory(prefix="xamp-gpu-") as folder:
        file = Path(folder) / "found.json"
        words = [str(file) if word == FILE else word for word in step.command]
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(
            words, env=environment, cwd=ROOT, start_new_session=True, text=True, errors="replace", **streams
        )
        reader = threading.Thread(target=_show, args=(process, shown), daemon=True)
        reader.start()
        try:
            process.wait(max(limit, 0.0))
        except subprocess.TimeoutExpired:
            cut = True
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired, ProcessLookupError):
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGTERM)
                    process.wait(GRACE)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what the command has left running, too
            code = process.wait()
            reader.join(5.0)  # what has left the group may hold the pipe
        output = "".join(shown)
        data = None
        with contextlib.suppress(OSError, ValueError):
            text = file.read_text(encoding="utf-8") if FILE in step.command else output[output.index("{") :]
            data = json.JSONDecoder().raw_decode(text)[0] if "--json" in step.command or FILE in step.command else None
    seconds = round(time.monotonic() - began, 1)
    return {"code": code, "cut": cut, "seconds": seconds, "tail": output[-4000:], "data": data}


def _show(process: subprocess.Popen[str], shown: list[str]) -> None:
    assert process.stdout is not None
    with process.stdout as pipe:
        for line in pipe:
            shown.append(line)
            print(line, end="", flush=True)
