"""What one rank checks about the others before they train together: the same settings, and nobody leaves early."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from xamp.errors import StateError
from xamp.ground.compiler import break_graphs
from xamp.policy import Policy, levels_where, listed
from xamp.scaling import distributed
from xamp.scaling.ddp import search
from xamp.scaling.rank_groups import widest
from xamp.scaling.rank_settings import OF_THE_SCALE, RankSettings
from xamp.scaling.scale import LossScaler

__all__ = ["RankChecks"]

_AVERAGES = "_averages"  # told and not compared: whether DDP averages all gradients of this rank's step


def _alone(_: object) -> str:
    """Return the name under which ranks find each other that only decide together, whatever their models are."""
    return "alone"


class _Engine(Protocol):
    """The part of :class:`xamp.scaling.engine.Engine` that ranks compare."""

    policy: Policy
    process_group: Any
    enabled: bool
    scalers: Sequence[LossScaler]

    def models(self) -> Mapping[int, nn.Module]:
        """Return the models that are still alive."""

    def check_not_sharded(self, call: str) -> None:
        """Refuse a model that was sharded after ``initialize``."""


class RankChecks:
    """The checks of one session.

    Args:
        wrappers: finds the wrappers that hold the parameters, and with them the other ranks.
    """

    def __init__(self, wrappers: distributed.Wrappers) -> None:
        self._wrappers = wrappers
        self._settings = RankSettings()
        self._names: dict[str, list[str]] = {}  # by name of a process group

    @property
    def is_settled(self) -> bool:
        """Whether nothing is left to compare."""
        return self._settings.is_settled

    def look(self) -> None:
        """Compare with the ranks that have written their settings by now."""
        self._settings.look()

    def refuse_join(
        self, policy: Policy, has_masters: bool, params: Sequence[torch.Tensor], optimizers: Iterable[Optimizer]
    ) -> None:
        """Refuse torch's ``Join`` where ranks without batches would miss moves of the scale, or masters.

        At its end ``Join`` gives all ranks the weights of the last one, and neither its scale nor its masters. An
        optimizer that joins is stepped by ``Join`` itself, with the gradients of the rank's last batch.

        Raises:
            StateError: ``params`` are in a model that is under ``Join``.
        """
        if not self._wrappers.may_be_left(params):
            return
        joining = [one for one in optimizers if getattr(getattr(one, "_join_config", None), "enable", False)]
        if joining and policy.manages_gradients:
            name = type(joining[0]).__name__
            raise StateError(
                f"scale_loss: this {name} is under torch's Join, which steps it on a rank that has run out of batches, "
                f"with gradients that came through no scale_loss. At level {policy.level} give Join the "
                "DistributedDataParallel alone, with an optimizer that every rank has whole, or give every rank as "
                f"many batches as the others; or use level {_plain_levels()}."
            )
        if not (policy.dynamic or has_masters):
            return
        what = "a dynamic loss scale" if policy.dynamic else "master weights"
        raise StateError(
            f"scale_loss: the model's DistributedDataParallel is under torch's Join, and level {policy.level} has "
            f"{what}. A rank that runs out of batches would miss what the others make of it, and the ranks would part. "
            "Give every rank as many batches as the others (DistributedSampler(..., drop_last=True)) and leave Join "
            f"out; or use level {_plain_levels()}, or O1 with a static scale, such as initialize(..., "
            "loss_scale=1024.0)."
        )

    def lost_by_raising(self, params: Sequence[torch.Tensor]) -> str:
        """Return what is lost where a backward to ``params`` has raised on this rank; empty: nothing.

        The collective calls of its next backward would meet those that the others are in now. DDP does not notice
        that: one rank's gradients of one batch are added to another's of the next. FSDP, also where it reduces nothing
        yet, waits for the end of the backward that raised, and its next one loses gradients.
        """
        if self._wrappers.any_in_backward():
            return "FSDP is in the midst of it: its next backward would lose gradients"
        if not self._wrappers.postponed(params) and self._wrappers.deciders(params):
            return (
                "the ranks that share its model or decide with it may have gone on without it: their collective calls "
                "no longer meet"
            )
        return ""

    @break_graphs("ranks compare their settings once, at the first scale_loss")
    def compare(self, engine: _Engine, params: Sequence[torch.Tensor]) -> None:
        """Compare the settings of all ranks; see :mod:`xamp.scaling.rank_settings`.

        Args:
            engine: the engine of the session.
            params: the parameters of the step. A model may hold others while FSDP2 gathers them.
        """
        if not distributed.is_running():
            return
        engine.check_not_sharded("scale_loss")
        policy, settled = engine.policy, self._settings
        holders = self._wrappers.holders(params)
        given = [] if engine.process_group is None else [engine.process_group]
        named = [pair for model in engine.models().values() for pair in model.named_parameters()]
        own = {id(p) for _, p in named} | {id(p) for p in params}
        settings = _settings_of(engine)
        unseen = [] if holders or engine.enabled else search(params)
        settled.look()

        def name(group: Any) -> str:
            names = self._wrappers.names_within(group, own, unseen) or [n for n, _ in named]
            names = self._names.setdefault(group.group_name, names)
            return hashlib.sha256(",".join(names).encode()).hexdigest()[:16]

        if holders:
            settings[_AVERAGES] = str(self._wrappers.averages(params))
            settled.meet(widest(holders), name, settings, waits=not self._wrappers.may_be_left(params))
            if "False" in settled.heard(_AVERAGES):
                self._wrappers.agree_always = True
        elif not policy.manages_gradients:  # nothing is shared, or by a DDP that this rank does not see
            settled.tell(distributed.own_groups(), name, settings)
        if given:  # these ranks were said to decide together
            waits = policy.checks and not self._wrappers.may_be_left(params)
            settled.meet(widest(given), _alone, settings, waits=waits, compared=OF_THE_SCALE)
        elif not engine.enabled:
            settled.tell([None], _alone, settings)
        elif policy.checks and not holders:  # some ranks may never come
            settled.meet(widest([None]), _alone, settings, waits=False, compared=OF_THE_SCALE)


def _plain_levels() -> str:
    """Return the levels that leave gradients and weights as they are."""
    return listed(levels_where(lambda row: not row.manages_gradients), "and")


def _settings_of(engine: _Engine) -> dict[str, str]:
    """Return all that ranks must share, by name."""
    told = {field.name: str(getattr(engine.policy, field.name)) for field in dataclasses.fields(engine.policy)}
    scales = ", ".join(f"{scaler.host_scale:g}" for scaler in engine.scalers)
    return {"enabled": str(engine.enabled), **told, "loss_scale": scales}
