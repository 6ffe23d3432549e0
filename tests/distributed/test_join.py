"""torch's Join, for ranks with unequal numbers of batches: refused where ranks would part, and right elsewhere.

Covers: xamp.scaling.fellows, xamp.distributed.ddp.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from forked_ranks import Ranks

WORKER = Path(__file__).parent / "join_worker.py"


@pytest.fixture(scope="module")
def ranks(forked_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks wrote; one start for all cases."""
    return forked_ranks.results(WORKER, folder=tmp_path_factory.mktemp("join"))


@pytest.mark.parametrize(
    ("level", "what"), [("O1", "a dynamic loss scale"), ("O2", "a dynamic loss scale"), ("O5", "master weights")]
)
def test_what_the_last_rank_could_not_hand_over_is_refused(level: str, what: str, ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        told = found[level]
        assert told["error"].startswith("scale_loss: the model's DistributedDataParallel is under torch's Join")
        assert f"level {level} has {what}" in told["error"]
        assert "initialize(..., loss_scale=1024.0)" in told["error"]
        assert (told["outcomes"], told["moved"]) == ([], False)


def test_an_optimizer_that_join_steps_is_refused(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        told = found["O1 static, ZeRO"]
        assert told["error"].startswith("scale_loss: this ZeroRedundancyOptimizer is under torch's Join")
        assert "At level O1 give Join the DistributedDataParallel alone" in told["error"]
        assert (told["outcomes"], told["moved"]) == ([], False)


@pytest.mark.parametrize("case", ["O0", "O1 static", "O4", "O4, ZeRO"])
def test_what_the_error_names_trains_alike_on_all_ranks(case: str, ranks: list[dict[str, Any]]) -> None:
    first, second = (found[case] for found in ranks)
    assert first["error"] == second["error"] == ""
    assert first["moved"]
    assert first["outcomes"] == ["APPLIED"] * 2
    assert second["outcomes"] == ["APPLIED", "APPLIED", "SKIPPED" if case == "O1 static" else "APPLIED"]
    assert first["scale"] == second["scale"]
    assert first["weights"] == second["weights"]
