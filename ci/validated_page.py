"""Writes the table of docs/validated.md: what was run on which device, and what came of it.

Its rows come from result files: docs/results/*.json (``ci/device.sh``), docs/gpu/*.json (``ci/gpu.sh``), and
docs/results/seen.tsv, to which people add lines. Of the runs of one command on one device and torch the newest is
shown. ``--check`` writes nothing, and fails where the page is old.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from ci import results
from ci.devices import ROOT, read
from ci.gpu.result import SCHEMA
from ci.marked import placed, table

PAGE = ROOT / "docs" / "validated.md"
RESULTS, GPU = ROOT / "docs" / "results", ROOT / "docs" / "gpu"
COMMAND = ".venv/bin/python ci/validated_page.py"
_DATE = re.compile(r"(by )?\d{4}-\d\d-\d\d")


class PageError(ValueError):
    """A file cannot be shown. The message says which, and why."""


class Row(NamedTuple):
    """A line of the table, in Markdown. The run was on ``date`` or, if "by" stands before it, on an earlier day."""

    device: str
    torch: str
    date: str
    command: str
    result: str


def seen(path: Path) -> Iterator[Row]:
    """The lines that people wrote.

    Raises:
        PageError: a line is none, or names a path or a host.
    """
    head, *lines = path.read_text(encoding="utf-8").splitlines()
    for number, cells in enumerate((line.split("\t") for line in lines), 2):
        where = f"{path.name}, line {number}"
        if len(cells) != len(Row._fields) or not all(cells):
            raise PageError(f"{where}: five texts with tabs between them are needed: {head.expandtabs(1)}")
        row = Row(*cells)
        if not _DATE.fullmatch(row.date):
            raise PageError(
                f"{where}: {row.date!r} is no date such as 2026-11-27 or, where the day is unknown, by 2026-11-27"
            )
        _refuse_private(where, cells)
        yield row


def suites(folder: Path) -> Iterator[Row]:
    """The runs of the conformance suite."""
    titles = {device.name: device.title for device in read()}
    for path in sorted(folder.glob("*.json")):
        found = results.read(path)
        device = found.name if found.how in ("emulated", "hardware") else titles.get(found.device, found.name)
        outcomes = {each: found.count(each) for each in ("passed", "failed", "known gap", "skipped")}
        counts = ", ".join(f"{number:,} {each}" for each, number in outcomes.items() if number)
        told = (", a part" if found.part else "") + (", contributed" if found.by != "project" else "")
        torch = _release(found.versions.get("torch", ""))
        yield Row(device, torch, f"{found.when:%Y-%m-%d}", "`xamp conformance`", counts + told)


def cards(folder: Path) -> Iterator[Row]:
    """The stages of ``ci/gpu.sh``."""
    for path in sorted(folder.glob("*.json")):
        found = card(path)
        about = found["machine"]
        told = "" if found["by"] == "project" else ", contributed"
        for stage in found["stages"]:
            yield Row(
                about["device"],
                about["versions"].get("torch", ""),
                found["when"][:10],
                f"`ci/gpu.sh {stage['name']}`",
                f"{_came(stage)}{told} ([file](gpu/{path.name}))",
            )


def card(path: Path) -> Mapping[str, Any]:
    """A result of ``ci/gpu.sh`` that may be published.

    Raises:
        PageError: it is none, is of a rehearsal, or names a path or a host.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise PageError(f"{path.name} is no JSON: {error}") from error
    if not isinstance(found, dict) or found.get("schema") != SCHEMA or "stages" not in found:
        raise PageError(f"{path.name} is no result of `ci/gpu.sh` with schema {SCHEMA}")
    if found["rehearsal"]:
        raise PageError(f"{path.name} is of a rehearsal, which says nothing about a card")
    _refuse_private(path.name, _texts(found))
    return found


def _came(found: Mapping[str, Any]) -> str:
    words = {"xfailed": "known to fail"}
    counts = {outcome: f"{number:,} {words.get(outcome, outcome)}" for outcome, number in found["counts"].items()}
    if "failed" in counts:
        counts["failed"] = f"**{counts['failed']}**"
    elif found["outcome"] != "passed":
        why = found["reason"].replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")
        counts = {"": f"**{found['outcome']}{f': {why}' if why else ''}**", **counts}
    return ", ".join(counts.values()) or "passed"


def _release(torch: str) -> str:
    return torch.partition("+")[0]


def _refuse_private(name: str, texts: Iterable[str]) -> None:
    if shown := next((part for text in texts if (part := results.private_part(text))), ""):
        raise PageError(f"{name} names a path or a host, {shown!r}, which a published result must not")


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _texts(key)
            yield from _texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)


def rows() -> list[Row]:
    """The table: cards, then the devices as in seen.tsv, then others; of a command the newest run."""
    found = [*cards(GPU), *seen(RESULTS / "seen.tsv"), *suites(RESULTS)]
    newest: dict[tuple[str, str, str], Row] = {}
    for row in sorted(found, key=lambda row: row.date[-10:]):
        newest[row.device, _release(row.torch), row.command] = row
    devices = list(dict.fromkeys(row.device for row in found))
    return sorted((row for row in found if row in newest.values()), key=lambda row: devices.index(row.device))


def main(words: list[str]) -> int:
    """Write the page, or check it; return the exit status."""
    old = PAGE.read_text(encoding="utf-8")
    try:
        cells = ([cell.replace("|", "\\|") for cell in row] for row in rows())
        made = placed(old, "seen", table(Row._fields, cells), "ci/validated_page.py")
    except (PageError, results.ResultError) as error:
        print(f"ci/validated_page.py: {error}", file=sys.stderr)
        return 2
    if "--check" not in words:
        PAGE.write_text(made, encoding="utf-8")
    elif made != old:
        print(f"docs/validated.md is not what the result files say. Run: {COMMAND}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
