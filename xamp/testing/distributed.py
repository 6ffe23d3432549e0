"""Tier distributed: ranks that share a model train as one process does, and skip, scale, save and collapse together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from xamp.policy import LEVELS, levels_where
from xamp.testing.exact import Dot, plain_iterate, sgd
from xamp.testing.lane import Lane
from xamp.testing.ranks import WORLD, Ranks, micro_batch
from xamp.testing.tier import Tier, at_levels, managed, scaled

__all__ = ["Distributed"]

_WRAPPERS = ("ddp", "fsdp1", "fsdp2")
WRAPPED = [(wrapper, level) for wrapper in (*_WRAPPERS, "none") for level in levels_where(lambda row: row.dynamic)]
"""A wrapper of torch's and a level; under ``none`` every rank has a model of its own."""
SHARED = [(wrapper, level) for wrapper, level in WRAPPED if wrapper != "none"]

each_wrapper = pytest.mark.parametrize(("wrapper", "level"), WRAPPED, ids=[f"{w}-{level}" for w, level in WRAPPED])

SKIPPED_ONE = [("APPLIED", 64.0), ("SKIPPED", 32.0), ("APPLIED", 32.0), ("APPLIED", 32.0)]
"""Outcomes and scales of four steps that start at a scale of 64; the second one overflows."""

_RANKS = pytest.StashKey[dict[Lane, Ranks]]()


class Distributed(Tier):
    """Ranks that share a model train as one process does."""

    tier = "distributed"

    @pytest.fixture
    def ranks(self, lane: Lane, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
        """Two processes, shared by all clauses of a class; the clause ends here if there cannot be two."""
        lane.need("distributed")
        if not torch.distributed.is_available() or not torch.distributed.is_backend_available(lane.can.process_group):
            lane.cannot("distributed", f"this torch is built without {lane.can.process_group}")
        owner = request.node.getparent(pytest.Class)
        assert owner is not None
        found: Ranks | None = owner.stash.setdefault(_RANKS, {}).get(lane)
        if found is None:
            found = owner.stash[_RANKS][lane] = Ranks(lane, tmp_path_factory.mktemp("ranks"))
            owner.addfinalizer(found.stop)
        if not found.work:
            lane.cannot("distributed", f"two devices are needed, and there is one, which {WORLD} ranks cannot share")
        return found

    @at_levels(lambda row: row.dtype is not None and not row.steps_lower)
    def test_ddp_equals_one_process(self, lane: Lane, ranks: Ranks, level: str) -> None:
        """Under DistributedDataParallel gradients and weights equal those of one process that averages both losses."""
        lane.need(level)
        found = ranks.run("train", level=level, wrapper="ddp")
        gradients, weights = _one_process(lane, steps=4)
        for rank, steps in enumerate(found):
            _assert_close([step["gradients"] for step in steps], gradients, f"gradients of rank {rank}")
            _assert_close([step["weights"] for step in steps], weights, f"weights of rank {rank}")
            assert [step["outcome"] for step in steps] == ["APPLIED"] * 4
        assert found[0] == found[1]

    @each_wrapper
    def test_overflow_on_one_rank(self, lane: Lane, ranks: Ranks, wrapper: str, level: str) -> None:
        """If one rank overflows, all skip, all scales fall alike, and weights continue as if without that step."""
        lane.need(level)
        _need_averages(lane, ranks, wrapper)
        _assert_skip_together(lane, ranks.run("train", level=level, wrapper=wrapper, spoilt=[1]), wrapper)

    @pytest.mark.parametrize("window", [1, 3])
    @scaled
    def test_hidden_overflow(self, lane: Lane, ranks: Ranks, level: str, window: int) -> None:
        """All ranks see the flag that a saturating chip raises on one rank, though no reduced gradient shows it.

        That also holds if the flag was raised in the first of several micro-batches and cleared for the next.
        """
        lane.need(level)
        told = {"level": level, "wrapper": "ddp", "window": window, "early": window > 1}
        _assert_skip_together(lane, ranks.run("train", spoilt=[1], flags=True, **told), "ddp", window)

    @scaled
    def test_groups_decide_apart(self, lane: Lane, ranks: Ranks, level: str) -> None:
        """If each rank has its own ``process_group``, one rank steps while the other, which overflowed, skips."""
        lane.need(level)
        clean, spoilt = ranks.run("train", level=level, wrapper="none", spoilt=[1], apart=True)
        assert _decisions(clean) == [("APPLIED", 64.0)] * 4
        assert _decisions(spoilt) == SKIPPED_ONE

    @pytest.mark.parametrize(("wrapper", "level"), SHARED, ids=[f"{w}-{level}" for w, level in SHARED])
    def test_no_sync(self, lane: Lane, ranks: Ranks, wrapper: str, level: str) -> None:
        """Three micro-batches, only the last one reduced, equal one big batch; the scale moves once, at their end."""
        lane.need(level)
        _need_averages(lane, ranks, wrapper)
        found = ranks.run("train", level=level, wrapper=wrapper, window=3, growth_interval=2)
        _, weights = _one_process(lane, steps=4, window=3)
        for rank, steps in enumerate(found):
            _assert_close([step["weights"] for step in steps], weights, f"weights of rank {rank}")
            assert [step["scale"] for step in steps] == [64.0, 128.0, 128.0, 256.0]
            during = [[micro["scale"] for micro in step["inside"]] for step in steps]
            assert during == [[64.0] * 2, [64.0] * 2, [128.0] * 2, [128.0] * 2]
            for micro in (micro for step in steps for micro in step["inside"]):
                assert "still scaled" in micro["clipping"], "clipping before the reduction was not refused"
                assert "still scaled" in micro["stepping"], "a step before the reduction was not refused"

    @managed
    def test_ranks_start_equal(self, lane: Lane, ranks: Ranks, level: str) -> None:
        """Under DistributedDataParallel all ranks start from rank 0's weights, masters too, whatever they made."""
        lane.need(level)
        found = ranks.run("train", level=level, wrapper="ddp", seeds=[0, 1])
        _, weights = _one_process(lane, steps=4)
        for rank, steps in enumerate(found):
            _assert_close([step["weights"] for step in steps], weights, f"weights of rank {rank}")
        assert found[0] == found[1]

    @scaled
    def test_collapse_at_the_same_step(self, lane: Lane, ranks: Ranks, level: str) -> None:
        """If one rank overflows forever, all ranks raise LossScaleCollapsed at the same step."""
        lane.need(level)
        first, second = ranks.run("collapse", level=level, limit=100)
        assert first["step"] == second["step"] == 50 + first["late"]
        for found in (first, second):
            assert "50 overflows in a row" in found["error"]

    @scaled
    def test_rank_0_alone_logs(self, lane: Lane, ranks: Ranks, level: str) -> None:
        """An overflow on rank 1 gives one record of the logger ``xamp``, on rank 0."""
        lane.need(level)
        first, second = ranks.run("logged", level=level)
        assert [len(first), second] == [1, []]
        assert "32" in first[0]

    @scaled
    def test_checkpoint_of_one_rank(self, lane: Lane, ranks: Ranks, level: str, tmp_path: Path) -> None:
        """A checkpoint of rank 0 loads on all ranks, and they continue as if they had never stopped, to the bit."""
        lane.need(level)
        found = ranks.run("resume", level=level, folder=str(tmp_path))
        for each in found:
            assert each["loaded"] == [{"dynamic": True, "scale": 64.0, "growth_tracker": 1}]  # 64, 32, 64 at step 4
            assert each["second"] == each["first"]
        assert found[0] == found[1]

    @pytest.mark.parametrize("wrapper", _WRAPPERS)
    @at_levels(lambda row: row.casts_parameters)
    def test_wrapped_before_is_refused(self, lane: Lane, ranks: Ranks, level: str, wrapper: str) -> None:
        """Levels that cast parameters refuse a model in a DistributedDataParallel, name the cure, and change nothing.

        So do those without masters a sharded model. Where there are masters, the fp32 shards are the masters.
        """
        lane.need(level)
        for found in ranks.run("wrapped_before", level=level, wrapper=wrapper):
            if wrapper == "ddp":
                assert "DistributedDataParallel" in found["error"]
                assert "bare model" in found["error"]
            elif LEVELS[level].steps_lower:
                assert "FSDP" in found["error"]
                assert "the fp32 shards are the masters" in found["error"]
            else:
                assert found["error"] == ""
            assert found["same"]

    @pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
    def test_manual_scalers_skip_together(self, lane: Lane, ranks: Ranks, wrapper: str) -> None:
        """With ``xamp.GradScaler`` too all ranks skip if one overflows, and their scales fall alike."""
        _need_averages(lane, ranks, wrapper)
        _assert_skip_together(lane, ranks.run("by_hand", wrapper=wrapper, spoilt=1), wrapper)


def _need_averages(lane: Lane, ranks: Ranks, wrapper: str) -> None:
    """End the clause as not declared where plain torch's FSDP2 adds gradients up, as older ones do over gloo."""
    if wrapper == "fsdp2" and ranks.run("plain_gradient", wrapper=wrapper) != [1.0] * WORLD:
        lane.lacks("FSDP2 whose gradients are averages, which plain torch cannot make here")


def _assert_skip_together(lane: Lane, found: Sequence[Any], wrapper: str, window: int = 1) -> None:
    """Check that both ranks skipped the second of four steps that started at a scale of 64."""
    for rank, steps in enumerate(found):
        assert _decisions(steps) == SKIPPED_ONE, f"rank {rank}: {_decisions(steps)}"
        members = [rank] if wrapper == "none" else range(WORLD)
        _, weights = _one_process(lane, steps=4, window=window, skipped=1, members=members)
        _assert_close([step["weights"] for step in steps], weights, f"weights of rank {rank}")


def _decisions(steps: Sequence[Any]) -> list[tuple[str, float]]:
    return [(step["outcome"], step["scale"]) for step in steps]


def _one_process(
    lane: Lane, steps: int, window: int = 1, skipped: int = -1, members: Sequence[int] = range(WORLD)
) -> tuple[list[Any], list[Any]]:
    """Train the reference: plain torch in fp32 on the host. It averages over ``members`` and sums over a window.

    Returns:
        For each step the gradients, and the weights after it, by parameter.
    """
    torch.manual_seed(0)
    model = Dot()
    optimizer = sgd(model.parameters())
    gradients, weights = [], []
    for step in range(steps):
        batches = [[micro_batch(lane, step, micro, rank).cpu() for rank in members] for micro in range(window)]
        if step != skipped:
            plain_iterate(model, optimizer, *(torch.stack(batch).mean(0) for batch in batches))
        gradients.append([p.grad.tolist() for p in model.parameters() if p.grad is not None])
        weights.append([p.tolist() for p in model.parameters()])
    return gradients, weights


def _assert_close(found: Sequence[Any], wanted: Sequence[Any], what: str) -> None:
    """Compare numbers by step and parameter, up to the rounding of fp32."""
    named = [
        {
            f"{what}, step {step}": torch.tensor([value for part in each for value in part])
            for step, each in enumerate(n)
        }
        for n in (found, wanted)
    ]
    torch.testing.assert_close(*named, rtol=1e-6, atol=1e-7)
