"""Ranks that share a part of their models in a DDP, and have or train another part each for itself.

Covers: xamp.distributed.rank_settings, xamp.distributed.ddp.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import Ranks

WORKER = Path(__file__).parent / "unlike_worker.py"
ERROR = {"O0": 1e-6, "O1": 2e-3, "O2": 2e-3, "O4": 2e-2, "O5": 2e-2}
CASES = [f"{mode} {level}" for mode in ("ignored", "own", "frozen") for level in (*ERROR, "O1 WORLD")]


@pytest.fixture(scope="module")
def found(forked_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return forked_ranks.results(WORKER, folder=tmp_path_factory.mktemp("unlike"))


@pytest.mark.parametrize("case", CASES)
def test_each_trains_as_by_hand(case: str, found: list[dict[str, Any]]) -> None:
    mode, level, *_ = case.split()
    for rank in found:
        for one, other in zip(rank[case]["weights"], rank[case]["by hand"], strict=True):
            torch.testing.assert_close(torch.tensor(one), torch.tensor(other), atol=ERROR[level], rtol=0, msg=case)
    first, second = found
    assert first[case]["scales"] == second[case]["scales"]
    skips = level in ("O1", "O2")
    assert first[case]["scales"] == ([1024.0, 1024.0, 512.0, 512.0] if skips else [1.0] * 4)
    assert first[case]["weights"][-2:] == second[case]["weights"][-2:], "what DDP holds, to the bit"
    if mode == "ignored":
        assert first[case]["weights"][:2] != second[case]["weights"][:2]


def test_what_one_rank_has_left_of_an_earlier_session(found: list[dict[str, Any]]) -> None:
    assert [rank["left over"] for rank in found] == [[1024.0, 1024.0, 512.0, 512.0]] * 2


@pytest.mark.parametrize("case", ["scaler", "scaler WORLD"])
def test_one_scaler_over_shared_and_own_parts(case: str, found: list[dict[str, Any]]) -> None:
    first, second = found
    assert first[case] == second[case]
    assert first[case][:4] == [1024.0, 1024.0, 512.0, 512.0]
