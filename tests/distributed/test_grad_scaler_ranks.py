"""GradScaler in two real processes on gloo: who skips with whom.

Covers: xamp.sessions.grad_scaler, xamp.sessions.scaler_steps, xamp.distributed.rank_settings.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from forked_ranks import Ranks

WORKER = Path(__file__).parent / "scaler_worker.py"
SKIPPED = {"scales": [1024.0, 512.0, 512.0, 1024.0], "moved": [True, False, True, True]}
CLEAN = {"scales": [1024.0, 2048.0, 2048.0, 4096.0], "moved": [True] * 4}


@pytest.fixture(scope="module")
def ranks(forked_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank wrote, by way of sharing; one start for all."""
    return forked_ranks.results(WORKER, folder=tmp_path_factory.mktemp("ranks"))


def decisions(found: dict[str, Any]) -> dict[str, Any]:
    return {key: found[key] for key in ("scales", "moved")}


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_ranks_that_share_a_model_skip_together(wrapper: str, ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert decisions(found[f"{wrapper} xamp"]) == SKIPPED
        assert found[f"{wrapper} xamp"] == found[f"{wrapper} torch"], "weights too"
    if wrapper == "ddp":
        assert ranks[0]["ddp xamp"] == ranks[1]["ddp xamp"]


def test_ranks_that_share_nothing_do_not_wait_for_each_other(ranks: list[dict[str, Any]]) -> None:
    assert [decisions(found["alone xamp"]) for found in ranks] == [CLEAN, SKIPPED]
    for found in ranks:
        assert found["alone xamp"] == found["alone torch"]


def test_where_the_chip_saturates_the_ranks_of_the_group_skip_together(ranks: list[dict[str, Any]]) -> None:
    assert [decisions(found["chip"]) for found in ranks] == [SKIPPED, SKIPPED]
    assert ranks[0]["chip"] == ranks[1]["chip"], "weights too"
    assert [decisions(found["chip alone"]) for found in ranks] == [CLEAN, SKIPPED]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("init_scale", "loss_scale 1024 on rank 0 and 64 on rank 1"),
        ("growth_interval", "growth_interval 2000 on rank 0 and 7 on rank 1"),
        ("backoff_factor", "backoff_factor 0.5 on rank 0 and 0.25 on rank 1"),
        ("enabled", "enabled True on rank 0 and False on rank 1"),
    ],
)
def test_ranks_whose_scalers_differ_are_told(name: str, told: str, ranks: list[dict[str, Any]]) -> None:
    """One of the two at the first step, the other at the second; a scaler that is switched off looks at nothing."""
    for rank, found in enumerate(ranks):
        error, step = found[f"different {name}"]["error"], found[f"different {name}"]["step"]
        if name == "enabled" and rank == 1:
            assert error == ""
            continue
        assert error.startswith("GradScaler: ranks that decide together were given different settings: "), found
        assert told in error
        assert "set its process_group" in error
        assert step <= 1


def test_ranks_whose_scalers_are_alike_or_share_no_model_train(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        told = {name: case["error"] for name, case in found.items() if name.startswith("different")}
        assert {name for name, error in told.items() if not error} >= {
            "different nothing",
            *(name for name in told if name.endswith("alone")),
        }
