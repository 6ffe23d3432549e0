"""Backends whose ranks disagree. Each breaks the engine in the processes of a group, which the test's own is not."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from mutants import Mutant, registered

from xamp.backends.cpu import CpuBackend
from xamp.contract import Backend, BackendSpec
from xamp.distributed import ranks, wrappers
from xamp.distributed.rank_settings import RankSettings
from xamp.scaling.scale import LossScaler
from xamp.sessions import checkpoint, checks
from xamp.sessions.scaler_steps import ScalerSteps
from xamp.values import log

update, moving_scales, agree = LossScaler.update, checkpoint._moving_scales, wrappers.Wrappers.agree
move_by_hand = ScalerSteps.move


class InRanks(CpuBackend):
    """Works, and breaks something once it is loaded in a rank."""

    def __init__(self, spec: BackendSpec) -> None:
        super().__init__(spec)
        if "RANK" in os.environ:
            self.sabotage(int(os.environ["RANK"]))

    def sabotage(self, rank: int) -> None:
        """Break it."""


class AveragesTwice(InRanks):
    """Divides by the number of ranks what was divided by it in the reduction."""

    def unscale_(self, grads: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
        super().unscale_(grads, found_inf, inv_scale / dist.get_world_size() if dist.is_initialized() else inv_scale)


class TellsNobody(InRanks):
    """Each rank knows of its own overflows only."""

    def sabotage(self, rank: int) -> None:
        ranks.share_overflow = lambda flags, group: None


class ScalesApart(InRanks):
    """Only rank 1 backs off."""

    def sabotage(self, rank: int) -> None:
        def lazy(self: Any, found_inf: torch.Tensor, interval: int | None = None) -> None:
            update(self, found_inf if rank == 1 else torch.zeros_like(found_inf), interval)

        LossScaler.update = lazy  # type: ignore[method-assign]


class TrustsTheReduction(InRanks):
    """Takes gradients that DDP made equal for proof that all see the same overflows."""

    def sabotage(self, rank: int) -> None:
        def trusting(self: Any, flags: torch.Tensor, params: Sequence[torch.Tensor], saturates: bool) -> None:
            agree(self, flags, params, False)

        wrappers.Wrappers.agree = trusting  # type: ignore[method-assign]


class KnowsOneGroup(InRanks):
    """All ranks decide together, whatever the process_group."""

    def sabotage(self, rank: int) -> None:
        wrappers.widest = lambda groups: [dist.group.WORLD]  # type: ignore[attr-defined]


class UnscalesEarly(InRanks):
    """Does not see that a reduction is postponed."""

    def sabotage(self, rank: int) -> None:
        wrappers.Wrappers.postponed = lambda self, params: False  # type: ignore[method-assign]


class MastersOfTheirOwn(InRanks):
    """Masters are not what rank 0 has."""

    def sabotage(self, rank: int) -> None:
        ranks.share_from_rank_zero = lambda tensors, group: None


class LogsEverywhere(InRanks):
    """Every rank says what happened."""

    def sabotage(self, rank: int) -> None:
        log.is_rank_zero = lambda: True


class LoadsOnRankZero(InRanks):
    """The scale is where the file was written."""

    def sabotage(self, rank: int) -> None:
        checkpoint._moving_scales = lambda engine, saved: moving_scales(engine, saved) if rank == 0 else ()
        RankSettings.meet = lambda *_, **__: None  # type: ignore[method-assign]  # it would find that first


class CastsUnderWrappers(InRanks):
    """Casts what a wrapper has laid out."""

    def sabotage(self, rank: int) -> None:
        checks._check_castable = lambda model, outer, policy: None


class ByHandAlone(InRanks):
    """Of a GradScaler's ranks each moves its own scale."""

    def sabotage(self, rank: int) -> None:
        def move(self: Any, scale: Any, tracker: Any, flag: torch.Tensor, rules: Any) -> None:
            move_by_hand(self, scale, tracker, flag * rank, rules)

        ScalerSteps.move = move  # type: ignore[method-assign]


def broken(cls: type[Backend]) -> Any:
    return registered(f"{__name__}:{cls.__name__}")


def mutant(clause: str, cls: type[InRanks]) -> Mutant:
    doc = cls.__doc__ or ""
    return Mutant(doc.rstrip("."), f"distributed.{clause}", broken(cls), "mutant")


MUTANTS = [
    mutant("ddp_equals_one_process", AveragesTwice),
    mutant("overflow_on_one_rank", TellsNobody),
    mutant("overflow_on_one_rank", ScalesApart),
    mutant("hidden_overflow", TrustsTheReduction),
    mutant("groups_decide_apart", KnowsOneGroup),
    mutant("no_sync", UnscalesEarly),
    mutant("ranks_start_equal", MastersOfTheirOwn),
    mutant("collapse_at_the_same_step", TellsNobody),
    mutant("rank_0_alone_logs", LogsEverywhere),
    mutant("checkpoint_of_one_rank", LoadsOnRankZero),
    mutant("wrapped_before_is_refused", CastsUnderWrappers),
    mutant("manual_scalers_skip_together", ByHandAlone),
]
