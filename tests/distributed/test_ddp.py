"""Two real processes on gloo, as under torchrun.

Covers: xamp.distributed.ddp, xamp.scaling.fellows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import Ranks

HERE = Path(__file__).parent


Torchrun = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def torchrun(forked_ranks: Ranks, tmp_path: Path) -> Torchrun:
    """Runs a script as two ranks, and gives what each of them wrote."""

    def run(script: str, *args: str, **options: bool) -> list[dict[str, Any]]:
        return forked_ranks.results(HERE / script, *args, folder=tmp_path, **options)

    return run


@pytest.mark.parametrize(("level", "explode"), [("O1", True), ("O2", True), ("O4", False), ("O5", False)])
def test_two_ranks_are_one_process_that_averages(level: str, explode: bool, torchrun: Torchrun) -> None:
    first, second = torchrun("ddp_worker.py", level, "explode" if explode else "calm")
    assert first["worst"] <= 1e-6
    assert second["worst"] <= 1e-6
    for key in ("weights", "masters", "scales", "outcomes"):
        assert first[key] == second[key], key
    expected = ["APPLIED"] * 6
    if explode:
        expected[3] = "SKIPPED"
        # growth_interval=4: three clean updates, the overflow at the fourth, two clean ones
        assert first["scales"] == [1024.0, 1024.0, 1024.0, 512.0, 512.0, 512.0]
    assert first["outcomes"] == expected


@pytest.mark.parametrize(("wrapper", "level"), [("none", "O1"), ("none", "O2"), ("fsdp2", "O1")])
def test_ranks_that_see_other_gradients_decide_together(wrapper: str, level: str, torchrun: Torchrun) -> None:
    first, second = torchrun("agree_worker.py", wrapper, level)
    assert first["outcomes"] == second["outcomes"] == ["APPLIED", "SKIPPED", "APPLIED"]
    assert first["scales"] == second["scales"] == [1024.0, 512.0, 512.0]
    assert first["finite"]
    assert second["finite"]


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("mode", ["part", "two", "compiled", "whole", "gone"])
def test_a_ddp_that_no_region_of_ours_notes_is_seen(mode: str, level: str, torchrun: Torchrun) -> None:
    assert_ranks_agree(torchrun("parts_worker.py", mode, level, covered=mode not in ("compiled", "whole")))


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_a_model_that_ddp_already_wraps_trains(level: str, torchrun: Torchrun) -> None:
    assert_ranks_agree(torchrun("parts_worker.py", "before", level))


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_a_model_that_lies_in_a_ddp_is_refused_and_the_ddp_goes_on(level: str, torchrun: Torchrun) -> None:
    assert_ranks_agree(torchrun("parts_worker.py", "inside", level))


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O5"])
def test_after_close_a_new_ddp_reduces_and_the_old_one_is_told_of(level: str, torchrun: Torchrun) -> None:
    assert_ranks_agree(torchrun("parts_worker.py", "closed", level))


def assert_ranks_agree(ranks: list[dict[str, Any]]) -> None:
    """The same numbers on both, and all that a worker was to see seen."""
    first, second = ranks
    assert first["grads"] == second["grads"]
    assert all(first["seen"])
    assert all(second["seen"])
