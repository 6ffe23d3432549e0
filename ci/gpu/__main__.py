"""All that is tested and measured on one card, in stages.

Without names all stages run; what has come to its end before is kept. The log and the result go into the folder
results/, named after the device, Python and torch. Exit code 1 where a stage failed, was cut off or killed, 2 for wrong
use, 3 where the device cannot be used, 130 or 143 where a signal ended the run.
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

from ci.gpu import machine, result
from ci.gpu.log import BAD, of
from ci.gpu.run import ROOT, Ended, run_stage
from ci.gpu.stages import Plan, Stage, stages

BY = ("contributor", "project")
Table = Callable[[Plan], Sequence[Stage]]


def main(words: Sequence[str], table: Table = stages) -> int:
    """Run what is asked for; see the module. ``table`` makes the stages."""
    args = _parsed(words)
    environment = _surroundings(args.out)
    about = machine.ask("cpu" if args.rehearse else args.device, environment)
    if isinstance(about, str):
        return _say(3, f"{about}\nxamp doctor says more")
    if about["type"] == "cpu" and not (args.rehearse or args.device):
        return _say(3, "there is no device here but the CPU; --rehearse runs small parts of all on it")
    by = os.environ.get("XAMP_BY", BY[0])
    if by not in BY:
        return _say(2, f"XAMP_BY={by!r}: it must be one of {', '.join(BY)}")
    log = args.out.absolute() / f"{machine.file_name(about)}{'-rehearsal' * args.rehearse}.log"
    plan = Plan(about, max(1, args.jobs), log, os.environ.get("XAMP_APEX", ""), args.rehearse)
    every = list(table(plan))
    names = [stage.name for stage in every]
    if wrong := [name for name in args.stages if name not in names]:
        return _say(2, f"no stage is called {' or '.join(wrong)}. There are {', '.join(names)}")
    log.parent.mkdir(parents=True, exist_ok=True)
    return _run(args, plan, every, environment, by)


def _run(args: argparse.Namespace, plan: Plan, every: Sequence[Stage], environment: Mapping[str, str], by: str) -> int:
    """Run what is chosen, and write the result after each stage; the exit code."""

    def stop(number: int, _: object) -> None:
        raise Ended(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    chosen = [stage for stage in every if not args.stages or stage.name in args.stages]
    file, until, code = plan.log.with_suffix(".json"), time.monotonic() + 60 * args.minutes, 0
    try:
        for stage in chosen:
            run_stage(plan.log, stage, environment, until, again=args.again)
            file.write_text(json.dumps(result.made(plan, every, by), indent=1) + "\n", encoding="utf-8")
    except Ended as ended:
        code = 128 + int(ended.args[0])
    found = result.made(plan, every, by)
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    result.show(found)
    print(f"{file.name} has the result, {plan.log.name} the log, in {args.out}", flush=True)
    return code or int(any(of(plan.log, stage.name).end["outcome"] in BAD for stage in chosen))


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="ci/gpu.sh", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("stages", nargs="*", metavar="STAGE", help="these only; without a name all")
    add("--device", default="", metavar="D", help="its type, such as cuda; default: the best one")
    add("--rehearse", action="store_true", help="run a small part of every stage, on the CPU")
    add("--again", action="store_true", help="take up stages that failed, too: what did not pass is run again")
    add("--minutes", type=float, default=1e6, metavar="M", help="all must be over after so long; what is left is told")
    add("--jobs", type=int, default=min(16, os.cpu_count() or 1), metavar="N", help="workers (default: %(default)s)")
    add("--out", type=Path, default=ROOT / "results", metavar="FOLDER", help="of the log and the result")
    return parser.parse_args(words)


def _surroundings(out: Path) -> dict[str, str]:
    """The environment of commands: this checkout first among what is imported, pytest without any plugin around.

    None of them is a worker of pytest, even where this process is. Compiled kernels lie beside the log, for a machine
    that comes bare later.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    more = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST_")}
    return {**kept, **more, "TRITON_CACHE_DIR": str(out.absolute() / "triton")}


def _say(code: int, text: str) -> int:
    """Print why this stops here; return the exit code."""
    print(f"ci/gpu.sh: {text}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
