"""What a training step calls of the other ranks: as docs/scaling.md says, counted in real processes on gloo.

Covers: xamp.distributed.wrappers, xamp.distributed.ranks, docs/scaling.md.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import Ranks
from rank_counts import HOW_MANY

HERE = Path(__file__).parent
KEPT = HERE / "collectives.json"


@pytest.mark.parametrize("count", HOW_MANY)
def test_the_counts_are_those_of_the_page(count: int, forked_ranks: Ranks, tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    worker, output = HERE / "collectives_worker.py", tmp_path / "output.txt"
    forked_ranks.run(worker, str(found), count=count, output=output, covered=False)
    counted: Any = json.loads(found.read_text())[str(count)]
    kept: Any = json.loads(KEPT.read_text())[str(count)]
    for engine, levels in kept.items():
        for level, wanted in levels.items():
            assert counted[engine][level]["collectives"] == wanted["collectives"], (engine, level)


def test_each_row_of_the_page_has_the_operators_that_were_counted() -> None:
    page = (HERE.parents[1] / "docs" / "scaling.md").read_text(encoding="utf-8")
    for engine, levels in json.loads(KEPT.read_text())["4"].items():
        for level, row in levels.items():
            assert re.search(rf"^\| {engine} \| {level} \|.* \| {row['operators']} \|$", page, re.MULTILINE), level
