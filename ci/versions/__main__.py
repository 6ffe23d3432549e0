"""xamp on each release of torch that ci/devices.toml names for the CPU: ``ci/versions.sh`` says how to call it.

Exit code 1 where something failed or could not be made, 2 for wrong use, 130 or 143 where a signal ended the run.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from ci.devices_data import ROOT, Release, load
from ci.nightly import __main__ as nightly
from ci.nightly.parts import of_releases
from ci.stages.command import add_options, say
from ci.stages.log import BAD, Log
from ci.stages.runner import Runner, surroundings
from ci.versions import newest, table
from ci.versions.environments import Environment, NotMade, make
from ci.versions.interpreters import NoInterpreter
from ci.versions.stages import name_of, smoke

COMMAND = "ci/versions.sh"


def main(words: Sequence[str]) -> int:
    """Run what is asked for; see ``ci/versions.sh``."""
    commands = {"make": _make, "run": _run, "smoke": _smoke, "list": _list, "newest": newest.main}
    if not words or words[0] not in commands:
        return say(COMMAND, 2, f"name one of {', '.join(commands)}; the head of {COMMAND} says what each does")
    return commands[words[0]](words[1:])


def _make(words: Sequence[str]) -> int:
    """Make the environments of some releases, or of all; say which were left out, and why."""
    parser = argparse.ArgumentParser(prog=f"{COMMAND} make")
    parser.add_argument("releases", nargs="*", metavar="RELEASE")
    asked = parser.parse_args(words).releases
    every = {release.torch: release for release in load().releases}
    if wrong := [torch for torch in asked if torch not in every]:
        return say(COMMAND, 2, f"{wrong[0]!r} is no release of ci/devices.toml: there are {', '.join(every)}")
    code = 0
    for release in [every[torch] for torch in asked] or load().whole:
        try:
            make(_of(release))
        except (NoInterpreter, NotMade) as error:
            code = say(COMMAND, 1, f"torch {release.torch} is left out: {error}")
    return code


def _run(words: Sequence[str]) -> int:
    """Run all that a release is tested with, as parts of ci/nightly.sh; with ``--quick`` a part of it."""
    parser = argparse.ArgumentParser(prog=f"{COMMAND} run", allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="tests that take a moment, and few of two ranks")
    add_options(parser)
    args = parser.parse_args(words)
    names = {release.torch: name_of(release.torch, args.quick) for release in load().whole}
    if wrong := [torch for torch in args.stages if torch not in names]:
        return say(COMMAND, 2, f"{wrong[0]!r} is no release on which all tests run: there are {', '.join(names)}")
    options = [names.get(word, word) for word in words if word != "--quick"]
    # What came of a part of the tests is not kept in the checkout.
    kept = args.out if args.quick else nightly.KEPT
    return nightly.main(options, lambda jobs: of_releases(jobs, quick=args.quick), kept, table.show)


def _smoke(words: Sequence[str]) -> int:
    """Run some tests on the oldest and the newest release, where their environments are there."""
    argparse.ArgumentParser(prog=f"{COMMAND} smoke").parse_args(words)
    whole = load().whole
    outcomes = [_smoke_of(_of(release)) for release in (whole[0], whole[-1])]
    return int(any(outcome in BAD for outcome in outcomes))


def _smoke_of(there: Environment) -> str:
    if why := there.why_not():
        print(f"== torch {there.torch} is left out, {why}: {COMMAND} make {there.torch}", flush=True)
        return "left out"
    stage = smoke(there)
    with tempfile.TemporaryDirectory(prefix="xamp-smoke-") as folder:
        runner = Runner(Log(Path(folder) / "smoke.log"), ROOT, surroundings(ROOT), time.monotonic() + stage.limit)
        runner.run(stage)
        return runner.log.of(stage.name).outcome


def _list(words: Sequence[str]) -> int:
    """Say which environments are there."""
    argparse.ArgumentParser(prog=f"{COMMAND} list").parse_args(words)
    for release in load().whole:
        there = _of(release)
        print(f"torch {there.torch}, Python {there.python}: {there.why_not() or there.path}")
    return 0


def _of(release: Release) -> Environment:
    return Environment(release.torch, release.python)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
