"""``xamp.apex.parallel`` on two real processes on gloo: SyncBatchNorm, DistributedDataParallel, Reducer.

Covers: xamp.apex.parallel.sync_batchnorm, xamp.apex.parallel.distributed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from forked_ranks import Ranks

Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(forked_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each of two ranks found that ran apex_worker.py, all of it in one go."""
    worker = Path(__file__).parent / "apex_worker.py"
    return forked_ranks.results(worker, folder=tmp_path_factory.mktemp("ranks"))


def test_sync_batch_norm_is_batch_norm_over_both_batches(ranks: Found) -> None:
    for found in ranks:
        assert set(found["sync_batch_norm"]) == {"0", "1", "2"}
        for shape, errors in found["sync_batch_norm"].items():
            assert max(errors) <= 1e-5, (shape, errors)


def test_groups_and_an_empty_batch(ranks: Found) -> None:
    first, second = (found["groups"] for found in ranks)
    assert first["alone"] <= 1e-6
    assert second["alone"] <= 1e-6
    assert first["empty"] <= 1e-6
    assert second["empty"] == 0.0
    assert "must divide the number of ranks, which is 2" in first["message"]


def test_gradients_are_those_of_one_process(ranks: Found) -> None:
    for found in ranks:
        assert len(found["ddp"]) == 8
        for name, run in found["ddp"].items():
            assert run["worst"] <= 1e-4, name
            assert run["keys"] == "module.0.weight"


def test_parameters_without_gradients_and_reductions_put_off(ranks: Found) -> None:
    for found in ranks:
        run = found["unused"]
        assert run["none"]
        assert max(run["first"], run["local"], run["both"]) <= 1e-5


def test_a_reducer_averages_when_it_is_told(ranks: Found) -> None:
    first, second = (found["reducer"] for found in ranks)
    assert first["weight"] == second["weight"]
    for run in (first, second):
        assert run["grad"] <= 1e-6
        assert run["list"] == [0.5] * 5


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_amp_with_apexs_own_parts(level: str, ranks: Found) -> None:
    first, second = (found["managed"][level] for found in ranks)
    assert first["weights"] == second["weights"]
    assert first["scales"] == second["scales"] == [65536.0, 65536.0, 32768.0, 32768.0, 32768.0, 32768.0]
    assert first["last"] < first["first"]
