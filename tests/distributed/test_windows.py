"""Windows of micro-batches under each engine, in which the loss scale moves or another model of the session steps."""

from __future__ import annotations

import json
from pathlib import Path

from engine_cases import ERROR
from forked_ranks import Ranks

WORKER = Path(__file__).parent / "window_worker.py"


def test_gradients_that_are_not_reduced_yet_follow_the_scale(forked_ranks: Ranks, tmp_path: Path) -> None:
    forked_ranks.run(WORKER, str(tmp_path), output=tmp_path / "output.txt")
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert len(found) == 32
        assert {case: off for case, off in found.items() if not off < ERROR[case.split()[-1]]} == {}
