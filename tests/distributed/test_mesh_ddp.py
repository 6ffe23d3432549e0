"""Tensor parallelism under DDP with a ``device_mesh``, in real processes on gloo, against one process in fp64.

Covers: xamp.distributed.ddp, xamp.distributed.ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import Ranks
from rank_counts import HOW_MANY

WORKER = Path(__file__).parent / "mesh_ddp_worker.py"
ERROR = {"O0": 1e-6, "O1": 2e-3, "scaler": 1e-6, "O2": 2e-3, "O4": 2e-2, "O5": 2e-2}
SKIPS = ("O1", "O2", "scaler")
Found = list[dict[str, Any]]


@pytest.fixture(scope="module", params=HOW_MANY)
def ranks(request: pytest.FixtureRequest, forked_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each rank wrote; one start for all cases."""
    return forked_ranks.results(WORKER, count=request.param, folder=tmp_path_factory.mktemp("mesh"))


@pytest.mark.parametrize("case", ERROR)
def test_all_ranks_decide_alike_and_train_as_one_process(ranks: Found, case: str) -> None:
    for found in ranks:
        wanted = found["by hand, skipped" if case in SKIPS else "by hand"]
        assert found[case]["scales"] == ([1024.0, 512.0, 512.0, 512.0] if case in SKIPS else [1.0] * 4)
        assert found[case]["norm"] == pytest.approx(wanted["norm"], rel=ERROR[case])
        for one, other in zip(found[case]["weights"], wanted["weights"], strict=True):
            torch.testing.assert_close(torch.tensor(one), torch.tensor(other), atol=ERROR[case], rtol=0)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_level_that_casts_parameters_says_what_to_do(ranks: Found, level: str) -> None:
    """``test_all_ranks_decide_alike_and_train_as_one_process`` does it."""
    for found in ranks:
        assert "use fully_shard(model, mesh=...) over its device_mesh in its place" in found[level]["error"]


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_wrapped_afterwards_is_refused(ranks: Found, level: str) -> None:
    for found in ranks:
        assert "or a DDP with device_mesh), and a parameter of shape (12, 8) and 3 more" in found["afterwards"][level]
