"""The engine of one ``initialize`` call, which its models and optimizers share, and the ``scale_loss`` over it.

:class:`ScaledLoss` with :meth:`Engine.enter` and :meth:`Engine.leave` is the order of a backward.
:mod:`xamp.scaling.gradients` changes the gradients, :mod:`xamp.scaling.step` runs the step of an optimizer. The engine
holds models and optimizers weakly, so that it is freed when they are.

Ctrl-C may come before Python begins ``__exit__``, so no flag can tell whether a ``with`` block is still open. The
states and the scaler that are in use keep a :class:`Scope`, which knows the context manager weakly. Where that is gone,
or where only a traceback still shows it, the block was abandoned, and the next call cleans up in its place.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import traceback
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from xamp.contract import Backend
from xamp.distributed import ddp as ddps
from xamp.distributed import ranks
from xamp.distributed.rank_settings import SessionSettings
from xamp.distributed.wrappers import Wrappers
from xamp.errors import StateError
from xamp.ground.compiler import break_graphs
from xamp.ground.containers import cast_floats
from xamp.ground.undo import Undo
from xamp.policy import Policy
from xamp.scaling import masters
from xamp.scaling.counts import Counts, Stats
from xamp.scaling.optimizer import replace_params
from xamp.scaling.overflow_flag import FlagWatch
from xamp.scaling.scale import DeviceState, LossScaler
from xamp.scaling.step import OptimizerState
from xamp.scaling.weights import MasterVersions, Weights

__all__ = ["Engine", "ScaledLoss", "Scope"]


class Engine:
    """Everything that one call of ``initialize`` set up.

    Attributes:
        device: the device of the loss scale, which is that of the models' first parameter.
        saturates: the device returns its largest number for an inf, and tells of an overflow by a flag.
        scalers: the loss scales, by ``loss_id``.
        states: the states, one for each optimizer.
        memory: all numbers that the session keeps on the device; made by :meth:`prepare_state`.
        counts: applied and skipped steps, as far as the host knows of them.
        num_models: the number of models that ``initialize`` was given.
        process_group: ranks that decide together; None: those of the wrappers that hold the parameters, else all.
        undo: gives the models and optimizers back in fp32 and in their own classes.
        enabled: False where ``initialize(enabled=False)`` made the engine, which then does nothing.
        skips_together: if one optimizer of a ``scale_loss`` overflowed, all its optimizers skip their steps.
        weights: the models' weights and their masters.
        cast: the function that casts the models' arguments and results.
        refusal: why no step can be right any more, for an error; empty: it can.
        delegated: another implementation does the work, and cannot be asked to stop.
        scale_loss: None; or the function that :func:`xamp.scale_loss` calls where another implementation does the work.
    """

    skips_together = False
    delegated = False
    state_class: type[OptimizerState] = OptimizerState
    weights_class: type[Weights] = Weights
    cast: Callable[[Any, torch.dtype], Any] = staticmethod(cast_floats)
    scale_loss: Callable[..., contextlib.AbstractContextManager[torch.Tensor]] | None = None

    def __init__(
        self,
        policy: Policy,
        backend: Backend,
        device: torch.device,
        models: Sequence[nn.Module],
        *,
        process_group: Any = None,
        verbosity: int = 1,
        enabled: bool = True,
    ) -> None:
        self.policy = policy
        self.backend = backend
        self.device = device
        self.enabled = enabled
        self.memory: DeviceState
        self.scalers: Sequence[LossScaler] = ()
        self.states: Sequence[OptimizerState] = ()
        self.undo = Undo()
        self._models = [weakref.ref(model) for model in models]
        self.num_models = len(models)
        self.process_group = process_group
        self._wrappers = Wrappers(self._models, process_group)
        self.saturates = backend.capabilities(device).overflow == "flag"
        self.counts = Counts(verbosity=verbosity, names_of=self.names_of, by_flag=self.saturates)
        watching = self.saturates and policy.checks
        self._watch = FlagWatch(backend, device, self._record_forward_overflow) if watching else None
        if self._watch is not None:
            self._watch.follow(models)
        self._captures = backend.capture_check(device)
        self.weights = self.weights_class(
            policy.level, self._master_versions, self.names_of, self.check_not_sharded, self._captures
        )
        self._alone = True  # on entering scale_loss, nothing was shared between processes
        self._rank_settings = SessionSettings(self._wrappers, policy, enabled)
        self.refusal = ""

    def _master_versions(self) -> Iterable[MasterVersions]:
        return [state.master_versions for state in self.states]

    def add_states(self, states: Iterable[OptimizerState]) -> None:
        """Add the states of optimizers. The engine decides on their steps from now on."""
        states = list(states)
        self.states = [*self.states, *states]
        self._wrappers.remember_params(_params_of(states))

    def remove_states(self, states: Iterable[OptimizerState]) -> None:
        """Undo :meth:`add_states`."""
        gone = {id(state) for state in states}
        self.states = [state for state in self.states if id(state) not in gone]

    def prepare_checkpoint(self) -> None:
        """Prepare for saving or loading a state. Every master must be known after this call."""

    def _record_forward_overflow(self, found: torch.Tensor) -> None:
        """Record the overflow flag of a forward for the next step of each optimizer."""
        for state in self.states:
            before = state.gradients.forward_overflow
            state.gradients.forward_overflow = found if before is None else torch.maximum(before, found)

    def stats(self) -> Stats:
        """Return the counts of applied and skipped steps. Waits for the device."""
        stats = Stats(self.counts.applied, self.counts.skipped)
        for state in self.states:
            more = state.outcomes.not_counted()
            stats.applied += more.applied
            stats.skipped += more.skipped
        return stats

    def judge_replays(self) -> None:
        """Raise a LossScaleCollapsed where replays of a captured step met a run of overflows. Waits for the device."""
        for state in self.states:
            state.outcomes.judge_replays()

    def last_step(self) -> Any:
        """Return what the last step did; for several optimizers a dict by optimizer. May wait for the device."""
        outcomes = {state.optimizer: state.outcomes.known() for state in self.states if state.is_alive}
        return next(iter(outcomes.values()), None) if len(outcomes) <= 1 else outcomes

    def serves(self, optimizer: object) -> bool:
        """Return whether ``optimizer`` is one of the engine's optimizers."""
        return any(state.is_alive and state.optimizer is optimizer for state in self.states)

    def check_closable(self) -> None:
        """Raise a StateError where models and optimizers cannot be given back in their present state."""
        if any(state.is_open() for state in self.states):
            raise StateError("session.close(): inside `with xamp.scale_loss(...)`. Close after the block.")
        for state in self.states:
            state.gradients.refuse_scaled("session.close()")

    def prepare_state(self, optimizers: int) -> None:
        """Make the device state for a number of optimizers. Scales that were loaded before stay."""
        before = self.scalers
        self.memory = DeviceState(self.policy.num_losses, optimizers, self.device, self._captures)
        self.scalers = [LossScaler(self.policy, self.memory, i) for i in range(self.policy.num_losses)]
        self.counts.scalers = self.scalers
        for old, new in zip(before, self.scalers, strict=False):
            new.set(old.host_scale, int(old.growth_tracker))

    def pairs(self) -> Sequence[masters.Pair]:
        """Return all low-precision parameters and their masters."""
        return self.weights.pairs

    def check_not_shared(self, state: OptimizerState, params: Iterable[torch.Tensor]) -> None:
        """Raise a StateError if another optimizer of this engine than that of ``state`` holds one of ``params``.

        Both optimizers would unscale its gradient and step its master.
        """
        if not self.policy.manages_gradients:
            return
        held = {id(p) for other in self.states if other is not state for p in other.gradients.model_params()}
        shared = [p for p in params if id(p) in held]
        if shared:
            raise StateError(
                f"param_groups: {self.names_of(shared)[0]} is in another optimizer of this session too, and two would "
                f"unscale its gradient. At level {self.policy.level} give each parameter to one optimizer."
            )

    def adopt_group(self, state: OptimizerState, group: dict[str, Any]) -> None:
        """Take in a group that was added to an optimizer: give its low-precision parameters masters."""
        if self.policy.master_weights:
            pairs = [(p, m) for p in group["params"] if (m := masters.ensure_master(p, self.policy)) is not None]
            self.weights.add(pairs)
            replace_params(state.optimizer, pairs)
        state.fused.switch_on(state.optimizer)
        state.find_parameters()

    def models(self) -> dict[int, nn.Module]:
        """Return the models that are still alive, without their wrappers, by index in the call of ``initialize``."""
        return {i: model for i, ref in enumerate(self._models) if (model := ref()) is not None}

    def layout(self, param: torch.Tensor) -> ranks.Layout:
        """Return how the elements of ``param`` lie on the ranks."""
        return self._wrappers.layout(param)

    def names_of(self, params: Iterable[torch.Tensor]) -> list[str]:
        """Return the qualified names of parameters for messages. A master has the name of its parameter."""
        many = len(self._models) > 1
        names: dict[int, str] = {}
        for index, model in self.models().items():
            prefix = f"models[{index}]." if many else ""
            for name, param in model.named_parameters():
                names[id(param)] = prefix + name
        names.update({id(m): names[id(p)] for p, m in self.weights.pairs if id(p) in names})
        return [names.get(id(p), f"a parameter of shape {tuple(p.shape)} outside the models") for p in params]

    # ---------------------------------------------------------------- the step

    def enter(
        self, states: Sequence[OptimizerState], scaler: LossScaler, entered: list[OptimizerState], delay_unscale: bool
    ) -> None:
        """Before a backward: bring masters up to date, and existing gradients to the scale.

        ``entered`` gets those of ``states`` whose gradients were touched.
        """
        if self._watch is None:  # first: what follows may raise, and then end_backward is called
            self.backend.clear_overflow(self.device)
        else:
            self._watch.open()
        for state in states:
            state.notice_groups("scale_loss")
        # `.data`, for a weak dictionary counts its length in Python.
        self._alone = alone = not (ranks.is_running() or ddps.noted.data)
        fresh = () if alone else self._find_wrappers(states)
        if self.weights.pairs:
            self.weights.reconcile(fresh, alone)
        shared = not alone and self._wrappers.hold_any()
        for state in states:
            entered.append(state)
            gradients = state.gradients
            gradients.hidden = functools.partial(self._hidden, state) if shared else None
            gradients.enter(scaler)
            if gradients.used and self.policy.dynamic:
                self._notice_cleared(scaler)
        if self.weights.pairs and alone and not (delay_unscale or self.saturates or torch.compiler.is_compiling()):
            for state in states:
                state.gradients.move_early(scaler)

    def _notice_cleared(self, scaler: LossScaler) -> None:
        """End the window of ``scaler`` where all gradients of its backwards were cleared without a step.

        Not where a graph holds the scale: replays would do it each time, and a step reads the flag of its capture.
        """
        reached = [s.gradients for s in self.states if s.gradients.used.get(scaler.index) is scaler.updates]
        if reached and all(gradients.were_cleared() for gradients in reached) and not scaler.in_graph():
            scaler.end_window(stepped=False)

    def _hidden(self, state: OptimizerState) -> list[torch.Tensor]:
        """Return the gradients for the optimizer of ``state`` that FSDP keeps outside of any ``.grad``."""
        others = (p for other in self.states if other is not state for p in other.gradients.direct)
        return self._wrappers.hidden_gradients(state.gradients.direct, others)

    def _find_wrappers(self, states: Sequence[OptimizerState]) -> Sequence[DistributedDataParallel]:
        """Return the DDP objects that are new; compare the settings of the ranks where that was not done yet."""
        fresh = self._wrappers.find()
        if self._wrappers.may_be_left(p for state in states for p in state.gradients.model_params()):
            ddps.refuse_join(self.policy, bool(self.weights.pairs), [state.optimizer for state in states])
        if fresh or not self._rank_settings.is_settled:
            self._compare_with_ranks(_params_of(states))
            if self.policy.checks:
                ddps.warn_of_memory(fresh)
        return fresh

    def compare_settings(self, optimizers: Iterable[Optimizer]) -> None:
        """Compare the settings with those of the ranks that share the models, where gradients are left as they are."""
        if not self._rank_settings.is_settled:
            self._wrappers.find()
            self._compare_with_ranks([p for one in optimizers for group in one.param_groups for p in group["params"]])

    @break_graphs("ranks compare their settings once, at the first scale_loss")
    def _compare_with_ranks(self, params: Sequence[torch.Tensor]) -> None:
        if ranks.is_running():
            self.check_not_sharded("scale_loss")
            self._rank_settings.compare([scaler.host_scale for scaler in self.scalers], params)

    def end_backward(self) -> None:
        """End a backward. Called at the end of the body of ``scale_loss``, also after an exception."""
        if self._watch is not None:
            self._watch.close()

    def check_not_sharded(self, call: str) -> None:
        """Raise a StateError for a model that was sharded or parallelized after ``initialize``.

        That replaced its parameters: a step would move the old ones, or masters of whole ones, and not the model.
        """
        params = [(state, p) for state in self.states if state.is_alive for p in state.gradients.model_params()]
        lost = self._wrappers.lost([p for _, p in params], masters.master_of)
        if lost:
            name = next(type(state.optimizer).__name__ for state, p in params if p is lost[0])
            others = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            raise StateError(
                f"{call}: the model was sharded since initialize (fully_shard, FullyShardedDataParallel, "
                "parallelize_module or a DDP with device_mesh), and a parameter of shape "
                f"{tuple(lost[0].shape)}{others} that {name} holds is none of the model's any more, so that no step "
                "would reach the model. Shard first, then make the optimizer from model.parameters(), then call "
                "initialize."
            )

    def leave(
        self, states: Sequence[OptimizerState], scaler: LossScaler, delay_unscale: bool, delay_overflow_check: bool
    ) -> None:
        """After a backward: unscale and check the gradients; or postpone this."""
        params = [] if self._alone else _params_of(states)
        if delay_unscale or (params and self._wrappers.postponed(params)):
            wrapper = "the wrapper's no_sync postponed its reduction"
            for state in states:
                state.gradients.postpone(scaler, "delay_unscale=True postponed it" if delay_unscale else wrapper)
            return
        if not self.policy.checks:
            for state in states:
                state.gradients.unscale(scaler, None, False)
            return
        found_inf = self._check(states, scaler, delay_overflow_check, params)
        if params and not self._rank_settings.is_settled:
            self._rank_settings.compare_again()  # all ranks have written by now: see there
        if scaler.has_own_flag and not delay_overflow_check:
            self._record_found_inf(states, scaler, found_inf)

    def _record_found_inf(self, states: Sequence[OptimizerState], scaler: LossScaler, found_inf: torch.Tensor) -> None:
        """Record what a check found, for ``scaler`` and for the scales of backwards that were left scaled until now."""
        if not self.policy.dynamic:
            return
        for index in dict.fromkeys([scaler.index, *(i for state in states for i in state.gradients.owed)]):
            found = self.scalers[index].found
            torch.maximum(found, found_inf, out=found)
        for state in states:
            state.gradients.owed.clear()

    def move_scales(self, state: OptimizerState) -> None:
        """At a step of ``state``: move the scales whose backwards reached it, unless another step has moved them."""
        for index, updates in state.gradients.used.items():
            scaler = self.scalers[index]
            if scaler.updates is updates:
                scaler.end_window() if scaler.has_own_flag else scaler.update(scaler.found)

    def record_error(self, states: Sequence[OptimizerState], kind: type[BaseException]) -> None:
        """Refuse steps from now on if others wait for this rank, where the body of a ``scale_loss`` has raised."""
        params = [] if self._alone else _params_of(states)
        why = self._wrappers.lost_by_raising(params) if params else ""
        if why:
            self.refusal = (
                f"a backward in scale_loss raised {kind.__name__} on this rank, and {why}. Let the error end this "
                "process, so that the others end too, and go on from a checkpoint; torchrun restarts all of them."
            )

    def _check(
        self, states: Sequence[OptimizerState], scaler: LossScaler, throw_away: bool, shared: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Unscale and check the gradients, raise ``found_inf_since_step``, and return one flag for all ``states``.

        ``throw_away``: no ``found_inf_since_step`` is raised. ``shared``: the parameters, where processes may share
        them.
        """
        only = states[0]
        if len(states) == 1 and only.fresh and not throw_away:
            only.gradients.unscale(scaler, only.found_inf_since_step, True)
            only.fresh = False
            if shared:
                self._wrappers.agree(only.found_inf_since_step, shared, self.saturates)
            return only.found_inf_since_step
        flags = self.memory.found_inf
        flags.zero_()
        for state in states:
            state.gradients.unscale(scaler, state.found_inf, state.fresh, not throw_away)
        if shared:
            self._wrappers.agree(flags, shared, self.saturates)
        if throw_away:
            return flags.max()
        for state in states:
            state.mask_found_inf()
        found = flags.max()
        if self.skips_together:
            flags.fill_(found)
        for state in states:
            state.add_found_inf()
        return found


def _params_of(states: Iterable[OptimizerState]) -> list[torch.Tensor]:
    return [p for state in states for p in state.gradients.model_params()]


# ---------------------------------------------------------------- the with block


class Scope:
    """What is in use while a ``scale_loss`` is open. ``owner`` is the context manager, which is known weakly.

    Attributes:
        entered: the optimizers whose gradients it has touched.
        ended: the block is left. Set in one moment, so that an interrupt comes before it or after it.
    """

    __slots__ = ("_backward_ended", "_end_backward", "_owner", "_scaler", "_states", "ended", "entered")

    def __init__(self, owner: object, end_backward: Callable[[], None], states: Sequence[Any], scaler: Any) -> None:
        self._owner = weakref.ref(owner)
        self._end_backward = end_backward
        self._states = states
        self._scaler = scaler
        self.entered: list[Any] = []
        self.ended = False
        self._backward_ended = False

    def is_open(self) -> bool:
        """Return whether the block is being executed; clean up after it if it was abandoned."""
        if not self.ended and not _is_held(self._owner):
            self.abandon()
        return not self.ended

    def end_backward(self) -> None:
        """Tell the engine, once, that the backward is over."""
        if not self._backward_ended:
            self._backward_ended = True
            self._end_backward()

    def abandon(self) -> None:
        """Clean up after an exception: the gradients of a backward that came half-way are dropped."""
        self.end_backward()
        for state in self.entered:
            state.gradients.abandon(self._scaler)
        self.end()

    def forget(self) -> None:
        """Clean up where the gradients were half unscaled: all of them are dropped, and what was found in them."""
        for state in self.entered:
            state.forget_backwards()
        self.end()

    def end(self) -> None:
        """Let go of the optimizers and of the scale."""
        self.ended = True
        self._scaler.scope = None
        for state in self._states:
            state.scope = None


def _is_held(ref: weakref.ReferenceType[object]) -> bool:
    """Return whether anybody but a traceback holds the object: a ``with`` block, an ExitStack, a variable.

    A traceback keeps the frames that it shows, with their variables, for as long as somebody holds it. These frames
    do not run any more. This searches all objects, and is called before an error only.
    """
    found = ref()
    if found is None:
        return False
    running = {id(f) for frame in sys._current_frames().values() for f, _ in traceback.walk_stack(frame)}
    shown = [each for each in gc.get_referrers(found) if isinstance(each, types.FrameType) and id(each) not in running]
    probe = object()  # held as ``found`` is: by a variable of this function
    return sys.getrefcount(found) - sys.getrefcount(probe) > len(shown)


class ScaledLoss:
    """The context manager of :func:`scale_loss`. A class, because a generator costs more time than its body here."""

    __slots__ = ("__weakref__", "_delays", "_engine", "_loss", "_scaler", "_scope", "_states")

    def __init__(
        self,
        engine: Engine,
        states: Sequence[OptimizerState],
        scaler: LossScaler,
        loss: torch.Tensor,
        delay_unscale: bool,
        delay_overflow_check: bool,
    ) -> None:
        self._engine = engine
        self._states = states
        self._scaler = scaler
        self._loss = loss
        self._delays = delay_unscale, delay_overflow_check

    def _is_busy(self) -> bool:
        """Return whether another ``scale_loss`` with this scale or over one of these optimizers is open."""
        busy = self._scaler.scope is not None and self._scaler.is_open()
        for state in self._states:
            if state.scope is not None:
                busy = busy or state.is_open()
        return busy

    def __enter__(self) -> torch.Tensor:
        if self._is_busy():
            raise StateError(
                "scale_loss(loss, optimizer): another scale_loss over this optimizer or with this loss_id is open. "
                "Leave it first, or add the losses up and scale their sum."
            )
        self._scope = scope = Scope(self, self._engine.end_backward, self._states, self._scaler)
        try:
            self._scaler.scope = scope
            for state in self._states:
                state.scope = scope
            self._engine.enter(self._states, self._scaler, scope.entered, self._delays[0])
            if not self._engine.policy.scales:
                return self._loss
            loss, factor = self._loss, self._scaler.factor
            # This allocates, and may run out of memory.
            return loss * (factor if loss.device == self._engine.device else factor.to(loss.device))
        except BaseException:  # the body does not run, so nobody calls __exit__
            scope.abandon()
            raise

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        scope = self._scope
        before: object = self._scaler.updates
        try:
            if kind is not None:
                scope.abandon()
                self._engine.record_error(self._states, kind)
                return
            scope.end_backward()
            self._engine.leave(self._states, self._scaler, *self._delays)
            before = None  # all is unscaled, and nothing to be forgotten
            scope.end()
        except BaseException:
            if not scope.ended and kind is not None:
                scope.abandon()
            elif not scope.ended and self._scaler.updates is before:
                scope.forget()
            else:  # all is done; in xamp.apex the scale moves last
                scope.end()
            raise
