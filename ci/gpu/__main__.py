"""All that is tested and measured on one card, in stages.

Without names all stages run, in this order; what has come to its end before is kept. The log and the result go into
the folder results/, named after the device, Python and torch. Exit code 1 where a stage failed, was cut off or killed,
2 for wrong use, 3 where the device cannot be used, 130 or 143 where a signal ended the run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ci.gpu import machine, result
from ci.gpu.log import BAD, Log
from ci.gpu.runner import Runner, Stopped, surroundings
from ci.gpu.stage import Stage
from ci.gpu.table import Plan, stages

ROOT = Path(__file__).resolve().parent.parent.parent
BY = ("contributor", "project")
_HOST = "cpu"

Table = Callable[[Plan], Sequence[Stage]]


def main(words: Sequence[str], table: Table = stages) -> int:
    """Run what is asked for; see the module. ``table`` makes the stages."""
    args = _parsed(words)
    kept = {"TRITON_CACHE_DIR": str(args.out.absolute() / "triton")}  # a machine that comes bare later has them
    environment = {**surroundings(ROOT), **kept}
    device = _HOST if args.rehearse else args.device
    try:
        about = machine.ask(device, environment)
    except machine.NoDevice as error:
        return _say(3, f"{error}\nxamp doctor says more")
    if about["type"] == _HOST and not (args.rehearse or device):
        return _say(3, "there is no device here but the CPU; --rehearse runs small parts of all on it")
    by = os.environ.get("XAMP_BY", BY[0])
    if by not in BY:
        return _say(2, f"XAMP_BY={by!r}: it must be one of {', '.join(BY)}")
    plan = _plan(args, about)
    every = list(table(plan))
    names = [stage.name for stage in every]
    if wrong := [name for name in args.stages if name not in names]:
        return _say(2, f"no stage is called {' or '.join(wrong)}. There are {', '.join(names)}")
    chosen = [stage for stage in every if stage.name in args.stages] if args.stages else every
    return _run(args, plan, every, chosen, environment, by)


def _run(
    args: argparse.Namespace,
    plan: Plan,
    every: Sequence[Stage],
    chosen: Sequence[Stage],
    environment: Mapping[str, str],
    by: str,
) -> int:
    runner = Runner(Log(plan.log), ROOT, environment, time.monotonic() + 60 * args.minutes)

    def write() -> dict[str, Any]:
        found = result.made(runner.log, every, plan.about, by, rehearsal=plan.rehearse)
        _result_of(plan).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return found

    code = _follow(args, runner, chosen, write)
    result.show(write())
    print(f"{_shown(_result_of(plan))} has the result, {_shown(plan.log)} the log", flush=True)
    return code


def _follow(args: argparse.Namespace, runner: Runner, chosen: Sequence[Stage], write: Callable[[], object]) -> int:
    """Run what is chosen, and write the result after each stage; the exit code."""

    def stop(number: int, _: object) -> None:
        raise Stopped(number)

    signal.signal(signal.SIGTERM, stop)
    code = 0
    try:
        for stage in chosen if not args.report else ():
            if args.fresh:
                runner.log.add(stage.name, "forget")
            runner.run(stage, again=args.again)
            write()
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except Stopped as stopped:
        code = 128 + int(stopped.args[0])
    return code or int(any(runner.log.of(stage.name).outcome in BAD for stage in chosen))


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="ci/gpu.sh", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("stages", nargs="*", metavar="STAGE", help="these only; without a name all")
    add("--device", default="", metavar="D", help="its type, such as cuda; default: the best one")
    add("--rehearse", action="store_true", help="run a small part of every stage, on the CPU")
    add("--again", action="store_true", help="take up stages that failed, too: what did not pass is run again")
    add("--fresh", action="store_true", help="forget what these stages have done")
    add("--report", action="store_true", help="run nothing: make the result and the table from the log")
    add("--minutes", type=float, default=1e6, metavar="M", help="all must be over after so long; what is left is told")
    add("--jobs", type=int, default=min(16, os.cpu_count() or 1), metavar="N", help="workers (default: %(default)s)")
    add("--out", type=Path, default=ROOT / "results", metavar="FOLDER", help="of the log and the result")
    return parser.parse_args(words)


def _plan(args: argparse.Namespace, about: Mapping[str, Any]) -> Plan:
    folder: Path = args.out.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    name = machine.file_name(about) + ("-rehearsal" if args.rehearse else "")
    apex = os.environ.get("XAMP_APEX", "")
    return Plan(about, max(1, args.jobs), folder / f"{name}.png", folder / f"{name}.log", apex, args.rehearse)


def _result_of(plan: Plan) -> Path:
    return plan.log.with_name(plan.log.name.removesuffix(".log") + ".json")


def _shown(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def _say(code: int, text: str) -> int:
    """Print why this stops here; return the exit code."""
    print(f"ci/gpu.sh: {text}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
