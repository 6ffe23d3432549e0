"""Tries the newest torch of the index, a pre-release too, while no test of this project has run on it yet.

It is a guard for tomorrow: what fails on such a torch is told, with an exit code of its own, and breaks nothing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ci.devices_data import ROOT, load
from ci.nightly.content import hash_of
from ci.stages import summary
from ci.stages.command import add_options, follow, say, shown
from ci.stages.log import Log
from ci.stages.runner import Runner, surroundings
from ci.stages.stage import Stage
from ci.versions import interpreters
from ci.versions.environments import Environment, NotMade, make
from ci.versions.stages import quick_tests

__all__ = ["UNTESTED_FAILS", "main", "newer", "offered"]

COMMAND = "ci/versions.sh newest"
UNTESTED_FAILS = 4
"""The exit code where tests fail on a torch that is not in ci/devices.toml."""
_CONTENT = ("xamp/", "backends/", "tests/", "ci/versions/")


def main(words: Sequence[str]) -> int:
    """Try it.

    Returns:
        0 where nothing is to do or all tests pass, :data:`UNTESTED_FAILS` where tests fail, 1 where they could not be
        run, 130 or 143 where a signal ended the run.
    """
    parser = argparse.ArgumentParser(prog=COMMAND, description=(__doc__ or "").partition("\n")[0])
    add_options(parser)
    args = parser.parse_args(words)
    if args.stages:
        return say(COMMAND, 2, f"{args.stages[0]!r} means nothing here: it takes the newest release that there is")
    last = load().releases[-1]
    try:
        versions = offered(interpreters.find(last.python))
        torch = newer(versions, last.torch)
        if not torch:
            print(f"torch {last.torch} is in ci/devices.toml, and the index has none that is newer: nothing to do")
            return 0
        there = Environment(torch, last.python, name="newest", loose=True)
        make(there)
    except (interpreters.NoInterpreter, NotMade) as error:
        return say(COMMAND, 1, str(error))
    return _try(args, there)


def offered(python: str) -> list[str]:
    """The versions of torch that the index has for a Python, pre-releases too.

    Raises:
        NotMade: pip does not say.
    """
    ask = [python, "-m", "pip", "index", "versions", "torch", "--pre", "--disable-pip-version-check"]
    done = subprocess.run(ask, capture_output=True, text=True, check=False)
    found = re.search(r"^Available versions: (.*)$", done.stdout, re.MULTILINE)
    if done.returncode or not found:
        last = (done.stderr.strip() or done.stdout.strip()).rpartition("\n")[2]
        raise NotMade(f"pip does not say which versions of torch the index has: {last}")
    return found[1].split(", ")


def newer(versions: Sequence[str], than: str) -> str:
    """The newest version, without the name of its build, if it is newer than one; else an empty text."""
    version = _versions_of_pip()
    newest = max(map(version, [*versions, than]))
    return str(newest.public) if version(str(newest.public)) > version(than) else ""


def _versions_of_pip() -> Any:
    for name in ("packaging.version", "pip._vendor.packaging.version"):
        try:
            return importlib.import_module(name).Version
        except ImportError:
            continue
    raise NotMade("nothing here compares versions: take a Python with pip, or pip install packaging")


def _try(args: argparse.Namespace, there: Environment) -> int:
    args.out.mkdir(parents=True, exist_ok=True)
    stage = quick_tests(there, args.jobs, "newest")
    log = Log(args.out / "newest.log")
    log.about(stage.name, f"{there.torch} {hash_of(ROOT, _CONTENT)}")
    runner = Runner(log, ROOT, surroundings(ROOT), time.monotonic() + 60 * args.minutes)
    file = args.out / "newest.json"
    code = follow(args, runner, [stage], lambda _: _write(file, stage, log, there))
    return _told(stage, log, there, file, code)


def _write(file: Path, stage: Stage, log: Log, there: Environment) -> None:
    kept = log.of(stage.name)
    about = {"torch": there.torch, "python": there.python, "failures": list(summary.failures("tests", kept))}
    file.write_text(json.dumps({**summary.of(stage, kept), **about}, indent=1) + "\n", encoding="utf-8")


def _told(stage: Stage, log: Log, there: Environment, file: Path, code: int) -> int:
    """Say what came of it; the exit code."""
    kept = log.of(stage.name)
    for failure in summary.failures("tests", kept):
        print(f"{failure['test']}: {failure['reason']}")
    counts = summary.counts(kept)
    if kept.outcome == "passed":
        print(f"torch {there.torch}: all tests of the quick tier pass, {counts['passed']}", flush=True)
        return code
    if kept.outcome != "failed" or not counts.get("failed"):
        print(f"torch {there.torch}: {kept.outcome}: {summary.of(stage, kept)['reason']}", file=sys.stderr, flush=True)
        return code or 1
    print(f"torch {there.torch}: {counts['failed']} tests fail, {counts.get('passed', 0)} pass; {shown(file)} has them")
    return UNTESTED_FAILS
