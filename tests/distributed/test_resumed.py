"""Sharded masters, saved by two ranks and loaded by two, one or four, as docs/checkpoints.md has it.

Covers: xamp.sessions.sharding, xamp.sessions.checkpoint.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import Ranks

WORKER = Path(__file__).parent / "resume_worker.py"


def run(ranks: Ranks, mode: str, count: int, folder: Path) -> dict[str, Any]:
    covered = mode != "load" or count == 1  # more ranks reach the same lines
    ranks.run(WORKER, mode, str(folder), count=count, output=folder / f"{mode}.txt", covered=covered)
    found: dict[str, Any] = json.loads((folder / f"{mode}.json").read_text())
    return found


def assert_close(found: dict[str, Any], wanted: dict[str, Any], case: str) -> None:
    """Other numbers of ranks add in another order, in 16 bits."""
    for key in ("weights", "moments"):
        for one, other in zip(found[key], wanted[key], strict=True):
            torch.testing.assert_close(torch.tensor(one), torch.tensor(other), atol=2e-2, rtol=1e-2, msg=case)


@pytest.fixture(scope="module")
def saved(forked_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("resumed")
    return folder, run(forked_ranks, "save", 2, folder)


@pytest.mark.parametrize("count", [2, 1, pytest.param(4, marks=pytest.mark.thorough)])
def test_shards_are_resumed(count: int, forked_ranks: Ranks, saved: tuple[Path, dict[str, Any]]) -> None:
    folder, before = saved
    after = run(forked_ranks, "load", count, folder)
    for case, found in after.items():
        assert found["there"] == before[case]["there"], case  # to the bit, however many ranks
        assert found["there"]["scale"] == 512.0
        assert found["there"]["fp32"]
        assert found["end"]["scale"] == before[case]["end"]["scale"] == 1024.0, case
        if count == 2:
            assert found["end"] == before[case]["end"], case
        else:
            assert_close(found["end"], before[case]["end"], case)


def test_the_copy_of_one_rank_is_loaded_exactly(saved: tuple[Path, dict[str, Any]]) -> None:
    """With ``broadcast_from_rank0``."""
    for case, found in saved[1].items():
        assert found["from one rank"] == found["there"]["weights"], case


def test_a_model_without_shards_loads_them(forked_ranks: Ranks, saved: tuple[Path, dict[str, Any]]) -> None:
    folder, before = saved
    for case, found in run(forked_ranks, "load whole", 1, folder).items():
        assert found["there"] == before[case]["there"], case
        assert_close(found["end"], before[case]["end"], case)


def test_another_engine_at_another_level_loads_them(forked_ranks: Ranks, saved: tuple[Path, dict[str, Any]]) -> None:
    folder, before = saved
    for case, found in run(forked_ranks, "load other", 2, folder).items():
        assert found["there"] == before[case]["there"], case
        assert found["end"]["scale"] == before[case]["end"]["scale"] == 1024.0, case
        assert_close(found["end"], before[case]["end"], case)
