"""Writes the part of docs/validated.md that tells of runs of ``ci/gpu.sh``, from their results in docs/gpu/*.json.

With ``--check`` nothing is written: it fails where the page is not what the files say.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ci.gpu.result import SCHEMA
from ci.results import private_part

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER, PAGE = ROOT / "docs" / "gpu", ROOT / "docs" / "validated.md"
BEGIN, END = "<!-- cards: made by ci/gpu/page.py -->", "<!-- end of cards -->"
NONE = "No result of `ci/gpu.sh` has come yet.\n"
SHOWN = 20
"""So many failures of a stage have a line of their own."""

Row = Mapping[str, Any]


class PageError(ValueError):
    """A file cannot be shown. The message says which, and why."""


def read(path: Path) -> Row:
    """A result that may be published.

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
    if shown := next((part for text in _texts(found) if (part := private_part(text))), ""):
        raise PageError(f"{path.name} names a path or a host, {shown!r}, which a published result must not")
    return found


def part(results: Sequence[Row]) -> str:
    """What stands between the marks."""
    return "".join(line for result in results for line in _section(result)) if results else NONE


def _section(result: Row) -> Iterator[str]:
    about = result["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    count = "one device" if about["devices"] == 1 else f"{about['devices']} devices"
    yield f"### {about['device']}\n\n"
    yield f"{result['when'][:10]}; {about['type']}, {count}, {about['cores']} cores, {about['system']}; xamp "
    yield f"{about['xamp']}, python {about['python']}, {versions}. Run by a {result['by']}.\n\n"
    yield "| stage of `ci/gpu.sh` | seen | seconds |\n|---|---|---|\n"
    for stage in result["stages"]:
        yield f"| {stage['name']}: {stage['what']} | {_seen(stage)} | {stage['seconds']} |\n"
    yield "\n"
    yield from _apex(result.get("apex"))
    yield from _failures(result["failures"])


def _seen(stage: Row) -> str:
    counts = ", ".join(f"{number} {outcome}" for outcome, number in stage["counts"].items())
    outcome = stage["outcome"] if stage["outcome"] == "passed" else f"**{stage['outcome']}**"
    reason = f" ({_cell(stage['reason'])})" if stage["reason"] else ""
    return f"{outcome}{reason}{': ' if counts else ''}{counts}"


def _apex(found: Row | None) -> Iterator[str]:
    if not found:
        return
    equal = ", ".join(f"{key} {value}" for key, value in found["bit-equal weights"].items())
    worst = sorted(found["worst gap"].items(), key=lambda each: -each[1])[:5]
    gaps = ", ".join(f"{key} {gap:.1e}" for key, gap in worst) or "none"
    yield f"Beside {found['beside']}, {found['cases']} trajectories: scales equal in {found['equal scales']}, both "
    yield f"raise in {found['both raise']}, {len(found['different'])} differ. Weights bit-equal: {equal}. The largest "
    yield f"relative gaps: {gaps}.\n\n"


def _failures(failures: Sequence[Row]) -> Iterator[str]:
    stages = dict.fromkeys(failure["stage"] for failure in failures)
    for stage in stages:
        mine = [failure for failure in failures if failure["stage"] == stage]
        yield f"Failed in {stage}:\n\n"
        for failure in mine[:SHOWN]:
            yield f"- `{failure['test']}`: {_text(failure['reason'])}\n"
        if len(mine) > SHOWN:
            yield f"- and {len(mine) - SHOWN} others, in the file\n"
        yield "\n"


def _cell(text: str) -> str:
    return _text(text).replace("|", "\\|")


def _text(text: str) -> str:
    return text.replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")


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


def page(old: str, made: str) -> str:
    """The page with ``made`` between its marks.

    Raises:
        PageError: it has no marks.
    """
    head, begin, rest = old.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise PageError(f"docs/validated.md lacks the lines {BEGIN} and {END}")
    return f"{head}{BEGIN}\n\n{made.rstrip()}\n\n{END}{tail}"


def main(words: Sequence[str]) -> int:
    """Write the page, or check it; return the exit status."""
    old = PAGE.read_text(encoding="utf-8")
    try:
        made = page(old, part([read(path) for path in sorted(FOLDER.glob("*.json"))]))
    except PageError as error:
        print(f"ci.gpu.page: {error}", file=sys.stderr)
        return 2
    if "--check" not in words:
        PAGE.write_text(made, encoding="utf-8")
    elif made != old:
        print("docs/validated.md is not what docs/gpu/ says. Run: python -m ci.gpu.page", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
