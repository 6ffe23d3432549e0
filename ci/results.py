"""Reads the results that ``ci/device.sh`` writes, for ci/report.py: what ran where, and what came of it.

A result that is published names no host and no path, and is small: :func:`kept` leaves out what passed, but for its
count. :func:`read` takes both forms.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import json
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["BY", "Note", "Result", "ResultError", "clean", "kept", "newest", "private_part", "read"]

SCHEMA = 1
BY = ("project", "contributor")
HOW = ("host", "emulated", "third-party", "hardware")
OUTCOMES = ("passed", "failed", "known gap", "not declared", "skipped")
_NOTED = ("failed", "known gap", "skipped")
_PATH = re.compile(r"file://\S+|(?<![\w./])(?:/(?:[\w.+@-]+/)+[\w.+@-]*|~/\S+|[A-Za-z]:\\\S+)")
_HOST = re.compile(r"\b[\w-]+(?:\.[\w-]+)*\.(?:local|internal|lan|corp|home|intra)\b", re.I)


class ResultError(ValueError):
    """A file is no result that can be shown. The message says which one, and why."""


@dataclasses.dataclass(frozen=True)
class Note:
    """A clause that did not simply pass.

    Attributes:
        clause: its name.
        outcome: ``"failed"``, ``"known gap"`` or ``"skipped"``.
        reason: why.
    """

    clause: str
    outcome: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Result:
    """One run of the conformance suite.

    Attributes:
        device: the name of its row in ci/devices.toml.
        how: one of ``HOW``.
        when: the end of the run, UTC.
        by: one of ``BY``.
        xamp: the version of xamp.
        python: that of Python.
        versions: of torch and the device's software, by name.
        name: what the device is called, such as ``"AMD EPYC"``.
        part: the clauses that were asked for, as patterns; empty: all.
        tiers: for each tier, in the order of the suite, the number of clauses by outcome.
        notes: the clauses that did not simply pass.
    """

    device: str
    how: str
    when: datetime.datetime
    by: str
    xamp: str
    python: str
    versions: Mapping[str, str]
    name: str
    part: Sequence[str]
    tiers: Mapping[str, Mapping[str, int]]
    notes: Sequence[Note]

    @property
    def machine(self) -> tuple[str, str, str]:
        """What tells it from other results of the same device: Python, torch, and who ran it."""
        return ".".join(self.python.split(".")[:2]), self.versions.get("torch", ""), self.by

    def count(self, outcome: str) -> int:
        """The number of clauses with an outcome."""
        return sum(counts.get(outcome, 0) for counts in self.tiers.values())


def read(path: Path) -> Result:
    """Read one file.

    Raises:
        ResultError: it is no such result, or names a host or a path.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ResultError(f"{path.name}: {error.strerror or error}") from error
    except ValueError as error:
        raise ResultError(f"{path.name} is no JSON: {error}") from error
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        schema = found.get("schema") if isinstance(found, dict) else None
        raise ResultError(f"{path.name}: schema {schema!r}; this reads {SCHEMA}, as `ci/device.sh` writes it")
    try:
        made = _result(found)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ResultError(f"{path.name} is no result of `ci/device.sh`: {what}") from error
    _refuse_private(path.name, made)
    return made


def _result(found: Mapping[str, Any]) -> Result:
    run, (lane,) = found["run"], found["lanes"]
    when = datetime.datetime.strptime(run["when"], "%Y-%m-%dT%H:%MZ").replace(tzinfo=datetime.timezone.utc)
    for key, choices in (("how", HOW), ("by", BY)):
        if run[key] not in choices:
            raise ValueError(f"{key} is {run[key]!r}, and one of {', '.join(choices)} is needed")
    tiers, notes = _counted(found["results"]) if "tiers" not in found else (found["tiers"], found["results"])
    for tier, counts in tiers.items():
        wrong = [each for each, number in counts.items() if each not in OUTCOMES or not _is_count(number)]
        if wrong:
            raise ValueError(f"tier {tier} counts {wrong[0]!r}; outcomes are {', '.join(OUTCOMES)}")
    for note in notes:
        if note["outcome"] not in _NOTED:
            raise ValueError(f"outcome is {note['outcome']!r}, and one of {', '.join(_NOTED)} is needed")
    return Result(
        device=_text(run["device"]),
        how=run["how"],
        when=when,
        by=run["by"],
        xamp=_text(found["xamp"]),
        python=_text(found["python"]),
        versions={_text(name): _text(version) for name, version in lane["versions"].items()},
        name=_text(lane["name"]),
        part=tuple(_text(each) for each in found["clauses"]),
        tiers=tiers,
        notes=tuple(Note(_text(each["clause"]), _text(each["outcome"]), _text(each["reason"])) for each in notes),
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} stands where a text is needed")
    return value


def _counted(results: Iterable[Mapping[str, Any]]) -> tuple[dict[str, dict[str, int]], list[Mapping[str, Any]]]:
    tiers: dict[str, dict[str, int]] = {}
    notes = []
    for each in results:
        counts = tiers.setdefault(each["tier"], collections.Counter())
        counts[each["outcome"]] += 1
        if each["outcome"] in _NOTED:
            notes.append(each)
    return {tier: dict(counts) for tier, counts in tiers.items()}, notes


def _refuse_private(name: str, result: Result) -> None:
    texts = [result.device, result.name, result.xamp, result.python, *result.part, *result.tiers]
    texts += [each for pair in result.versions.items() for each in pair]
    texts += [each for note in result.notes for each in (note.clause, note.reason)]
    for text in texts:
        if shown := private_part(text):
            raise ResultError(
                f"{name} names a path or a host, {shown!r}, which a published result must not. Write it anew with "
                "`python ci/report.py --keep FOLDER FILE`, which takes them out."
            )


def private_part(text: str) -> str:
    """The path or the host that a text names; empty if it names none."""
    host = socket.gethostname()
    private = _PATH.search(text) or _HOST.search(text)
    return private[0] if private else host if len(host) > 3 and host in text else ""


def kept(path: Path) -> dict[str, Any]:
    """What is published of a file: counts, and the clauses that did not pass, without paths and hosts.

    Raises:
        ResultError: it is no such result.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        tiers, notes = _counted(found["results"]) if "tiers" not in found else (found["tiers"], found["results"])
        lane = found["lanes"][0]
        return {
            "schema": found["schema"],
            "xamp": found["xamp"],
            "python": found["python"],
            "run": {key: found["run"][key] for key in ("device", "how", "when", "by")},
            "lanes": [{"name": clean(lane["name"]), "versions": lane["versions"]}],
            "clauses": found["clauses"],
            "tiers": tiers,
            "results": [
                {"clause": each["clause"], "outcome": each["outcome"], "reason": clean(each["reason"])}
                for each in notes
            ],
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ResultError(f"{path.name} is no result of `ci/device.sh`: {error!r}") from error


def clean(text: str) -> str:
    """``text`` with the last part of each path only, and without hosts."""
    text = _PATH.sub(lambda found: re.split(r"[/\\]", found[0].rstrip("/\\"))[-1], text)
    host = socket.gethostname()
    text = _HOST.sub("a host", text)
    return text.replace(host, "a host") if len(host) > 3 else text


def newest(results: Iterable[tuple[str, Result]]) -> list[Result]:
    """The newest result of each device, Python, torch and kind of author, in the order given.

    Args:
        results: names of files and what they hold.

    Raises:
        ResultError: two were made at the same time and differ.
    """
    chosen: dict[tuple[str, ...], tuple[str, Result]] = {}
    for name, result in results:
        key = (result.device, *result.machine)
        other = chosen.get(key)
        if other is not None and other[1].when == result.when and other[1] != result:
            raise ResultError(f"{other[0]} and {name} tell of the same run, and differ. Leave one of them away.")
        if other is None or other[1].when < result.when:
            chosen[key] = (name, result)
    return [result for _, result in chosen.values()]
