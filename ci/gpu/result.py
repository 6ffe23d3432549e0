"""What came of a run: one file of JSON, from which pages are made, and one table. The file names no host and no path.

    schema, rehearsal, by, when, machine     what ran, where, when
    stages          for each: name, what, outcome, reason, seconds, counts
    failures        for each test and clause that failed: stage, test, reason
    benchmarks      machine and found, as ``python -m benchmarks --json`` writes them

Besides these ``doctor``, ``fp8``, ``apex`` and ``facts`` have what these stages found, where they ran.
"""

from __future__ import annotations

import collections
import datetime
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ci.gpu.log import Kept, of
from ci.gpu.stages import MEASURED, Plan, Stage
from ci.results import cleaned

__all__ = ["SCHEMA", "made", "now", "show"]

SCHEMA = 1
_HEADS = ("stage", "outcome", "passed", "failed", "others", "seconds", "")


def now() -> str:
    """The time, UTC."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%MZ")


def made(plan: Plan, stages: Sequence[Stage], by: str) -> dict[str, Any]:
    """The result of all that the log has."""
    kept = {stage.name: of(plan.log, stage.name) for stage in stages}
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "rehearsal": plan.rehearse,
        "by": by,
        "when": max(each.end["when"] for each in kept.values()) or now(),
        "machine": dict(plan.about),
        "stages": [_stage(stage, kept[stage.name]) for stage in stages],
        "failures": [failure for name, each in kept.items() for failure in _failures(name, each)],
    }
    if benchmarks := _benchmarks(kept):
        found["benchmarks"] = benchmarks
    for name, each in kept.items():
        data = [step["data"] for step in each.steps.values() if step["data"] is not None]
        if data and name not in MEASURED:
            found[name] = data[-1]
    return dict(cleaned(found))


def _stage(stage: Stage, kept: Kept) -> dict[str, Any]:
    """One stage, with counts of tests by outcome, or of figures."""
    counts = dict(collections.Counter(test["outcome"] for test in kept.tests.values()))
    figures = [each for benchmark in _found(kept).values() for each in benchmark]
    if figures:
        counts = {"figures": len(figures), "bounds missed": sum(figure["missed"] for figure in figures)}
    end = {"outcome": kept.end["outcome"], "reason": _short(kept.end["reason"]), "seconds": round(kept.seconds)}
    return {"name": stage.name, "what": stage.what, **end, "counts": counts}


def _failures(stage: str, kept: Kept) -> Iterator[dict[str, str]]:
    """Each test that failed, and each command that did not come to its end."""
    for name, test in kept.tests.items():
        if test["outcome"] == "failed":
            yield {"stage": stage, "test": name, "reason": _short(test["reason"])}
    for name, step in kept.steps.items():
        if step["cut"] or step["code"] not in (0, 1, 5):
            yield {"stage": stage, "test": name, "reason": _short(step["tail"].strip().rpartition("\n")[2])}


def _short(text: str) -> str:
    return " ".join(re.sub(r"\x1b\[[0-9;]*m", "", text).split())[:300]


def _parts(kept: Kept) -> list[dict[str, Any]]:
    """What each benchmark of a stage has written."""
    found = [step["data"] for step in kept.steps.values()]
    return [each for each in found if isinstance(each, dict) and "found" in each]


def _found(kept: Kept) -> dict[str, list[dict[str, Any]]]:
    """The figures of each benchmark."""
    return {name: figures for part in _parts(kept) for name, figures in part["found"].items()}


def _benchmarks(kept: Mapping[str, Kept]) -> dict[str, Any]:
    measured = [kept[name] for name in MEASURED if name in kept]
    parts = [part for each in measured for part in _parts(each)]
    if not parts:
        return {}
    machine = {**parts[0]["machine"], "load at the end": parts[-1]["machine"]["load at the end"]}
    return {"machine": machine, "found": {name: each for stage in measured for name, each in _found(stage).items()}}


def show(result: Mapping[str, Any]) -> None:
    """Print the table."""
    lines = [_HEADS, *map(_row, result["stages"])]
    lines.append(("all", "", "", "", "", str(sum(stage["seconds"] for stage in result["stages"])), ""))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    about = result["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    print(f"\n{about['device']} ({about['type']}); python {about['python']}, {versions}")
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip(), flush=True)


def _row(stage: Mapping[str, Any]) -> tuple[str, ...]:
    left = dict(stage["counts"])
    passed, failed = left.pop("passed", ""), left.pop("failed", "")
    others = ", ".join(f"{number} {outcome}" for outcome, number in left.items())
    cells = (stage["name"], stage["outcome"], passed, failed, others, stage["seconds"], stage["reason"])
    return tuple(map(str, cells))
