"""Which ranks decide together, and what ranks that differ are told: real processes on gloo.

Covers: xamp.distributed.rank_settings, xamp.distributed.wrappers, xamp.scaling.fellows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from forked_ranks import Ranks
from rank_counts import HOW_MANY

WORKER = Path(__file__).parent / "decide_worker.py"
LEVELS = ("O1", "O2", "O4", "O5")
SKIPPED = (["APPLIED", "SKIPPED", "APPLIED"], [1024.0, 512.0, 512.0])
CLEAN = (["APPLIED"] * 3, [1024.0] * 3)

WAITS_FOR_NOBODY = (("enabled", "ddp"), ("enabled", "none"), ("levels", "none"))
"""The last rank's session is switched off, or neither scales nor sees a wrapper: the others end, it need not know."""

Found = list[dict[str, Any]]


@pytest.fixture(scope="module", params=HOW_MANY)
def ranks(request: pytest.FixtureRequest, forked_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each rank wrote; one start for all cases."""
    return forked_ranks.results(WORKER, count=request.param, folder=tmp_path_factory.mktemp("decide"))


def decided(ranks: Found, case: str) -> list[tuple[list[str], list[float]]]:
    return [(found[case]["outcomes"], found[case]["scales"]) for found in ranks if found[case]]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("case", "agreed"),
    [
        *((averages, 0) for averages in ("ddp", "given", "compressed", "built_in", "frozen")),
        *((differs, 3) for differs in ("halves_together", "noop", "own_hook", "local_steps", "averaged_over_halves")),
        *((differs, 3) for differs in ("thawed", "thawed_later")),
    ],
)
def test_all_ranks_of_the_group_skip_and_back_off(ranks: Found, case: str, agreed: int, level: str) -> None:
    """``agreed``: how often they had to tell each other of an overflow that is not in the gradients of all."""
    assert decided(ranks, f"{case} {level}") == [SKIPPED] * len(ranks)
    assert [found[f"{case} {level}"]["agreed"] for found in ranks] == [agreed] * len(ranks)
    assert all(found[f"{case} {level}"]["finite"] for found in ranks)


@pytest.mark.parametrize("level", LEVELS)
def test_no_rank_steps_its_part_of_a_parameter_alone(ranks: Found, level: str) -> None:
    """Whatever group was given."""
    assert decided(ranks, f"divided {level}") == [SKIPPED] * len(ranks)


@pytest.mark.parametrize("way", ["none", "ddp", "fsdp2"])
def test_sessions_of_two_levels_in_one_group_do_not_meet(ranks: Found, way: str) -> None:
    """Each skips by its own overflow, on all ranks, and has the very weights that it has alone."""
    for rank in ranks:
        found = rank[f"beside {way}"]
        told = {level: (one["outcomes"], one["scales"]) for level, one in found["together"].items()}
        assert told == {
            "O1": (["APPLIED", "SKIPPED", "APPLIED", "APPLIED"], [1024.0, 512.0, 512.0, 512.0]),
            "O2": (["APPLIED", "APPLIED", "SKIPPED", "APPLIED"], [256.0, 256.0, 128.0, 128.0]),
        }
        assert found["together"] == found["alone"]


def test_ranks_that_enter_their_sessions_in_another_order_are_told(ranks: Found) -> None:
    for found in ranks:
        error = found["crossed"]["error"]
        assert "level O1 on rank" in error
        assert "in one order on every rank" in error


@pytest.mark.parametrize("level", LEVELS)
def test_without_a_group_those_of_the_wrapper_decide(ranks: Found, level: str) -> None:
    half = len(ranks) // 2
    expected = [SKIPPED] * half + [CLEAN] * half if half > 1 else [CLEAN, SKIPPED]  # rank 1 overflows
    assert decided(ranks, f"halves_alone {level}") == expected


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("case", ["idle", "idle_sharded"])
def test_ranks_that_never_call_are_not_waited_for(ranks: Found, case: str, level: str) -> None:
    half = len(ranks) // 2
    left_out = case == "idle_sharded" and level in ("O2", "O5")  # parameters that are sharded are not cast
    assert decided(ranks, f"{case} {level}") == ([] if left_out else [SKIPPED if half > 1 else CLEAN] * half)


@pytest.mark.parametrize("wrapper", ["ddp", "ddp before", "none"])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("levels", "level O1 on {first} and O4 on {last}"),
        ("levels of one kind", "level O0 on {first} and O4 on {last}"),
        ("init_scale", "init_scale 1024.0 on {first} and 65536.0 on {last}"),
        ("growth", "growth_interval 100 on {first} and 200 on {last}"),
        ("enabled", "enabled True on {first} and False on {last}"),
        ("kept", "keep_fp32 (<class 'torch.nn.modules.linear.Linear'>,) on {first} and () on {last}"),
        ("static", "static_scale 128.0 on {first} and 256.0 on {last}"),
        ("checks", "checks False on {first} and True on {last}"),
    ],
)
def test_ranks_that_differ_are_told_before_anything_trains(
    ranks: Found, name: str, settings: str, wrapper: str
) -> None:
    case = f"different {name}, {wrapper}"
    if case not in ranks[0]:
        return  # LEFT_OUT in the worker says why
    last = len(ranks) - 1
    first = "rank 0" if last == 1 else "ranks " + ", ".join(map(str, range(last)))
    for rank, found in enumerate(ranks):
        told = found[case]
        assert told["same"], (rank, told)
        if rank == last and (name, wrapper) in WAITS_FOR_NOBODY:
            continue
        assert told["step"] == 0, (rank, told)
        assert told["error"].startswith("PolicyError"), (rank, told)
        assert settings.format(first=first, last=f"rank {last}") in told["error"]
        assert "Give initialize the same arguments" in told["error"]


def test_a_scale_that_one_rank_loaded_is_named(ranks: Found) -> None:
    for found in ranks:
        assert "loss_scale 8 on rank 0 and 1024 on rank" in found["equal_after_load"]["error"]


def test_stages_of_a_pipeline_decide_together_whatever_else_they_run(ranks: Found) -> None:
    assert decided(ranks, "stages") == [SKIPPED] * len(ranks)


def test_a_rank_that_does_not_come_is_named(ranks: Found) -> None:
    for rank, found in enumerate(ranks):
        if rank != 1:
            assert found["absent"]["error"].startswith("scale_loss: rank 1 did not come"), found["absent"]


@pytest.mark.parametrize("wrapper", ["ddp", "none", "fsdp1", "fsdp2"])
def test_after_a_backward_that_raised_no_step_is_taken(ranks: Found, wrapper: str) -> None:
    for found in ranks:
        assert "a backward in scale_loss raised Bang on this rank" in found[f"raised {wrapper}"]["error"]
        assert found[f"raised {wrapper}"]["same"]


def test_where_nothing_is_reduced_a_backward_may_raise(ranks: Found) -> None:
    for wrapper in ("no_sync", "fsdp1 early", "fsdp2 early"):
        assert [found[f"raised {wrapper}"]["error"] for found in ranks] == [""] * len(ranks)
