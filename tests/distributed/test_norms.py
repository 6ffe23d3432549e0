"""Sharded gradients that are clipped in real processes on gloo, against one process in fp64.

Covers: xamp.distributed.ranks, xamp.scaling.unscale, xamp.sessions.clipping.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from forked_ranks import Ranks
from rank_counts import HOW_MANY

WORKER = Path(__file__).parent / "norms_worker.py"
ERROR = {"O0": 1e-6, "O1": 1e-3}  # of the norm, relative; fp32 against fp64, and what O1 rounds
STEP_ERROR = {"O0": 5e-4, "O1": 2e-3}  # of the largest weight's move: a small move from a weight of 1 loses digits
VALUE_ERROR = {"O0": 5e-4, "O1": 1e-2}  # the same where the largest gradients, which rounding moves most, are cut off


@pytest.fixture(scope="module", params=HOW_MANY)
def ranks(
    request: pytest.FixtureRequest, forked_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What each rank wrote; one start for all cases."""
    return forked_ranks.results(WORKER, count=request.param, folder=tmp_path_factory.mktemp("norms"))


def test_every_rank_gets_the_norm_of_the_whole_gradient(ranks: list[dict[str, Any]]) -> None:
    off = {
        (case, rank): found["norms"][case]["norm"]
        for case in ranks[0]["norms"]
        for rank, found in enumerate(ranks)
        if not found["norms"][case]["norm"] < ERROR[case.split()[1]]
    }
    assert not off
    assert all(
        found["norms"][case]["value"] == ranks[0]["norms"][case]["value"]
        for case in ranks[0]["norms"]
        for found in ranks
    )


def test_a_clipped_step_is_that_of_one_process(ranks: list[dict[str, Any]]) -> None:
    off = {
        (case, rank): found["norms"][case]["weights"]
        for case in ranks[0]["norms"]
        for rank, found in enumerate(ranks)
        if not found["norms"][case]["weights"] < STEP_ERROR[case.split()[1]]
    }
    assert not off


def test_a_step_of_clipped_elements_is_that_of_one_process(ranks: list[dict[str, Any]]) -> None:
    off = {
        (case, rank): value
        for rank, found in enumerate(ranks)
        for case, value in found["values"].items()
        if not value < VALUE_ERROR[case.split()[1]]
    }
    assert not off


def test_a_logger_gets_the_norm_of_the_whole_or_none(ranks: list[dict[str, Any]]) -> None:
    """A number of one rank's part would look like a norm. A logger runs on one rank, so nothing can be gathered."""
    for case in ranks[0]["norms"]:
        for found in ranks:
            assert found["norms"][case]["logged"], case
            whole = case.startswith("ddp O0 2.0")
            assert (found["norms"][case]["unclipped"] is None) != case.startswith(("ddp ", "zero ")), case
            assert not whole or found["norms"][case]["unclipped"] < ERROR["O0"]


def test_a_rank_without_any_element_takes_part(ranks: list[dict[str, Any]]) -> None:
    assert [found["no element"] for found in ranks] == [3.0] * len(ranks)


def test_a_flat_parameter_of_divided_and_whole_ones_is_refused(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert len(ranks) == 2 or "Make FullyShardedDataParallel with use_orig_params=True." in found["flattened"]
