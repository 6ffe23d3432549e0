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
from collections.abc import Mapping, Sequence
from typing import Any

from ci.results import clean
from ci.stages import summary
from ci.stages.log import Kept, Log
from ci.stages.stage import Stage

__all__ = ["MEASURED", "SCHEMA", "made", "show"]

SCHEMA = 1
MEASURED = ("figures", "models", "benchmarks")
"""The stages whose commands are benchmarks."""
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
        "failures": [failure for stage in stages for failure in summary.failures(stage.name, kept[stage.name])],
    }
    if "conformance" in kept and kept["conformance"].tests:
        found["conformance"] = _tiers(kept["conformance"])
    if figures := _figures([kept[name] for name in MEASURED if name in kept]):
        found["benchmarks"] = figures
    for each in kept.values():
        for name, step in each.steps.items():
            if name in _FOUND and step["data"] is not None:
                found[_FOUND[name]] = _cleaned(step["data"])
    return found


def _stage(stage: Stage, kept: Kept) -> dict[str, Any]:
    found = summary.of(stage, kept)
    figures = [figure for part in _found(kept).values() for figure in part]
    if figures:
        found["counts"] = {"figures": len(figures), "bounds missed": sum(figure["missed"] for figure in figures)}
    return found


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
    return {"machine": _cleaned(machine), "found": _cleaned(found)}


def _cleaned(value: Any) -> Any:
    """A value with no path and no host in any of its texts."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, Mapping):
        return {key: _cleaned(each) for key, each in value.items()}
    return [_cleaned(each) for each in value] if isinstance(value, list) else value


def show(result: Mapping[str, Any]) -> None:
    """Print the table."""
    about = result["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    title = f"{about['device']} ({about['type']}); python {about['python']}, {versions}"
    summary.show(title, result["stages"])
