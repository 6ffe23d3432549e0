"""Ranks that train in fp8, by DDP and FSDP2, against one process in fp8 that takes their shares as micro-batches.

Covers: xamp.sessions.fp8_layers, xamp.casting.fp8_linear, xamp.distributed.rank_settings.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import Ranks

from xamp.values.recipes import RECIPES

WORKER = Path(__file__).parent / "fp8_worker.py"
NEAR = 2.0**-7
"""By how much updates may differ, as a part of their norm: ranks add up gradients, of bf16's digits, otherwise."""
Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(forked_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each rank wrote; one start for all cases."""
    return forked_ranks.results(WORKER, count=2, folder=tmp_path_factory.mktemp("fp8"))


@pytest.mark.parametrize("way", ["ddp", "fsdp2", "fsdp2, recomputed"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_ranks_train_as_one_process(ranks: Found, recipe: str, way: str) -> None:
    assert ranks[0][recipe][way] == ranks[1][recipe][way]
    for made, wanted in zip(ranks[0][recipe][way], ranks[0][recipe]["alone"], strict=True):
        rows = zip(made, wanted, ranks[0]["initial"], strict=True)
        for one, other, before in (map(torch.tensor, row) for row in rows):
            assert (one - other).norm() <= NEAR * (other - before).norm()


@pytest.mark.parametrize("recipe", RECIPES)
def test_recomputation_on_ranks_changes_nothing(ranks: Found, recipe: str) -> None:
    assert ranks[0][recipe]["fsdp2, recomputed"] == ranks[0][recipe]["fsdp2"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_flat_shards_are_layers_too(ranks: Found, recipe: str) -> None:
    assert [
        f"shape=({shape})" in said
        for shape, said in zip(("64, 32", "64, 64", "32, 64"), ranks[1][recipe]["fsdp1"], strict=True)
    ] == [True] * 3
    assert all("in_fp8=True" in said for said in ranks[0][recipe]["fsdp1"])


def test_ranks_with_different_recipes_are_told(ranks: Found) -> None:
    for found in ranks:
        assert "fp8 tensorwise on rank 0 and rowwise on rank 1" in found["unlike"]


def test_what_one_rank_has_measured_holds_for_all(ranks: Found) -> None:
    widths = [found["measured"] for found in ranks]
    assert widths in ([64.0, 64.0], [128.0, 128.0])
