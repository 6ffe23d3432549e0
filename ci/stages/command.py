"""What the commands over stages have in common: their options, how they run what is chosen, their exit codes."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ci.stages.log import BAD
from ci.stages.runner import Runner, Stopped
from ci.stages.stage import Stage

__all__ = ["ROOT", "add_options", "follow", "say", "shown", "unknown"]

ROOT = Path(__file__).resolve().parent.parent.parent


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those that steer which stages run, for how long, and from where they go on."""
    add = parser.add_argument
    add("stages", nargs="*", metavar="STAGE", help="these only; without a name all")
    add("--again", action="store_true", help="take up stages that failed, too: what did not pass is run again")
    add("--fresh", action="store_true", help="forget what these stages have done")
    add("--report", action="store_true", help="run nothing: make the result and the table from the log")
    add("--minutes", type=float, default=1e6, metavar="M", help="all must be over after so long; what is left is told")
    add("--jobs", type=int, default=min(16, os.cpu_count() or 1), metavar="N", help="workers (default: %(default)s)")
    add("--out", type=Path, default=ROOT / "results", metavar="FOLDER", help="of the log and the result")


def unknown(names: Sequence[str], every: Sequence[Stage]) -> str:
    """What is wrong with names that were given; empty if nothing is."""
    found = [name for name in names if name not in {stage.name for stage in every}]
    there = ", ".join(stage.name for stage in every)
    return f"no stage is called {' or '.join(found)}. There are {there}" if found else ""


def follow(args: argparse.Namespace, runner: Runner, chosen: Sequence[Stage], write: Callable[[Stage], object]) -> int:
    """Run what is chosen; ``write`` keeps the result after each stage.

    Returns:
        The exit code: 1 where a stage failed, was cut off or killed, 130 or 143 where a signal ended this.
    """
    signal.signal(signal.SIGTERM, _stop)
    code = 0
    try:
        for stage in chosen if not args.report else ():
            if args.fresh:
                runner.forget(stage)
            runner.run(stage, again=args.again)
            write(stage)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except Stopped as stopped:
        code = 128 + int(stopped.args[0])
    return code or int(any(runner.log.of(stage.name).outcome in BAD for stage in chosen))


def shown(path: Path) -> str:
    """A path as it is printed."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def say(command: str, code: int, text: str) -> int:
    """Print why ``command`` stops here; return its exit code."""
    print(f"{command}: {text}", file=sys.stderr)
    return code


def _stop(number: int, _: object) -> None:
    raise Stopped(number)
