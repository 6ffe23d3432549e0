"""Run the conformance suite: check that each level means on a device what it means everywhere.

The suite runs on every usable device, or on the devices that you name; those must be usable. A declared capability that
does not work is a failure. A capability that the backend does not declare is listed as such; --require turns this, and
every skip, into a failure. Needs pytest and rich: pip install 'xamp[conformance]'. Exit code 1 where a clause fails or
no requested device is usable, 2 where a name is unknown.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xamp
from xamp.cli._words import as_typed, named
from xamp.errors import BackendUnavailable, PolicyError, XampError

if TYPE_CHECKING:
    from xamp.testing.lane import Lane
    from xamp.testing.run import Listener, Result

__all__ = ["SCHEMA", "add_arguments", "run"]

SCHEMA = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``xamp conformance``."""
    parser.add_argument(
        "--device",
        action="append",
        default=[],
        type=named,
        metavar="D",
        help="such as cuda or npu:1, or a backend's name (repeatable)",
    )
    parser.add_argument(
        "--backend", default="auto", type=named, metavar="B", help="by name; default: the best one for the device"
    )
    parser.add_argument(
        "--require",
        action="append",
        default=[],
        type=named,
        metavar="CAP,...",
        help="capabilities that must be there, such as O2,bf16,fused,distributed (repeatable)",
    )
    parser.add_argument(
        "--clause",
        action="append",
        default=[],
        type=named,
        metavar="NAME",
        help="run these only: a name or a glob, such as 'scaling.*' (repeatable)",
    )
    parser.add_argument(
        "--jobs", type=_count, default=1, metavar="N", help="processes that share the clauses (default: %(default)s)"
    )
    parser.add_argument("--ledger", default="", metavar="F", help="known gaps; default: what the backend's spec names")
    parser.add_argument("--json", default="", metavar="F", help="write the results to a file, - for standard output")
    parser.add_argument("--junit", default="", metavar="F", help="write the results to a file as JUnit XML")


def run(args: argparse.Namespace) -> int:
    """Run the suite. Return 0 where all that is declared passes, 1 where something failed, 2 for wrong use."""
    reason = _reason_not_to_run(args)
    if reason:
        return _say(2, reason)
    try:
        lanes = _lanes(args)
    except BackendUnavailable as error:
        return _say(1 if _is_known(args) else 2, as_typed(error))
    except XampError as error:
        return _say(2, as_typed(error))
    if not lanes:
        return _say(1, "no backend can be used here; xamp doctor says why")
    from xamp.cli import _conformance_junit
    from xamp.cli._conformance_text import Progress, render

    try:
        with Progress() as progress:
            results = _results(lanes, args, progress)
    except PolicyError as error:
        return _say(2, as_typed(error))
    described = json.dumps(_describe(lanes, results, args.clause), indent=2)
    if args.json == "-":
        print(described)
    else:
        if args.json:
            Path(args.json).write_text(described + "\n", encoding="utf-8")
        render(lanes, results, whole=not args.clause)
    if args.junit:
        try:
            _conformance_junit.write(Path(args.junit), lanes, results)
        except OSError as error:
            return _say(2, f"--junit {args.junit}: {error.strerror or error}")
    return int(any(result.outcome == "failed" for result in results))


def _results(lanes: list[Lane], args: argparse.Namespace, listener: Listener) -> list[Result]:
    from xamp.testing import jobs, run

    if args.jobs > 1:
        return jobs.run(lanes, args.clause, listener, ledger=args.ledger, jobs=args.jobs)
    return run.run(lanes, args.clause, listener, ledger=args.ledger)


def _reason_not_to_run(args: argparse.Namespace) -> str:
    """Why the suite cannot run, or cannot report its results; empty where it can."""
    missing = _missing()
    if missing:
        return f"{missing} is needed: pip install 'xamp[conformance]', and a torch"
    if not __debug__:
        return "Python runs with -O, which takes the checks out: run it without"
    for option, file in (("--json", args.json), ("--junit", args.junit)):
        if file and (option, file) != ("--json", "-") and not Path(file).absolute().parent.is_dir():
            return f"{option} {file}: there is no such folder"
    return ""


def _missing() -> str:
    missing = []
    for name in ("torch", "pytest", "rich"):
        try:
            __import__(name)
        except ImportError as error:
            missing.append(f"{name} ({error})")
    return ", ".join(missing)


def _lanes(args: argparse.Namespace) -> list[Lane]:
    from xamp.testing.lane import open_lane, parse_requirements, usable_lanes
    from xamp.testing.ledger import read_ledger

    read_ledger(args.ledger)
    parse_requirements(args.require)
    if args.device:
        return [open_lane(args.backend, device, args.require) for device in dict.fromkeys(args.device)]
    if args.backend != "auto":
        return [open_lane(args.backend, "", args.require)]
    return usable_lanes(args.require)


def _is_known(args: argparse.Namespace) -> bool:
    """Whether the requested backend and device types are registered, usable or not."""
    from xamp.registry.registry import REGISTRY

    specs = [spec for spec in REGISTRY.specs() if args.backend in ("auto", spec.name)]
    types = {kind for spec in specs for kind in (spec.name, *spec.device_types)}
    return bool(specs) and all(device.partition(":")[0] in types for device in args.device)


def _describe(lanes: list[Lane], results: list[Result], clauses: list[str]) -> dict[str, Any]:
    """The results of a run, ready for JSON. While ``schema`` stays the same, keys are added and never removed."""
    from xamp.testing.run import OUTCOMES

    counts = {outcome: sum(result.outcome == outcome for result in results) for outcome in OUTCOMES}
    return {
        "schema": SCHEMA,
        "ok": not counts["failed"],
        "clauses": clauses,
        "xamp": xamp.__version__,
        "python": sys.version.split()[0],
        "lanes": [_describe_lane(lane) for lane in lanes],
        "counts": counts,
        "results": [{"tier": result.tier, **dataclasses.asdict(result)} for result in results],
    }


def _describe_lane(lane: Lane) -> dict[str, Any]:
    return {
        "lane": lane.title,
        "backend": str(lane),
        "device": str(lane.device),
        "name": lane.device_name,
        "versions": dict(lane.backend.versions()),
        "capabilities": dataclasses.asdict(lane.can),
        "required": sorted(lane.required),
    }


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a number of processes, at least 1, not {text!r}")
    return value


def _say(code: int, text: str) -> int:
    print(f"xamp conformance: {text}", file=sys.stderr)
    return code
