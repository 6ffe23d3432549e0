"""Writes the tables of docs/scaling.md from tests/distributed/collectives.json, which was counted in real processes.

``tests/distributed/test_collectives.py`` counts again and compares. With ``--check`` nothing is written: it fails where
the page is not what the file says.
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from ci.marked import placed, table

ROOT = pathlib.Path(__file__).resolve().parent.parent
COUNTS = ROOT / "tests" / "distributed" / "collectives.json"
PAGE = ROOT / "docs" / "scaling.md"
COMMAND = ".venv/bin/python ci/scaling_page.py"

KINDS = ("all_reduce", "all_gather", "reduce_scatter")
PLAIN = "fp32, no xamp"
RANKS = (2, 8, 64, 512)

Row = Mapping[str, Any]


def tables(counts: Mapping[str, Any]) -> dict[str, str]:
    """What stands between the marks, by the name of the mark."""
    ranks = max(counts, key=int)
    heads = ("engine", "level", *KINDS, f"besides, at {ranks} ranks", "operators")
    return {
        "counted": table(heads, counted(counts[ranks])),
        "planned": table(("engine", "levels", *(f"{n} ranks" for n in RANKS)), planned(counts[ranks])),
    }


def per_parameter(row: Row, kind: str) -> tuple[int, int]:
    """Bytes for each parameter, and those that are besides; of few scalars, so they are less than the parameters."""
    found = row["collectives"].get(kind, {"bytes": 0})["bytes"]
    whole, rest = divmod(found, row["parameters"])
    return int(whole), int(rest)


def counted(engines: Mapping[str, Any]) -> Iterator[list[str]]:
    """A line for each engine and level: calls, and bytes that grow with the parameters, and those that do not."""
    for engine, levels in engines.items():
        for level, row in levels.items():
            calls = [row["collectives"].get(kind, {"calls": 0})["calls"] for kind in KINDS]
            whole, rest = zip(*(per_parameter(row, kind) for kind in KINDS), strict=True)
            cells = [f"{n}: {each} B" if each else str(n or "") for n, each in zip(calls, whole, strict=True)]
            besides = [f"{kind} {left} B" for kind, left in zip(KINDS, rest, strict=True) if left]
            yield [engine, level, *cells, ", ".join(besides), str(row["operators"])]


def planned(engines: Mapping[str, Any]) -> Iterator[list[str]]:
    """A line for each engine and the levels that send the same: gigabytes that each rank sends for 10**9 parameters.

    By the ring algorithms, which send twice as much in an all_reduce.
    """
    for engine, levels in engines.items():
        alike: dict[int, list[str]] = {}
        for level, row in levels.items():
            reduced, *others = (per_parameter(row, kind)[0] for kind in KINDS)
            alike.setdefault(2 * reduced + sum(others), []).append(level)
        for bytes_sent, same in alike.items():
            yield [engine, "; ".join(same), *(f"{bytes_sent * (n - 1) / n:.3g} GB" for n in RANKS)]


def main(words: Sequence[str]) -> int:
    """Writes the page, or checks it; returns the exit status."""
    page = made = PAGE.read_text(encoding="utf-8")
    for mark, body in tables(json.loads(COUNTS.read_text(encoding="utf-8"))).items():
        made = placed(made, mark, body, "ci/scaling_page.py")
    if "--check" not in words:
        PAGE.write_text(made, encoding="utf-8")
    elif made != page:
        print(f"docs/scaling.md is not what {COUNTS.relative_to(ROOT)} says. Run: {COMMAND}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
