"""What came of a run: one file of JSON, from which pages are made, and one table.

The file names no host and no path. Its keys:

    schema, rehearsal, by, when, machine     what ran, where, when
    stages          for each: name, what, outcome, reason, seconds, counts
    failures        for each test and clause that failed: stage, test, reason
    conformance     clauses by tier and outcome
    benchmarks      machine and found, as ``python -m benchmarks --json`` writes them
    doctor, apex, facts     what these found, where they ran
"""

from __future__ import annotations

import collections
import datetime
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ci.gpu.log import Kept, Log
from ci.gpu.stage import Stage
from ci.results import clean, cleaned

__all__ = ["MEASURED", "SCHEMA", "made", "show"]

SCHEMA = 1
MEASURED = ("figures", "models", "benchmarks")
"""The stages whose commands are benchmarks."""
_HEADS = ("stage", "outcome", "passed", "failed", "others", "seconds", "")
_REASON = 300  # characters
_FOUND = {"doctor": "doctor", "sides": "apex", "facts": "facts"}
"""By the name of a command: the key of what it found."""


def made(log: Log, stages: Sequence[Stage], about: Mapping[str, Any], by: str, *, rehearsal: bool) -> dict[str, Any]:
    """The result of all that the log has."""
    kept = {stage.name: log.of(stage.name) for stage in stages}
    now = datetime.datetime.now(datetime.timezone.utc)
    whens = [each.end["when"] for each in kept.values() if each.end is not None]
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "rehearsal": rehearsal,
        "by": by,
        "when": max(whens, default=now.strftime("%Y-%m-%dT%H:%MZ")),
        "machine": dict(about),
        "stages": [_stage(stage, kept[stage.name]) for stage in stages],
        "failures": [failure for stage in stages for failure in _failures(stage.name, kept[stage.name])],
    }
    if "conformance" in kept and kept["conformance"].tests:
        found["conformance"] = _tiers(kept["conformance"])
    if figures := _figures([kept[name] for name in MEASURED if name in kept]):
        found["benchmarks"] = figures
    for each in kept.values():
        for name, step in each.steps.items():
            if name in _FOUND and step["data"] is not None:
                found[_FOUND[name]] = cleaned(step["data"])
    return found


def _stage(stage: Stage, kept: Kept) -> dict[str, Any]:
    """One stage: name, what, outcome, reason, seconds; counts of tests by outcome, or of figures."""
    reason = "" if kept.end is None else _short(kept.end["reason"])
    if kept.outcome == "killed" and kept.end is None:
        reason = "it was cut short"
    counts = dict(collections.Counter(test["outcome"] for test in kept.tests.values()))
    figures = [figure for part in _found(kept).values() for figure in part]
    if figures:
        counts = {"figures": len(figures), "bounds missed": sum(figure["missed"] for figure in figures)}
    about = {"name": stage.name, "what": stage.what, "outcome": kept.outcome, "reason": reason}
    return {**about, "seconds": round(kept.seconds), "counts": counts}


def _failures(stage: str, kept: Kept) -> Iterator[dict[str, str]]:
    """Each test that failed, and each command that did not come to its end: stage, test, reason."""
    for name, test in kept.tests.items():
        if test["outcome"] == "failed":
            yield {"stage": stage, "test": clean(name), "reason": _short(test["reason"])}
    for name, step in kept.steps.items():
        if step["cut"] or step["code"] not in (0, 1, 5):
            yield {"stage": stage, "test": name, "reason": _short(step["tail"].strip().rpartition("\n")[2])}


def _short(text: str) -> str:
    return clean(" ".join(re.sub(r"\x1b\[[0-9;]*m", "", text).split()))[:_REASON]


def _tiers(kept: Kept) -> dict[str, dict[str, int]]:
    tiers: dict[str, collections.Counter[str]] = {}
    for name, test in kept.tests.items():
        tiers.setdefault(name.partition(".")[0], collections.Counter())[test["outcome"]] += 1
    return {tier: dict(counts) for tier, counts in tiers.items()}


def _found(kept: Kept) -> dict[str, list[Mapping[str, Any]]]:
    """The figures of each benchmark."""
    parts = (step["data"] for step in kept.steps.values() if isinstance(step["data"], dict))
    return {name: figures for part in parts for name, figures in part.get("found", {}).items()}


def _figures(stages: Sequence[Kept]) -> dict[str, Any] | None:
    data = [step["data"] for kept in stages for step in kept.steps.values()]
    parts = [each for each in data if isinstance(each, dict) and "found" in each]
    if not parts:
        return None
    ends = [part["machine"]["load at the end"] for part in parts]
    machine = {**parts[0]["machine"], "load at the end": ends[-1]}
    found = {name: figures for kept in stages for name, figures in _found(kept).items()}
    return {"machine": cleaned(machine), "found": cleaned(found)}


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
