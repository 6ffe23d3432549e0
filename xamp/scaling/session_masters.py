"""The masters of one session, between its steps: they follow what is written into the models, and the models them.

Masters are used for the first time at the first ``scale_loss``: until then they follow the parameters. From then on the
parameters follow, at each step, and before a forward where something other than a step has changed a master.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch.nn.parallel import DistributedDataParallel

from xamp.policy import Policy
from xamp.scaling import ddp as ddps
from xamp.scaling import followers, masters, ranks
from xamp.scaling.lost_writes import LostWrites, warn_of_lost, warn_of_old
from xamp.scaling.step import OptimizerState

__all__ = ["SessionMasters"]


class _Engine(Protocol):
    """The part of :class:`xamp.scaling.engine.Engine` that masters need."""

    policy: Policy

    @property
    def states(self) -> Sequence[OptimizerState]:
        """The states, one for each optimizer."""

    def names_of(self, params: Iterable[torch.Tensor]) -> list[str]:
        """Return the qualified names of parameters."""

    def check_not_sharded(self, call: str) -> None:
        """Refuse a model that was sharded after ``initialize``."""


class SessionMasters:
    """The masters of one session.

    Args:
        engine: the engine of the session.

    Attributes:
        pairs: all lowered parameters and their masters.
        tells_lost_writes: warn of weights of the model that the masters will overwrite.
    """

    tells_lost_writes = True

    def __init__(self, engine: _Engine) -> None:
        self.pairs: list[masters.Pair] = []
        self._engine = engine
        self._in_use = False
        self._found_old = False  # a forward ran without masters that had changed, for no graph asked
        self._lost_writes = LostWrites()

    def add(self, pairs: Iterable[masters.Pair]) -> None:
        """Remember masters that an optimizer of this session holds, and their parameters."""
        known = {id(m) for _, m in self.pairs}
        self.pairs += [pair for pair in pairs if id(pair[1]) not in known]

    def use(self) -> None:
        """Use the masters for the first time: they follow what was written into the parameters."""
        masters.use(self.pairs)

    def settle(self, fresh: Iterable[DistributedDataParallel], alone: bool) -> None:
        """Let masters follow what was written into the parameters, and make them equal on the ranks of each new DDP.

        This happens at the first use of the masters, and whenever a DDP appears.

        Args:
            fresh: the DDP objects that are new.
            alone: nothing is shared between processes.
        """
        if not self._in_use or (not alone and ranks.is_shard(self.pairs[0][0])):
            self._engine.check_not_sharded("scale_loss")
        if not self._in_use:
            self.use()
            self._in_use = True
        elif fresh:
            masters.use(self.pairs)
        elif self._model_is_behind():
            return
        elif self.tells_lost_writes and not torch.compiler.is_compiling() and self._lost_writes.is_due(self.pairs):
            self._look_for_lost_writes()
        for ddp in fresh:
            self._share(ddp)
        for state in self._engine.states:
            state.master_versions.note()

    def _share(self, ddp: DistributedDataParallel) -> None:
        """Give all ranks of ``ddp`` the masters that its first rank has of its parameters."""
        held = ddps.held(ddp)
        pairs = [pair for pair in self.pairs if id(pair[0]) in held]
        if pairs:  # else it holds another model, and may have outlived its process group
            ranks.share_from_rank_zero([m.detach() for _, m in pairs], ddp.process_group)
            masters.write_quietly(pairs)

    def _look_for_lost_writes(self) -> None:
        """Warn, once, of weights of the model that the next step will overwrite."""
        states = self._engine.states
        if any(state.outcomes.replays.capturing() for state in states):
            return
        lost = self._lost_writes.look([pair for state in states for pair in state.master_versions.at_rest()])
        if lost:
            warn_of_lost(self._engine.names_of(lost), self._engine.policy.level)

    def follow_masters(self) -> None:
        """Before a forward: write the masters that changed since the last step into the model."""
        for state in self._engine.states:
            state.master_versions.follow()

    def may_be_behind(self) -> bool:
        """Return whether compiled forwards must ask whether a master has changed."""
        return self._found_old or any(state.master_versions.lent for state in self._engine.states)

    def _model_is_behind(self) -> bool:
        """Find out whether a forward in a larger graph ran with weights of before; then such graphs ask from now on."""
        if not followers.graphs.exist or torch.compiler.is_compiling():
            return False
        if not any(state.master_versions.were_missed for state in self._engine.states):
            return False
        if not self._found_old:
            self._found_old = True
            followers.look()
            warn_of_old(self._engine.policy.level)
        return True
