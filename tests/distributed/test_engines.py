"""Every engine of torch at every level that lowers: real processes on gloo, against one process in fp64.

Rank 1 alone overflows at the second of four steps. All ranks skip it and back off, and the weights become those of one
process that leaves the step out. Each engine has a worker of its own, and one start for all its cases and levels; what
says nothing new on four ranks has a start with two.

Covers: xamp.distributed.fsdp, xamp.distributed.wrappers, xamp.distributed.ranks, xamp.scaling.fellows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from engine_cases import DECIDED, ERROR
from forked_ranks import Ranks
from rank_counts import HOW_MANY

HERE = Path(__file__).parent
ENGINES = {
    "ddp": (
        *("plain", "bucket_view", "static_graph", "unused", "compressed", "own_hook", "no_sync"),
        *("each_backward", "each_backward, bucket_view", "checkpointed", "halves"),
    ),
    "fsdp1": ("original", "flat", "nested", "own_precision", "copied", "whole_weights", "checkpointed", "no_sync"),
    "fsdp2": (
        *("plain", "blocks", "whole_weights", "offloaded", "checkpointed", "some"),
        *("no_sync", "no_sync, whole_weights"),
    ),
    "hsdp": ("fsdp2", "fsdp2 of copies", "fsdp1"),
    "zero": ("plain", "two groups"),
    "tensor": ("some", "all", "two meshes", "with fsdp2"),
    "pipeline": ("gpipe", "1f1b", "gpipe in ddp", "1f1b in ddp", "1f1b in fsdp2"),
}
ON_TWO_RANKS = {
    # each rank compiles for itself, however many there are
    "ddp": ("compiled", "compiled whole", "compiled whole, no_sync", "compiled before"),
    "fsdp2": ("compiled",),
    # the net has too few layers for more stages
    "pipeline": ("interleaved", "zero_bubble", "zero_bubble_v"),
}
"""More cases, which run with two ranks only."""
ON_FOUR_RANKS = {"tensor": ("with fsdp1",)}
"""More cases, for which there must be several copies of what tensor parallelism divides between two."""

Found = list[dict[str, Any]]


Ask = Callable[[str], Found]


def asks(forked_ranks: Ranks, factory: pytest.TempPathFactory, which: str, **options: Any) -> Ask:
    """Returns what each rank of an engine wrote; one start for each engine."""

    @functools.cache
    def run(engine: str) -> Found:
        worker, folder = HERE / f"engine_{engine}_worker.py", factory.mktemp(engine)
        return forked_ranks.results(worker, which, folder=folder, **options)

    return run


@pytest.fixture(scope="module", params=HOW_MANY)
def ranks_of(request: pytest.FixtureRequest, forked_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Ask:
    return asks(forked_ranks, tmp_path_factory, "all", count=request.param)


@pytest.fixture(scope="module")
def two_ranks_of(forked_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Ask:
    return asks(forked_ranks, tmp_path_factory, "two", covered=False)


@pytest.mark.drawn(12)
@pytest.mark.parametrize("level", ERROR)
@pytest.mark.parametrize("engine", ENGINES)
def test_all_ranks_decide_alike_and_train_as_one_process(engine: str, level: str, ranks_of: Ask) -> None:
    ranks = ranks_of(engine)
    more = ON_FOUR_RANKS.get(engine, ()) if len(ranks) == 4 else ()
    check(ranks, engine, (*ENGINES[engine], *more), level)


@pytest.mark.parametrize("level", ERROR)
@pytest.mark.parametrize("engine", ON_TWO_RANKS)
def test_two_ranks_do(engine: str, level: str, two_ranks_of: Ask) -> None:
    check(two_ranks_of(engine), engine, ON_TWO_RANKS[engine], level)


def check(ranks: Found, engine: str, cases: Iterable[str], level: str) -> None:
    for case in cases:
        found = [rank[f"{case} {level}"] for rank in ranks]
        assert [(rank["outcomes"], rank["scales"]) for rank in found] == [DECIDED] * len(ranks), case
        assert max(rank["off"] for rank in found) < ERROR[level], (case, [rank["off"] for rank in found])
        assert all(rank["fp32"] for rank in found), case
        weights = [rank["weights"] for rank in found]
        if case == "halves":
            assert len(set(weights)) == 2, case
        elif engine != "pipeline":
            assert len(set(weights)) == 1, case


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
def test_fsdp_gathers_in_16_bits_what_the_optimizer_steps_in_32(engine: str, ranks_of: Ask) -> None:
    for rank in ranks_of(engine):
        assert rank["dtypes"] == {
            "O1": ["float32", "float32", "float32"],
            "O2": ["float16", "float32", "float32"],
            "O4": ["float32", "float32", "float32"],
            "O5": ["bfloat16", "float32", "float32"],
        }


@pytest.mark.parametrize("level", ["O1", "O5"])
def test_gradients_that_hsdp_has_yet_to_add_up_stay_scaled(level: str, ranks_of: Ask) -> None:
    """``set_requires_all_reduce(False)``: FSDP2 keeps them to itself. The scale moves at each step."""
    for rank in ranks_of("hsdp"):
        told = rank[f"moving scales {level}"]
        assert told["scales"] == [8.0] * 3 + [16.0] * 3 + [32.0] * 3
        assert told["off"] < ERROR[level]


def test_a_rank_without_elements_of_what_is_trained_sees_the_same_steps(ranks_of: Ask) -> None:
    """FSDP1, where only the head is trained: all its elements lie on the last ranks."""
    ranks = [rank["heads"] for rank in ranks_of("fsdp1")]
    assert 0 in [rank["O1"][1] for rank in ranks]
    for rank in ranks:
        assert [rank[level][0] for level in ERROR] == [[*DECIDED[0], 3, 1]] * len(ERROR)
        assert rank["collapse"][0] == ["collapsed", 51, 0, 52]
        assert rank["said"] == []


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
def test_an_average_of_shards_is_evaluated_and_training_goes_on(engine: str, ranks_of: Ask) -> None:
    for rank in ranks_of(engine):
        assert [told["same"] for told in rank["averages"].values()] == [True, True]
        assert rank["averages"]["O0"]["off"] < 1e-5
        assert rank["averages"]["O2"]["off"] < 5e-3


def test_an_average_leaves_weights_alone_that_fsdp_has_gathered(ranks_of: Ask) -> None:
    for rank in ranks_of("fsdp1"):
        assert rank["summoned"] == [3, True]


def test_zero_says_what_it_cannot(ranks_of: Ask) -> None:
    for rank in ranks_of("zero"):
        assert "Make it without parameters_as_bucket_view" in rank["buckets"]  # which "plain" is
        assert rank["consolidated"]
