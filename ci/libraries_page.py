"""Writes the tables of docs/libraries.md and docs/levels.md from what the tests of libraries found.

``ci/test.sh --libraries`` runs these tests and writes tests/libraries/results.json. This script puts the tables between
the marks in the two pages and leaves everything else there as it is. With ``--check`` nothing is written: it fails
where a page is not what the results say.
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from ci.marked import placed, table

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "tests" / "libraries" / "results.json"
COMMAND = ".venv/bin/python ci/libraries_page.py"
LEVELS = ("O1", "O2", "O3", "O4", "O5")
OPTIMIZER = "optimizer "

Row = Mapping[str, Any]


def tables(results: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    """What stands between the marks: by page and name of the mark."""
    return {
        ("docs/libraries.md", "measured"): "".join(models(results["rows"])),
        ("docs/levels.md", "buffers"): "".join(buffers(results["buffers"])),
    }


def models(rows: Sequence[Row]) -> Iterator[str]:
    """A line for the models of each library and one for its optimizers, with a column for each level."""
    versions = dict(sorted({row["library"]: row["version"] for row in rows}.items()))
    yield "Versions: " + ", ".join(f"{name} {version}" for name, version in versions.items()) + ".\n\n"
    heads = ("library", "what", *LEVELS, "resumed")
    yield table(heads, (line(library, found) for library, found in grouped(rows)))


def grouped(rows: Sequence[Row]) -> Iterable[tuple[str, list[Row]]]:
    """The library and the rows of each line: those of its models, and those of its optimizers."""
    found: dict[tuple[str, bool], list[Row]] = defaultdict(list)
    for row in rows:
        found[row["library"], is_optimizer(row)].append(row)
    return ((key[0], found[key]) for key in sorted(found))


def is_optimizer(row: Row) -> bool:
    """Whether a row is about an optimizer."""
    return str(row["model"]).startswith(OPTIMIZER)


def line(library: str, rows: Sequence[Row]) -> list[str]:
    """A line of the table: the largest difference at each level."""
    by_level = {level: [row["within"] for row in rows if row["level"] == level] for level in LEVELS}
    cells = [shown(max(values)) if values else "" for values in by_level.values()]
    names = sorted({row["model"] for row in rows})
    named = f"{len(names)} optimizers" if is_optimizer(rows[0]) else "; ".join(names)
    return [library, named, *cells, resumed(rows)]


def resumed(rows: Sequence[Row]) -> str:
    """In words, whether a run that stopped in the middle came to the same bits."""
    asked = {row["model"] for row in rows if row["resumed"] is not None}
    exact = {row["model"] for row in rows if row["resumed"]}
    if not asked:
        return "not tried"
    return (
        "exactly" if len(asked) == len({row["model"] for row in rows}) and exact == asked else f"{len(exact)} exactly"
    )


def shown(value: float) -> str:
    """A difference, in one digit."""
    return "0" if value == 0 else f"{value:.0e}".replace("e-0", "e-")


def buffers(rows: Sequence[Row]) -> Iterator[str]:
    """A line for each architecture."""
    yield table(
        ("architecture", "cast", "named by the warning", "as it is", "keep_fp32=", "all left in fp32"),
        (
            [
                row["model"],
                str(row["cast"]),
                row["named"] or "none",
                *(text(row[k]) for k in ("cast_off", "kept_off")),
                row["left_off"] if isinstance(row["left_off"], str) else text(row["left_off"]),
            ]
            for row in rows
        ),
    )


def text(value: float | None) -> str:
    """A relative difference, for the table of buffers."""
    return "" if value is None else f"{value:.2g}"


def main(words: Sequence[str]) -> int:
    """Writes the pages, or checks them; returns the exit status."""
    status = 0
    for (name, mark), body in tables(json.loads(RESULTS.read_text(encoding="utf-8"))).items():
        path = ROOT / name
        page = path.read_text(encoding="utf-8")
        made = placed(page, mark, body, "ci/libraries_page.py")
        if "--check" not in words:
            path.write_text(made, encoding="utf-8")
        elif made != page:
            print(f"{name} is not what {RESULTS.relative_to(ROOT)} says. Run: {COMMAND}")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
