"""The engine behind :class:`xamp.GradScaler`, for optimizers that were not given to ``initialize``.

It does not change the optimizers and holds them weakly, so they may come and go. The scale moves after the step, in
``update``, by the flags of all optimizers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from xamp.casting import ops
from xamp.distributed import ranks, wrappers
from xamp.distributed.rank_settings import ScalerSettings
from xamp.errors import PolicyError, StateError
from xamp.policy import LEVELS, Request, compile_policy
from xamp.registry import registry
from xamp.scaling.engine import Engine
from xamp.scaling.fused import FusedChoice
from xamp.scaling.optimizer import state_of
from xamp.scaling.scale import DeviceState, LossScaler
from xamp.scaling.step import OptimizerState
from xamp.sessions.session import find_session

__all__ = ["ManualEngine", "Use", "sharing"]

_SLOTS = 4  # number of optimizers for which the device state has room at first

Use = dict[str, Any]
"""What torch's GradScaler keeps of one optimizer since the last ``update``, and the engine's state (``"state"``)."""


def sharing(process_group: Any, params: Iterable[torch.Tensor]) -> Sequence[Any]:
    """Return the groups whose ranks must have equal scalers for ``params``."""
    return [process_group] if process_group is not None else wrappers.groups_sharing(params)


class ManualEngine(Engine):
    """The engine of one :class:`xamp.GradScaler`, with its loss scale on ``device``.

    Attributes:
        checked: indices of the optimizers whose gradients were checked since the last update. A new optimizer gets none
            of these indices before the next update, so that the flag of an optimizer that is gone by then still counts.
        began: a loss was scaled since the last update.
    """

    moves_before_step = False

    def __init__(self, device: torch.device, process_group: Any) -> None:
        policy = compile_policy(Request(), LEVELS["O1"], tuple(ops.OP_POLICIES))
        backend = registry.resolve("auto", device.type)
        self._state_of: Any = WeakIdKeyDictionary()  # by optimizer
        self.checked: set[int] = set()
        super().__init__(policy, backend, device, [], process_group=process_group)
        self._fused = backend.capabilities(device).fused_optimizers  # here, for it may wait for trials: no step does
        self.prepare_state(_SLOTS)
        self._scaler_settings = ScalerSettings()
        self._sharing: Sequence[Any] | None = None  # process groups, found at the first check
        self._factors = [self.scaler.factor]
        self._known_version = self.scaler.factor._version  # when the engine last read it
        self.began = False
        self._finished_updates = self.scaler.updates  # moves of the scale of which the iteration has ended

    @property
    def states(self) -> list[OptimizerState]:
        """The states of the optimizers that are alive. A stored list would keep the parameters of dead ones alive."""
        return list(self._state_of.values())

    @property
    def scaler(self) -> LossScaler:
        """The one loss scale."""
        return self.scalers[0]

    def begin(self, process_group: Any) -> torch.Tensor:
        """Return the factor for a loss. Before the first after an update, clear the device's overflow flag."""
        self.process_group = process_group
        if not self.began:
            self.backend.clear_overflow(self.device)
            self.began = True
        return self.scaler.factor

    def state_for(self, optimizer: Optimizer, call: str) -> OptimizerState:
        """Return the state of ``optimizer``, up to date with its groups.

        Raises:
            StateError: ``initialize`` manages the optimizer.
            PolicyError: it is not an optimizer.
        """
        try:
            state: OptimizerState | None = self._state_of.get(optimizer)
            iter(optimizer.param_groups)
        except (AttributeError, TypeError) as error:
            raise PolicyError(
                f"GradScaler.{call}({type(optimizer).__name__}): must be given an optimizer, or what has its "
                f"param_groups and step and can be referred to weakly: {error}."
            ) from None
        if state is None or state_of(optimizer) is not None:
            self._refuse_managed(optimizer, call)
        if state is None:
            state = self._state_of[optimizer] = self._new_state(optimizer)
        params = [p for group in optimizer.param_groups for p in group["params"]]
        held = state.gradients.stepped
        if len(params) != len(held) or any(a is not b for a, b in zip(params, held, strict=True)):
            state.find_parameters()
        return state

    def unscale(self, state: OptimizerState, use: Use) -> None:
        """Unscale and check the gradients of one optimizer. After an error half-way they are dropped."""
        if ranks.is_running() and not self._scaler_settings.is_settled:
            self._compare_settings(state.gradients.stepped)
        try:
            state.gradients.ready = False
            state.gradients.unscale(self.scaler, state.found_inf_since_step, False)
            for group in self._deciders(state) if ranks.is_running() else ():
                ranks.share_overflow(state.found_inf_since_step, group)
            state.fresh = False
            self._record_check(state, use, {self.device: state.found_inf_since_step} if state.gradients.ready else {})
        except BaseException:
            if use["stage"] is OptState.READY:  # nobody can tell which of them are unscaled
                state.forget_backwards()
                self.checked.discard(state.index)
            raise

    def record_flags(self, state: OptimizerState, use: Use, found: Mapping[torch.device, torch.Tensor]) -> None:
        """Record what a method of a user's subclass found, by device. Where it left the gradients scaled, they are."""
        since = state.found_inf_since_step
        for flag in (each for each in found.values() if each is not since):
            torch.maximum(since, flag.to(self.device, non_blocking=True), out=since)
        if use["stage"] is OptState.READY:
            state.fresh, state.gradients.ready = False, len(found) > 0
            state.gradients.used[self.scaler.index] = self.scaler.updates
            self._record_check(state, use, found)

    def _record_check(self, state: OptimizerState, use: Use, found: Mapping[torch.device, torch.Tensor]) -> None:
        if found:
            self.checked.add(state.index)
        use.update(stage=OptState.UNSCALED, found_inf_per_device=dict(found))

    def _compare_settings(self, params: Sequence[torch.Tensor]) -> None:
        """Compare with the scalers of the ranks that share ``params``; ranks that share none may have any."""
        if self._sharing is None:
            self._sharing = sharing(self.process_group, params)
        rules = self.scaler.rules._asdict()
        settings = {"enabled": True, "loss_scale": self.scaler.host_scale, **rules}
        texts = {name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in settings.items()}
        self._scaler_settings.compare(self._sharing, params, texts)

    def _deciders(self, state: OptimizerState) -> Sequence[Any]:
        """Return the groups that must be told of an inf: of sharded parameters and of a chip that saturates."""
        params, group = state.gradients.stepped, self.process_group
        in_parts = state.gradients.in_parts
        found = list(self._sharing or ()) if in_parts else []  # DDPs beside the sharded parameters are among these
        if group is not None or self.saturates or any(map(ranks.is_shard, params)):
            found = [group, *found]
        if in_parts:
            found += wrappers.groups_of_meshes(params)
        return ranks.widest(found) if found else ()

    def move_scales(self, state: OptimizerState) -> None:
        """Do nothing: the scale moves after the step, in :meth:`move`."""

    def move(self, flags: Iterable[torch.Tensor]) -> None:
        """Back off or grow the scale by ``flags`` and those of all optimizers, once until :meth:`finish` is done."""
        if self.scaler.updates == self._finished_updates:
            found = self.memory.found_inf_since_step.max()
            for flag in flags:
                if flag._base is not self.memory.values:  # else it is an optimizer's
                    found = torch.maximum(found, flag.to(self.device, non_blocking=True))
            self.scaler.update(found)

    def finish(self) -> None:
        """End the iteration, after the scale has moved or was set. Where this was interrupted, it runs again."""
        self.outdate_losses()
        self.memory.lower_flags()
        self.began = False
        self.checked, self._finished_updates = set(), self.scaler.updates  # one line, so that both are done or none

    def outdate_losses(self) -> None:
        """Make autograd refuse the backward of every loss scaled until now, because its factor has a new version."""
        for factor in self._factors:
            torch.autograd.graph.increment_version(factor)
        self._factors = [self.scaler.factor]
        self._known_version = self.scaler.factor._version

    def notice_writes(self) -> None:
        """Take in a write to the scale by a subclass of the scaler. The version counter shows it."""
        if self.scaler.factor._version != self._known_version:
            self.scaler.changed()
            self._known_version = self.scaler.factor._version

    def _refuse_managed(self, optimizer: Optimizer, call: str) -> None:
        found = find_session(optimizer)
        if found is not None and found.engine.enabled:
            raise StateError(
                f"GradScaler.{call}({type(optimizer).__name__}): xamp.initialize manages this optimizer and scales "
                "its losses already. Use `with xamp.scale_loss(loss, optimizer)`, or close the session first: "
                "xamp.session(optimizer).close()."
            )

    def _new_state(self, optimizer: Optimizer) -> OptimizerState:
        taken = {state.index for state in self.states} | self.checked
        index = next(i for i in range(len(taken) + 1) if i not in taken)
        if index >= len(self.memory.found_inf):
            self._make_room()
        return OptimizerState(self, optimizer, index, FusedChoice(optimizer, False, self._fused, sparse=False))

    def _make_room(self) -> None:
        """Double the number of flags in the device state."""
        old = self.memory
        new = DeviceState(1, 2 * len(old.found_inf), self.device, old.captures)
        for name in ("scales", "inverses", "found_inf", "found_inf_since_step"):
            before = getattr(old, name)
            getattr(new, name)[: len(before)].copy_(before)
        self.memory = new
        self.scaler.live_in(new)
        self._factors.append(self.scaler.factor)
        self._known_version = self.scaler.factor._version
        for state in self.states:
            state.outcomes.observe_all()
            state.live_in(new)
