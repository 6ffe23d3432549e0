"""An engine whose steps are called by hand: for optimizers that nobody gave to ``initialize``, and that come and go.

:class:`xamp.GradScaler` is the face of it. Optimizers are left as they are and held weakly; the scale moves after the
step, in ``update``, by the flags of all of them.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from xamp.casting import ops
from xamp.errors import PolicyError, StateError
from xamp.policy import LEVELS, Request, compile_policy
from xamp.registry import registry
from xamp.scaling import distributed
from xamp.scaling.engine import Engine
from xamp.scaling.fused import FusedForm, honours_found_inf
from xamp.scaling.optimizer import state_of
from xamp.scaling.scale import DeviceState, LossScaler
from xamp.scaling.step import OptimizerState
from xamp.sessions.session import find_session

__all__ = ["ManualEngine", "Stage", "Use", "has_nothing_to_do"]

_SLOTS = 4  # optimizers that the device state has room for at first


class Stage(enum.Enum):
    """Where an optimizer is between two updates."""

    READY = 0
    UNSCALED = 1
    STEPPED = 2


@dataclasses.dataclass
class Use:
    """One optimizer's part in the iteration.

    Attributes:
        state: what the engine keeps for it.
        stage: how far it is.
        checked: it had gradients to look at.
    """

    state: OptimizerState
    stage: Stage = Stage.READY
    checked: bool = False


def has_nothing_to_do(use: Use, optimizer: Optimizer) -> bool:
    """Whether a step would be a fused one over no gradients at all, which torch lets pass."""
    return honours_found_inf(optimizer) and all(p.grad is None for p in use.state.gradients.stepped)


class ManualEngine(Engine):
    """See the module.

    Args:
        device: where the scale lives.
        process_group: see :func:`xamp.initialize`.

    Attributes:
        uses: optimizer -> :class:`Use`.
        checked: places of the optimizers whose gradients were looked at since the last update. Nobody else gets one of
            them before the next: an optimizer that is gone by then counts.
    """

    moves_before_step = False

    def __init__(self, device: torch.device, process_group: Any) -> None:
        policy = compile_policy(Request(), LEVELS["O1"], tuple(ops.OP_POLICIES))
        backend = registry.resolve("auto", device.type)
        self.uses: Any = WeakIdKeyDictionary()
        self.checked: set[int] = set()
        super().__init__(policy, backend, device, [], process_group=process_group)
        self.prepare_state(_SLOTS)
        self._factors = [self.scaler.factor]
        self._noticed = -1  # what losses were multiplied by since the last update
        self._began = False

    @property
    def states(self) -> list[OptimizerState]:
        """What is kept for the optimizers that are alive; a list would keep the parameters of the others."""
        return [use.state for use in self.uses.values()]

    @property
    def scaler(self) -> LossScaler:
        """The one loss scale."""
        return self.scalers[0]

    def begin(self) -> None:
        """A loss is about to be scaled: once between two updates the device is told that backwards follow."""
        if not self._began:
            self.backend.clear_overflow(self.device)
            self._began = True

    def use_of(self, optimizer: Optimizer, call: str) -> Use:
        """The part of ``optimizer``, with its groups as they are now.

        Raises:
            StateError: ``initialize`` manages it. PolicyError: it is no optimizer.
        """
        try:
            use: Use | None = self.uses.get(optimizer)
            iter(optimizer.param_groups)
        except (AttributeError, TypeError) as error:
            raise PolicyError(
                f"GradScaler.{call}({type(optimizer).__name__}): must be given an optimizer, or what has its "
                f"param_groups and step and can be referred to weakly: {error}."
            ) from None
        if use is None or state_of(optimizer) is not None:
            self._refuse_managed(optimizer, call)
        if use is None:
            use = Use(self._new_state(optimizer))
            self.uses[optimizer] = use
        params = [p for group in optimizer.param_groups for p in group["params"]]
        held = use.state.gradients.stepped
        if len(params) != len(held) or any(a is not b for a, b in zip(params, held, strict=True)):
            use.state.find_parameters()
        return use

    def unscale(self, use: Use) -> None:
        """Unscale and check the gradients of one optimizer."""
        state = use.state
        state.gradients.ready = False
        state.gradients.unscale(self.scaler, state.sticky, False)
        if distributed.world_size(self.process_group) > 1 and not self._overflow_travels(state):
            distributed.share_overflow(state.sticky, self.process_group)
        state.fresh = False
        use.stage, use.checked = Stage.UNSCALED, state.gradients.ready
        if use.checked:
            self.checked.add(state.index)

    def _overflow_travels(self, state: OptimizerState) -> bool:
        """Whether an inf reaches the other ranks with the gradients: not from shards, nor where the chip saturates."""
        return not self._saturates and not any(map(distributed.is_shard, state.gradients.stepped))

    def move(self) -> None:
        """Move the scale by what was found in the gradients of all optimizers."""
        self.scaler.update(self.memory.sticky.max())

    def finish(self) -> None:
        """The scale has moved or was set: a new iteration begins."""
        self.outdate_losses()
        self.memory.lower_flags()
        self.checked.clear()
        for use in self.uses.values():
            use.stage, use.checked = Stage.READY, False
        self._began = False

    def outdate_losses(self) -> None:
        """What was scaled until now cannot go backward any more: autograd refuses a factor that was written to."""
        for factor in self._factors:
            torch.autograd.graph.increment_version(factor)
        self._factors = [self.scaler.factor]
        self._noticed = self.scaler.factor._version

    def notice_writes(self) -> None:
        """A subclass of the scaler may have written to the scale, which shows in its version."""
        if self.scaler.factor._version != self._noticed:
            self.scaler.changed()
            self._noticed = self.scaler.factor._version

    def _refuse_managed(self, optimizer: Optimizer, call: str) -> None:
        found = find_session(optimizer)
        if found is not None and found.engine.enabled:
            raise StateError(
                f"GradScaler.{call}({type(optimizer).__name__}): xamp.initialize manages this optimizer and scales "
                "its losses already. Use `with xamp.scale_loss(loss, optimizer)`, or close the session first: "
                "xamp.session(optimizer).close()."
            )

    def _new_state(self, optimizer: Optimizer) -> OptimizerState:
        taken = {use.state.index for use in self.uses.values()} | self.checked
        index = next(i for i in range(len(taken) + 1) if i not in taken)
        if index >= len(self.memory.flags):
            self._make_room()
        names = self.backend.capabilities(self.device).fused_optimizers
        return OptimizerState(self, optimizer, index, FusedForm(optimizer, False, names, sparse=False))

    def _make_room(self) -> None:
        """Double the number of flags."""
        old = self.memory
        new = DeviceState(1, 2 * len(old.flags), self.device)
        for name in ("scales", "inverses", "flags", "sticky"):
            before = getattr(old, name)
            getattr(new, name)[: len(before)].copy_(before)
        self.memory = new
        self.scaler.live_in(new)
        self._factors.append(self.scaler.factor)
        for use in self.uses.values():
            use.state.observe_all()
            use.state.live_in(new)
