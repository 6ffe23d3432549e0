"""Sequences that are divided between ranks, with collectives inside of the forward, against one process in fp64.

Covers: xamp.distributed.wrappers, xamp.distributed.fsdp.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_cases import ERROR
from forked_ranks import Ranks

WORKER = Path(__file__).parent / "sequence_worker.py"
OUTCOMES = ["APPLIED", "APPLIED", "SKIPPED", "APPLIED", "APPLIED"]
"""Rank 1 alone overflows in its loss at the third step."""


@pytest.fixture(scope="module")
def ranks(forked_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return forked_ranks.results(WORKER, folder=tmp_path_factory.mktemp("sequences"), covered=False)


def test_a_divided_sequence_trains_as_a_whole_one(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert len(found) == 16
        decided = {case: (at["outcomes"], at["scale"]) for case, at in found.items()}
        assert decided == dict.fromkeys(found, (OUTCOMES, 512.0))
        assert {case: at["off"] for case, at in found.items() if not at["off"] < ERROR[case.split()[-1]]} == {}
