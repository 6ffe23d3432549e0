"""``python -m benchmarks NAME ...``, or ``all``: what README.md lists; 1 if a bound is missed."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import xamp
from benchmarks import (
    apex,
    apex_optimizers,
    bandwidth,
    forward,
    imports,
    instructions,
    kernels,
    machine,
    memory,
    models,
    one_pass_host,
    ops,
    picture,
    portable,
    scaler,
    step,
    syncs,
    trace,
)
from benchmarks.report import Figure, print_table

Run = Callable[[torch.device, argparse.Namespace], list[Figure]]
BENCHMARKS: dict[str, tuple[str, Run]] = {
    "step": ("A training step over the hand-written torch.amp loop's", lambda d, a: step.run(d, a.rounds)),
    "scaler": ("A training step under xamp.GradScaler over one under torch's", lambda d, a: scaler.run(d, a.rounds)),
    "forward": ("A managed forward less `with torch.autocast`", lambda d, a: forward.run(d, a.rounds)),
    "models": ("Steps of whole models over other ways", lambda d, a: models.run(d, a.rounds, a.quick, a.peak)),
    "portable": (
        "Steps under the portable op policy over the native one",
        lambda d, a: portable.run(d, a.quick, a.rounds),
    ),
    "bandwidth": ("Unscale and step: share of the copy bandwidth", lambda d, a: bandwidth.run(d, a.rounds)),
    "kernels": ("Kernels of a step in one pass", lambda d, a: kernels.run(d, a.rounds)),
    "one-pass-host": ("The host's part of a step in one pass", lambda d, a: one_pass_host.host(a.rounds)),
    "ops": ("Operators under the portable op policy, on a CPU", lambda d, a: ops.run(min(7, a.rounds // 3))),
    "apex": ("Functions under xamp.apex's casts, on a CPU", lambda d, a: apex.run(a.rounds)),
    "apex-optimizers": ("Steps of xamp.apex's optimizers", lambda d, a: apex_optimizers.run(d, a.rounds)),
    "syncs": ("Waits for the device in one step", lambda d, a: syncs.run(d)),
    "memory": ("Peak bytes a parameter, Adam", lambda d, a: memory.run(d)),
    "trace": ("A training step under xamp.trace over one without", lambda d, a: trace.run(d, a.rounds)),
    "import": ("Import, beyond torch", lambda d, a: imports.run()),
    "instructions": ("Instructions of one step, on a CPU", lambda d, a: instructions.run(a.callgrind)),
}
QUICK_ROUNDS, ROUNDS = 21, 150


def main() -> int:
    arguments = _arguments()
    torch.set_num_threads(1)
    if arguments.device:
        os.environ["XAMP_DEVICE"] = arguments.device  # what xamp.accel answers for
    device = xamp.device()
    about = machine.described(device)
    print(f"torch {torch.__version__}, {device} ({about['device']}), 1 thread, load {about['load']}")
    names = list(BENCHMARKS) if "all" in arguments.what else list(dict.fromkeys(arguments.what))
    done: dict[str, list[Figure]] = {}
    for name in names:
        title, run = BENCHMARKS[name]
        done[name] = run(device, arguments)
        print_table(title, done[name])
        if name == "step" and arguments.phases:
            done["phases"] = step.phases(device, arguments.rounds)
            print_table("Where it goes, us", done["phases"])
        about["load at the end"] = machine.described(device)["load"]
        _write(arguments, about, done)  # so that what is done stays if a later one fails
    missed = [f"{name}: {f.case}" for name, figures in done.items() for f in figures if f.missed]
    print(f"\nmissed: {'; '.join(missed)}" if missed else "\nall within bounds")
    return 1 if missed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("what", choices=[*BENCHMARKS, "all"], nargs="+")
    parser.add_argument("--device", help="default: the one xamp finds best")
    parser.add_argument("--rounds", type=int, help=f"interleaved rounds of a timed pair (default: {ROUNDS})")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds, and the large models left out")
    parser.add_argument("--phases", action="store_true", help="step: also where the time goes")
    parser.add_argument("--callgrind", action="store_true", help="instructions: also the processor's, some 10 minutes")
    parser.add_argument("--peak", type=float, metavar="FLOPS", help="models: the data sheet's in 16 bits, a second")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures there too")
    parser.add_argument("--png", metavar="FILE", type=Path, help="draw the ratios there (needs matplotlib)")
    arguments = parser.parse_args()
    if arguments.rounds is None:
        arguments.rounds = QUICK_ROUNDS if arguments.quick else ROUNDS
    return arguments


def _write(arguments: argparse.Namespace, about: dict[str, object], done: dict[str, list[Figure]]) -> None:
    if arguments.json is not None:
        found = {name: [_record(figure) for figure in figures] for name, figures in done.items()}
        text = json.dumps({"machine": {**about, "quick": arguments.quick}, "found": found}, indent=1)
        arguments.json.write_text(text + "\n", encoding="utf-8")
    if arguments.png is not None:
        versions = about["versions"]
        assert isinstance(versions, dict)
        picture.draw(done, f"{about['device']}, torch {versions['torch']}, {about['date']}", arguments.png)


def _record(figure: Figure) -> dict[str, object]:
    return {**dataclasses.asdict(figure), "missed": figure.missed}


if __name__ == "__main__":
    sys.exit(main())
