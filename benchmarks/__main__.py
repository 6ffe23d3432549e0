"""``python -m benchmarks step|scaler|forward|ops|apex|syncs|memory|trace|import|all``; 1 if a bound is missed."""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import xamp
from benchmarks import apex, forward, imports, memory, ops, scaler, step, syncs, trace
from benchmarks.report import Figure, print_table

Run = Callable[[torch.device, argparse.Namespace], list[Figure]]
BENCHMARKS: dict[str, tuple[str, Run]] = {
    "step": ("A training step over the hand-written torch.amp loop's", lambda d, a: step.run(d, a.rounds)),
    "scaler": ("A training step under xamp.GradScaler over one under torch's", lambda d, a: scaler.run(d, a.rounds)),
    "forward": ("A managed forward less `with torch.autocast`", lambda d, a: forward.run(d, a.rounds)),
    "ops": ("Operators under the portable op policy, on a CPU", lambda d, a: ops.run()),
    "apex": ("Functions under xamp.apex's casts, on a CPU", lambda d, a: apex.run(a.rounds)),
    "syncs": ("Waits for the device in one step", lambda d, a: syncs.run(d)),
    "memory": ("Peak bytes a parameter, Adam", lambda d, a: memory.run(d)),
    "trace": ("A training step under xamp.trace over one without", lambda d, a: trace.run(d, a.rounds)),
    "import": ("Import, beyond torch", lambda d, a: imports.run()),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("what", choices=[*BENCHMARKS, "all"], nargs="+")
    parser.add_argument("--device", help="default: the one xamp finds best")
    parser.add_argument("--rounds", type=int, default=150, help="interleaved rounds of a timed pair (default: 150)")
    parser.add_argument("--phases", action="store_true", help="step: also where the time goes")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures there too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(arguments.device) if arguments.device else xamp.device()
    print(f"torch {torch.__version__}, {device}, 1 thread, {platform.processor() or platform.machine()}")
    names = list(BENCHMARKS) if "all" in arguments.what else list(dict.fromkeys(arguments.what))
    done: dict[str, list[Figure]] = {}
    for name in names:
        title, run = BENCHMARKS[name]
        done[name] = run(device, arguments)
        print_table(title, done[name])
        if name == "step" and arguments.phases:
            done["phases"] = step.phases(device, arguments.rounds)
            print_table("Where it goes, us", done["phases"])
    missed = [f"{name}: {f.case}" for name, figures in done.items() for f in figures if f.missed]
    if arguments.json is not None:
        found = {name: [_record(figure) for figure in figures] for name, figures in done.items()}
        arguments.json.write_text(json.dumps({"torch": torch.__version__, "device": str(device), **found}, indent=1))
    print(f"\nmissed: {'; '.join(missed)}" if missed else "\nall within bounds")
    return 1 if missed else 0


def _record(figure: Figure) -> dict[str, object]:
    return {**dataclasses.asdict(figure), "missed": figure.missed}


if __name__ == "__main__":
    sys.exit(main())
