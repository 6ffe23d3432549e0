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
MODELS = {"124 million": 124_439_808, "7 billion": 7_000_000_000}
RANKS = (2, 8, 64, 512)

Row = Mapping[str, Any]


def tables(counts: Mapping[str, Any]) -> dict[str, str]:
    """What stands between the marks, by the name of the mark."""
    ranks = max(counts, key=int)
    most = counts[ranks]
    return {
        "counted": table(("engine", "level", "ranks", *KINDS, "operators"), counted(counts)),
        "for each parameter": table(("engine", "level", *KINDS, f"besides, at {ranks} ranks"), split(most)),
        "planned": table(("engine", "levels", "parameters", *(f"{n} ranks" for n in RANKS)), planned(most)),
    }


def counted(counts: Mapping[str, Any]) -> Iterator[list[str]]:
    """A line for each engine, level and number of ranks: calls and bytes."""
    for engine in next(iter(counts.values())):
        for level in next(iter(counts.values()))[engine]:
            for ranks in counts:
                row = counts[ranks][engine][level]
                yield [engine, level, ranks, *(calls(row, kind) for kind in KINDS), str(row["operators"])]


def calls(row: Row, kind: str) -> str:
    """Calls and bytes of one kind."""
    found = row["collectives"].get(kind)
    return f"{found['calls']}, {found['bytes']:,} B" if found else ""


def per_parameter(row: Row, kind: str) -> tuple[int, int]:
    """Bytes for each parameter, and those that are besides; of few scalars, so they are less than the parameters."""
    found = row["collectives"].get(kind, {"bytes": 0})["bytes"]
    whole, rest = divmod(found, row["parameters"])
    return int(whole), int(rest)


def split(engines: Mapping[str, Any]) -> Iterator[list[str]]:
    """A line for each engine and level: what grows with the parameters, and what does not."""
    for engine, levels in engines.items():
        for level, row in levels.items():
            each = {kind: per_parameter(row, kind) for kind in KINDS}
            rest = [f"{kind} {rest} B" for kind, (_, rest) in each.items() if rest]
            yield [engine, level, *(f"{whole} B" if whole else "" for whole, _ in each.values()), ", ".join(rest)]


def wire(row: Row, parameters: int, ranks: int) -> float:
    """Bytes that each rank sends in a step, by the ring algorithms: all_reduce twice the share of the others."""
    share = (ranks - 1) / ranks
    ways = {"all_reduce": 2 * share, "all_gather": share, "reduce_scatter": share}
    return sum(per_parameter(row, kind)[0] * parameters * way for kind, way in ways.items())


def planned(engines: Mapping[str, Any]) -> Iterator[list[str]]:
    """A line for each engine and size, and for the levels that send the same: bytes sent by each rank."""
    for engine, levels in engines.items():
        alike: dict[tuple[int, ...], list[str]] = {}
        for level, row in levels.items():
            alike.setdefault(tuple(per_parameter(row, kind)[0] for kind in KINDS), []).append(level)
        for same in alike.values():
            for name, parameters in MODELS.items():
                sent = [f"{wire(levels[same[0]], parameters, ranks) / 1e9:.3g} GB" for ranks in RANKS]
                yield [engine, "; ".join(same), name, *sent]


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
