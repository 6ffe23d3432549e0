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
from ci.devices import ROOT, load
from ci.results import ResultError

PAGE = ROOT / "docs" / "validated.md"
RESULTS, GPU = results.FOLDER, ROOT / "docs" / "gpu"
COMMAND = ".venv/bin/python ci/validated_page.py"
SCHEMA = 1  # of results of ci/gpu.sh
_DATE = re.compile(r"(by )?\d{4}-\d\d-\d\d")


class Row(NamedTuple):
    """A line of the table, in Markdown. The run was on ``date`` or, if "by" stands before it, on an earlier day."""

    device: str
    torch: str
    date: str
    command: str
    result: str


def seen(path: Path) -> Iterator[Row]:
    """The lines that people wrote. Raises ResultError for one that is none, or that names a path or a host."""
    head, *lines = path.read_text(encoding="utf-8").splitlines()
    for number, cells in enumerate((line.split("\t") for line in lines), 2):
        where = f"{path.name}, line {number}"
        if len(cells) != len(Row._fields) or not all(cells):
            raise ResultError(f"{where}: five texts with tabs between them are needed: {head.expandtabs(1)}")
        row = Row(*cells)
        if not _DATE.fullmatch(row.date):
            raise ResultError(f"{where}: {row.date!r} is no date such as 2026-11-27, or by 2026-11-27")
        results.refuse_private(where, cells)
        yield row


def suites(folder: Path) -> Iterator[Row]:
    """The runs of the conformance suite."""
    titles = {device.name: device.title for device in load().devices}
    for path in sorted(folder.glob("*.json")):
        found = results.kept(path)
        results.refuse_private(path.name, found)
        run, lane = found["run"], found["lanes"][0]
        of_card = run["how"] in ("emulated", "hardware")
        device = lane["name"] if of_card else titles.get(run["device"], lane["name"])
        sums = {each: sum(tier.get(each, 0) for tier in found["tiers"].values()) for each in _SHOWN}
        counts = ", ".join(f"{number:,} {each}" for each, number in sums.items() if number)
        told = ", a part" if found["clauses"] else ""
        told += "" if run["by"] == "project" else ", contributed"
        torch = lane["versions"].get("torch", "").partition("+")[0]
        yield Row(device, torch, run["when"][:10], "`xamp conformance`", counts + told)


_SHOWN = ("passed", "failed", "known gap", "skipped")


def cards(folder: Path) -> Iterator[Row]:
    """The stages of ``ci/gpu.sh``."""
    for path in sorted(folder.glob("*.json")):
        found = card(path)
        device, torch = found["machine"]["device"], found["machine"]["versions"].get("torch", "")
        told = "" if found["by"] == "project" else ", contributed"
        for stage in found["stages"]:
            result = f"{_came(stage)}{told} ([file](gpu/{path.name}))"
            yield Row(device, torch, found["when"][:10], f"`ci/gpu.sh {stage['name']}`", result)


def card(path: Path) -> Mapping[str, Any]:
    """A result of ``ci/gpu.sh`` that may be published. Raises ResultError where it may not."""
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or found.get("schema") != SCHEMA or "stages" not in found:
        raise ResultError(f"{path.name} is no result of `ci/gpu.sh` with schema {SCHEMA}")
    if found["rehearsal"]:
        raise ResultError(f"{path.name} is of a rehearsal, which says nothing about a card")
    results.refuse_private(path.name, found)
    return found


def _came(found: Mapping[str, Any]) -> str:
    words = {"xfailed": "known to fail"}
    counts = {outcome: f"{number:,} {words.get(outcome, outcome)}" for outcome, number in found["counts"].items()}
    if "failed" in counts:
        counts["failed"] = f"**{counts['failed']}**"
    elif found["outcome"] != "passed":
        why = re.sub(r"([*_])", r"\\\1", found["reason"].replace("<", "&lt;"))
        counts = {"": f"**{found['outcome']}{f': {why}' if why else ''}**", **counts}
    return ", ".join(counts.values()) or "passed"


def rows() -> list[Row]:
    """The table: cards, then the devices as in seen.tsv, then others; of a command the newest run."""
    found = [*cards(GPU), *seen(RESULTS / "seen.tsv"), *suites(RESULTS)]
    newest: dict[tuple[str, str, str], Row] = {}
    for row in sorted(found, key=lambda row: row.date[-10:]):
        newest[row.device, row.torch.partition("+")[0], row.command] = row
    devices = list(dict.fromkeys(row.device for row in found))
    return sorted((row for row in found if row in newest.values()), key=lambda row: devices.index(row.device))


def placed(page: str, found: Iterable[Row]) -> str:
    """The page with the table between its marks."""
    before, start, rest = page.partition("<!-- seen: made by ci/validated_page.py -->\n")
    _, end, after = rest.partition("<!-- end of seen -->\n")
    if not start or not end:
        raise ResultError(f"{PAGE.name} lacks the marks of the table")
    lines = [Row._fields, *([cell.replace("|", "\\|") for cell in row] for row in found)]
    head, *body = [f"| {' | '.join(line)} |\n" for line in lines]
    return "".join([before, start, "\n", head, "|---" * len(Row._fields), "|\n", *body, "\n", end, after])


def main(words: list[str]) -> int:
    """Write the page, or check it; return the exit status."""
    old = PAGE.read_text(encoding="utf-8")
    try:
        made = placed(old, rows())
    except ValueError as error:
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
