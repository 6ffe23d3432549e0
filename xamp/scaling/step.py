"""The step of one optimizer: what its backwards found, whether the step is skipped, and what the outcome was.

A backward that overflows raises the optimizer's sticky flag, on the device. If the flag is raised, ``step()`` is
skipped: the fused kernel skips, which gets the flag as ``found_inf``, or the host skips, which must read the flag.
After the step the masters are written into the model. The outcome is counted, logged and judged once the host can read
it without waiting.
"""

from __future__ import annotations

import copy
import enum
import logging
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from xamp.contract import Backend
from xamp.errors import LossScaleCollapsed, StateError
from xamp.ground.compiler import keep_eager
from xamp.ground.log import say
from xamp.policy import Policy, levels_where, listed
from xamp.scaling import distributed, masters
from xamp.scaling.fused import FusedForm
from xamp.scaling.gradients import Gradients
from xamp.scaling.replays import Replays
from xamp.scaling.scale import COLLAPSE_RUN, CollapseWatch, DeviceState, History, LossScaler, clock
from xamp.scaling.scope import Scope

__all__ = ["NOT_STEPPED", "OptimizerState", "Stats", "StepOutcome", "StepOwner", "has_stepped"]

NOT_STEPPED = object()
"""Stands for the result of a step that has not returned one."""

_HOOKED = Optimizer.profile_hook_step(Optimizer.step).__code__  # torch's wrapper, whose `out` is the step's result


class StepOutcome(enum.Enum):
    """What ``optimizer.step()`` did."""

    APPLIED = "applied"
    SKIPPED = "skipped"


class Stats:
    """Counts of optimizer steps, over all optimizers of a session.

    Attributes:
        applied: steps taken.
        skipped: steps that were skipped because a gradient overflowed.
    """

    def __init__(self, applied: int = 0, skipped: int = 0) -> None:
        self.applied = applied
        self.skipped = skipped

    def __repr__(self) -> str:
        return f"Stats(applied={self.applied}, skipped={self.skipped})"


class StepOwner(Protocol):
    """The part of :class:`xamp.scaling.engine.Engine` that an optimizer's state needs."""

    policy: Policy
    backend: Backend
    device: torch.device
    memory: DeviceState
    overflow_runs: dict[int, int]
    counts: Stats
    verbosity: int
    moves_before_step: bool
    refusal: str

    @property
    def scalers(self) -> Sequence[LossScaler]:
        """The loss scales, by ``loss_id``."""

    def pairs(self) -> Sequence[masters.Pair]:
        """Return all lowered parameters and their masters."""

    def names_of(self, params: Iterable[torch.Tensor]) -> list[str]:
        """Return the qualified names of parameters, for messages."""

    def check_not_shared(self, state: OptimizerState, params: Iterable[torch.Tensor]) -> None:
        """Refuse parameters that another optimizer of the session holds."""

    def check_not_sharded(self, call: str) -> None:
        """Refuse a model that was sharded after ``initialize``."""

    def adopt_group(self, state: OptimizerState, group: dict[str, Any]) -> None:
        """Take in a group that was added to the optimizer of ``state``."""


class OptimizerState:
    """What xamp keeps for one optimizer. It is the optimizer's attribute ``_xamp`` and holds the optimizer weakly.

    Attributes:
        engine: the engine that it belongs to.
        index: the index of the optimizer among the engine's.
        fused: the choice of the fused form.
        gradients: the optimizer's gradients.
        outcome: what the last step did: an outcome, or the flag on the device that tells it; None before the first.
        scope: the ``scale_loss`` over this optimizer that was entered last and not left; see :meth:`is_open`.
        fresh: no backward was checked since the last step, so the sticky flag is down.
        seen: the device state as it was at the newest step that was counted; None before the first.
        seen_at: when that step was, by :data:`xamp.scaling.scale.clock`.
        replays: counts what the device did with steps that were captured in a graph.
        norm: what :func:`xamp.clip_grad_norm_` last returned for this optimizer, on the device.
        flag: fp32 scalar: the backward that just ended overflowed; used where this cannot go into ``sticky`` at once.
        sticky: fp32 scalar: the sticky flag, raised by any backward since the last step that overflowed.
        gradients_class: the class of :attr:`gradients`.
    """

    gradients_class: type[Gradients] = Gradients

    def __init__(self, engine: StepOwner, optimizer: Optimizer, index: int, fused: FusedForm) -> None:
        self.engine = engine
        self.index = index
        self.fused = fused
        self.outcome: StepOutcome | torch.Tensor | None = None
        self.scope: Scope | None = None
        self.fresh = True
        self.seen: Sequence[float] | None = None
        self.seen_at = 0
        self.norm: torch.Tensor | None = None
        self._optimizer = weakref.ref(optimizer)
        self.gradients = self.gradients_class(engine.policy, engine.backend, fused, self._optimizer)
        self._watch = CollapseWatch(engine.scalers, moved_before_step=engine.moves_before_step)
        self._watch.resume(engine.overflow_runs.get(index, 0))
        self.replays = Replays(engine.device, len(engine.scalers), engine.memory.captures)
        self.live_in(engine.memory)
        self._master_versions: list[int] = []
        self._sizes = 0  # elements of all stepped tensors when the optimizer last made or loaded its state
        self._warm: set[int] = set()  # ids of parameters whose state exists, made by a step or loaded
        self._warm_states = 0
        self._warned_of_no_gradient = False
        self._unreached = 0  # the most stepped tensors that had no gradient at a step
        self.find_parameters()

    def live_in(self, memory: DeviceState) -> None:
        """Keep the flags in ``memory`` from now on. All records of the previous memory must have been read."""
        self._memory = memory
        self.flag = memory.flags[self.index]
        self.sticky = memory.sticky[self.index]
        self._history = History(memory)

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer."""
        found = self._optimizer()
        assert found is not None, "the optimizer owns this object"
        return found

    def is_open(self) -> bool:
        """Return whether a ``scale_loss`` over this optimizer is being executed."""
        return self.scope is not None and self.scope.is_open()

    def forget_backwards(self) -> None:
        """Drop all gradients since the last step, and the overflows that were found in them."""
        self.gradients.drop()
        self.sticky.zero_()
        self.fresh = True

    @property
    def is_alive(self) -> bool:
        """Whether the optimizer still exists. The engine may hold this object longer than the optimizer lives."""
        return self._optimizer() is not None

    def find_parameters(self) -> None:
        """Read the optimizer's groups again. Called when they changed."""
        self.gradients.find_parameters(self.optimizer.param_groups, self.engine.pairs())
        self.fused.look_again(self.optimizer)
        self._warm = set(map(id, _with_state(self.optimizer)))
        self._warm_states = len(_state_of(self.optimizer))
        self._sizes = self._count_elements()
        self.note_masters()

    def note_masters(self) -> None:
        """Remember the masters' versions: the lowered parameters agree with them."""
        self._master_versions = [master._version for _, master in self.gradients.pairs]

    def follow_masters(self) -> None:
        """Before a forward: write those masters into the model that something other than ``step`` has changed.

        SAM perturbs and restores weights in methods of its own; a script may average weights in ``master_params``.
        Costs 0.05 us a master where nothing has changed.
        """
        pairs = self.gradients.pairs
        if self._master_versions != [master._version for _, master in pairs]:
            before = self._master_versions
            masters.write_changed([pair for pair, seen in zip(pairs, before, strict=True) if pair[1]._version != seen])
            self.note_masters()

    def _count_elements(self) -> int:
        return sum(map(torch.Tensor.numel, self.gradients.stepped))

    def pairs_at_rest(self) -> list[masters.Pair]:
        """Return the pairs whose masters nothing but a step, or what the model followed, has written to."""
        versions = self._master_versions
        return [pair for pair, seen in zip(self.gradients.pairs, versions, strict=True) if pair[1]._version == seen]

    def saved_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return what ``optimizer.state_dict()`` shall hold of ``groups``."""
        return groups

    def loaded(self) -> None:
        """Called after ``optimizer.load_state_dict``."""
        self.find_parameters()

    def mask_flag(self) -> None:
        """Lower the flag of this backward if the sticky flag is up and this check saw the same gradients again."""
        if self.gradients.mixed:
            self.flag.addcmul_(self.flag, self.sticky, value=-1)

    def keep_flag(self) -> None:
        """Raise the sticky flag if the flag of this backward is raised."""
        torch.maximum(self.sticky, self.flag, out=self.sticky)
        self.fresh = False

    def zero_grad(self, base: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run ``optimizer.zero_grad(*args, **kwargs)``. ``base`` is the optimizer's own; lowered gradients go too."""
        base(*args, **kwargs)
        self.gradients.cleared()

    # ---------------------------------------------------------------- the decision

    def settle(self, call: str) -> None:
        """Check that ``call`` may read or step the gradients now.

        Raises:
            StateError: they are still scaled, or a backward ran without ``scale_loss``.
        """
        if self.scope is not None and self.is_open():
            raise StateError(f"{call}: inside `with xamp.scale_loss(...)` of this optimizer. Call it after the block.")
        self.gradients.settle(call)

    def step(self, base: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``optimizer.step(*args, **kwargs)``, or skip it. ``base`` is the optimizer's own ``step``.

        Raises:
            StateError: a closure that would run or ran a backward under loss scaling, gradients still scaled, or a
                backward without ``scale_loss``.
            LossScaleCollapsed: :data:`xamp.scaling.scale.COLLAPSE_RUN` overflows in a row that no smaller scale could
                cure.
        """
        policy = self.engine.policy
        self.refuse_wrong()
        if distributed.is_running():
            self._refuse_lost()
        if not policy.manages_gradients:
            return self._step_unchecked(base, args, kwargs)
        if (args or kwargs) and any(callable(value) for value in (*args, *kwargs.values())):
            args, kwargs = self._with_closure_called(args, kwargs)
        self._refuse()
        if not self.gradients.ready:  # there are no gradients but zeros: any others were refused in the line above
            self._warn_of_no_gradient()
            return base(*args, **kwargs)
        if not policy.checks:
            if self.fused.active and not self._can_step_fused():
                base = self._unfused(base)
            return self._step_unchecked(base, args, kwargs)
        if self.fused.skips_on_device:
            if self._can_step_fused():
                return self._step_on_device(base, args, kwargs)
            base = self._unfused(base)
        if self.replays.capturing():
            self._refuse_capture()
        return self._step_on_host(base, args, kwargs)

    def _refuse_capture(self) -> None:
        """Refuse a step that reads the device, which a graph cannot hold."""
        name = type(self.optimizer).__name__
        why = "its parameters have had no step yet, and the host decides on the first"
        cure = "Run at least one whole training step before the capture"
        if not self.fused.skips_on_device:
            why = f"this {name} cannot skip on the device"
            cure = f"Make it fused: torch.optim.{name}(..., fused=True), with capturable=True where it has that option"
        raise StateError(
            f"optimizer.step(): while a graph is captured the host cannot read whether to skip this step; {why}. "
            f"{cure}, or leave the step out of the graph."
        )

    def refuse_wrong(self) -> None:
        """Raise a StateError where a step of this optimizer would be wrong, by its backend or by what happened."""
        engine = self.engine
        optimizer: Any = self._optimizer()  # it lives, for it is about to step
        if engine.refusal:
            raise StateError(f"optimizer.step(): {engine.refusal}")
        if engine.policy.casts_parameters:
            engine.backend.join_gradients(optimizer)
        if why := engine.backend.optimizer_refusal(optimizer, casts=False):
            raise StateError(f"optimizer.step(): {type(optimizer).__name__} {why}")

    def _refuse_lost(self) -> None:
        """Refuse a model that was sharded after its first steps: parameters that it replaced get no gradient more."""
        unreached = [param.grad for param in self.gradients.stepped].count(None)
        if unreached > self._unreached:
            self.engine.check_not_sharded("optimizer.step()")
            self._unreached = unreached

    def _with_closure_called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Call the closure among the arguments; return the arguments with one in its place that returns its result.

        Where gradients came through ``scale_loss`` already, a closure mostly runs no backward: Lightning passes one to
        each step, with hooks of its own in it.

        Raises:
            StateError: no gradients came through ``scale_loss``, or the closure ran a backward.
        """
        if not self.gradients.ready:
            raise self._closure_error("would run")
        reached: list[torch.Tensor] = []
        hooks = [
            param.register_post_accumulate_grad_hook(reached.append)
            for param in (*self.gradients.plain, *(lowered for lowered, _ in self.gradients.pairs))
            if param.requires_grad and param.is_leaf
        ]

        def called(value: Any) -> Any:
            if not callable(value):
                return value
            with torch.enable_grad():
                result = value()
            return lambda: result

        try:
            args, kwargs = tuple(map(called, args)), {name: called(value) for name, value in kwargs.items()}
        finally:
            for hook in hooks:
                hook.remove()
        if reached:
            raise self._closure_error("ran")
        return args, kwargs

    def _closure_error(self, did: str) -> StateError:
        plain = levels_where(lambda row: not row.manages_gradients)
        return StateError(
            f"{type(self.optimizer).__name__}.step(closure): under loss scaling or master weights (level "
            f"{self.engine.policy.level}) a closure {did} backward without them. Compute the loss before "
            f"step(), in scale_loss; an optimizer that needs a closure (LBFGS) works at {listed(plain, 'and')}."
        )

    def _refuse(self) -> None:
        self.settle("optimizer.step()")
        if self.gradients.has_stray() and not self._only_fills_state():
            raise StateError(
                "optimizer.step(): there are gradients that did not come through scale_loss since the last step. Run "
                "every backward() as `with xamp.scale_loss(loss, optimizer) as scaled: scaled.backward()`, inside the "
                "with block, and clear the gradients with optimizer.zero_grad() after a step."
            )

    def _only_fills_state(self) -> bool:
        """Return whether this step only serves ``torch.distributed.checkpoint`` to make the state of a new optimizer.

        That step gives every parameter a gradient of zeros. This method waits for the device, but only where there
        would be an error otherwise.
        """
        return not self.optimizer.state and self.gradients.all_zero()

    def _warn_of_no_gradient(self) -> None:
        """Say once that a step finds no gradient at all: the optimizer may hold other tensors than the model."""
        if not self._warned_of_no_gradient and all(param.grad is None for param in self.gradients.stepped):
            self.engine.check_not_sharded("optimizer.step()")
            self._warned_of_no_gradient = True
            say(
                "%s.step() finds no gradient on anything that this optimizer holds, and changes nothing. If a backward "
                "ran, the optimizer was made from other parameters: of a copy of the model, or before the model was "
                "moved, sharded or replaced. Make it from model.parameters() of the very model, last.",
                type(self.optimizer).__name__,
                level=logging.WARNING,
            )

    def _step_unchecked(self, base: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not args and not kwargs:  # a closure would make gradients
            self._warn_of_no_gradient()
        mark, applied, result = self._mark(), self.engine.counts.applied, NOT_STEPPED
        try:
            result = base(*args, **kwargs)
            self._finish(StepOutcome.APPLIED)
            return result
        except BaseException as error:
            if has_stepped(mark, result, error) and self.engine.counts.applied == applied:
                self._finish(StepOutcome.APPLIED)
            raise

    def _mark(self) -> tuple[torch.Tensor, int] | None:
        """Return the first tensor that a step will move, and its version: an exception may come before it or after it.

        A step hook may raise, or Ctrl-C arrive, when the optimizer has stepped already.
        """
        for param in self.gradients.stepped:
            if param.grad is not None:
                return param, param._version
        return None

    def _step_on_host(self, base: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        values = self._memory.values.tolist()  # the one wait for the device
        result, outcome = NOT_STEPPED, StepOutcome.APPLIED
        used: tuple[int, ...] = ()
        mark = self._mark()
        try:
            if self._memory.overflowed(values, self.index):
                result, outcome, used = None, StepOutcome.SKIPPED, tuple(self.gradients.used)
            else:
                result = base(*args, **kwargs)
            for scaler in self.engine.scalers:
                scaler.know(values)
            self._finish(outcome)
            self.observe_all()  # the host has waited anyway, and steps must be judged in order
            self._observe((used, clock()), values)
            return result
        except BaseException as error:
            if self.seen is not values and has_stepped(mark, result, error):
                self._finish(outcome)
                self._observe((used, clock()), values)
            raise

    def _step_on_device(self, base: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        optimizer: Any = self._optimizer()
        mark, result, readable = self._mark(), NOT_STEPPED, None
        flag = self.sticky.clone()  # now, for memory may run out after the step
        try:
            optimizer.grad_scale = getattr(optimizer, "grad_scale", None)  # the user's own, for this step
            optimizer.found_inf = self.sticky
            result = base(*args, **kwargs)
            del optimizer.grad_scale, optimizer.found_inf
            readable = self._recorded(flag)
            self._finish(flag)
            for note, values in readable:
                self._observe(note, values)
            return result
        except BaseException as error:
            optimizer.__dict__.pop("grad_scale", None)
            optimizer.__dict__.pop("found_inf", None)
            if has_stepped(mark, result, error):
                self._conclude(flag, readable)
            raise

    @keep_eager  # it may read the device, and is called where a step of torch's has broken the graph already
    def _recorded(self, flag: torch.Tensor) -> Sequence[tuple[Any, Sequence[float]]]:
        """Record the device state of this step, in a graph on the device; return the records that became readable."""
        if self.replays.capturing():
            engine, scales = self.engine, self._memory.scales
            moved = engine.moves_before_step
            self.replays.count(flag, scales, engine.scalers, self.gradients.used, moved_before_step=moved)
            return ()
        return self._history.push((tuple(self.gradients.used), clock()))

    def judge_replays(self) -> None:
        """Raise a LossScaleCollapsed where replays met a run of overflows that no smaller scale could cure."""
        if self.replays.newly_collapsed():
            raise LossScaleCollapsed(self._collapse_message(self._memory.values.tolist(), self.replays.used))

    def _conclude(self, flag: torch.Tensor, readable: Sequence[tuple[Any, Sequence[float]]] | None) -> None:
        """Do what :meth:`_step_on_device` had not done after the step when an exception came."""
        readable = self._recorded(flag) if readable is None else readable
        self._finish(flag)
        for note, values in readable:
            if self.seen is not values:
                self._observe(note, values)

    def _unfused(self, base: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``base`` to step in the form the user gave. For a step before all is warm: see :meth:`_is_warm`."""

        def step(*args: Any, **kwargs: Any) -> Any:
            with self.fused.off(self.optimizer):
                result = base(*args, **kwargs)
            self._warm.update(id(p) for p in self.gradients.stepped if p.grad is not None)
            self._warm_states = len(_state_of(self.optimizer))
            self._sizes = self._count_elements()
            return result

        return step

    def _can_step_fused(self) -> bool:
        """Return whether the state of every parameter about to move exists and, if xamp chose the form, still fits.

        A fused kernel reads past the end of a moment that is shorter than its parameter, as after
        ``resize_token_embeddings``. The form that the user left says so instead.
        """
        return self._is_warm() and (not self.fused.active or self._sizes == self._count_elements())

    def _is_warm(self) -> bool:
        """Return whether the state of every parameter about to be stepped exists.

        On a step that ``found_inf`` skips, torch's fused SGD makes momentum buffers of uninitialised memory; it also
        fails where one parameter has a buffer and another has none. The other fused optimizers leave state of zeros
        where there was none. So the host decides on the first step of a parameter, and that step runs in the form the
        user gave. A loaded state counts as warm: the last bits of the two forms differ, and a resumed run must use the
        form that the original run used.
        """
        if len(getattr(self._optimizer(), "state", ())) < self._warm_states:
            self._warm.clear()
        if len(self._warm) == len(self.gradients.stepped):
            return True
        return self._warm.issuperset(id(p) for p in self.gradients.stepped if p.grad is not None)

    # ---------------------------------------------------------------- the outcome

    def _finish(self, outcome: StepOutcome | torch.Tensor) -> None:
        """End the step: write the masters into the model and lower the sticky flag."""
        self.outcome = outcome
        if self.gradients.pairs and outcome is not StepOutcome.SKIPPED:
            masters.copy_back(self.gradients.pairs)
            self.note_masters()
        checks = self.engine.policy.checks
        if checks and not self.fresh and outcome is not StepOutcome.APPLIED and self.engine.moves_before_step:
            # Not needed where the host applied the step, for it has read a zero. A GradScaler's update() reads the flag
            # after the step and lowers it itself.
            self.sticky.zero_()
        self.fresh = True
        self.gradients.ready = False
        self.gradients.used.clear()
        if not checks:  # else when the host sees the flag
            if self.replays.capturing():
                self._recorded(torch.zeros_like(self.sticky))
            else:
                self.engine.counts.applied += 1

    def known_outcome(self) -> StepOutcome | None:
        """Return what the last step did. May wait for the device."""
        if isinstance(self.outcome, torch.Tensor):
            if self.outcome is self.replays.flag:  # the next replay writes to it again
                return StepOutcome.SKIPPED if bool(self.outcome) else StepOutcome.APPLIED
            self.outcome = StepOutcome.SKIPPED if bool(self.outcome) else StepOutcome.APPLIED
        return self.outcome

    def unobserved(self) -> Iterable[bool]:
        """Yield, for each step that has not been counted yet, whether it overflowed. Waits for the device."""
        for _, values in self._history.peek():
            yield self._memory.overflowed(values, self.index)

    def arrived(self) -> Sequence[Sequence[float]]:
        """Return the device state at each step that is not counted yet and can be read without waiting."""
        return [values for _, values in self._history.arrived()]

    def newest(self) -> tuple[int, Sequence[float]] | None:
        """Return the device state at the newest step that the host can read without waiting, and when that step was."""
        late = list(self._history.arrived())
        if late:
            (_, at), values = late[-1]
            return at, values
        return None if self.seen is None else (self.seen_at, self.seen)

    @property
    def uncounted(self) -> int:
        """The number of steps that the host has not counted yet."""
        return self._history.waiting

    def overflow_run(self) -> int:
        """Return the overflows in a row, up to the last step, that no smaller scale could cure. Waits for the device.

        If a run is complete but its error has not been raised yet, the result is the number with which the next
        overflow raises it.
        """
        watch = copy.copy(self._watch)
        complete = [self._judge(watch, used, values) for (used, _), values in self._history.peek()]
        return COLLAPSE_RUN - 1 if any(complete) else watch.run

    def resume(self, overflow_run: int) -> None:
        """Go on as after ``overflow_run`` such overflows, with the scales that were just loaded.

        The sticky flag and existing gradients belong to the run before the load, so the flag is lowered. The user must
        clear the gradients, or add to them in a ``scale_loss``, before the next step.
        """
        self._history.forget()
        self.seen = None
        self._watch.resume(overflow_run)
        self.gradients.ready = False
        if not self.fresh:
            self.sticky.zero_()
            self.fresh = True

    def kept(self) -> tuple[Any, ...]:
        """Return what :meth:`resume` changes, for :meth:`put_back`."""
        found = self.sticky.clone(), self.fresh, self.seen, self.gradients.ready
        return copy.copy(self._watch), self._history.waiting_records(), found

    def put_back(self, kept: tuple[Any, ...]) -> None:
        """Undo :meth:`resume`."""
        watch, records, (sticky, self.fresh, self.seen, self.gradients.ready) = kept
        self._watch = copy.copy(watch)
        self._history.put_back(records)
        self.sticky.copy_(sticky)

    def observe_all(self) -> None:
        """Count, log and judge every recorded step. Waits for the device."""
        for late in self._history.drain():
            self._observe(*late)

    def _judge(self, watch: CollapseWatch, used: Sequence[int], values: Sequence[float]) -> bool | None:
        """Record one step in ``watch``. Return None if it did not overflow, else whether a run is complete."""
        scales = self._memory.scales_in(values)
        if not self._memory.overflowed(values, self.index):
            watch.clean(scales)
            return None
        return watch.collapsed(scales, used)

    @keep_eager
    def _observe(self, note: tuple[Sequence[int], int], values: Sequence[float]) -> None:
        """Count, log and judge one step whose numbers the host has. ``note`` has the losses used and the time."""
        used, at = note
        counts, scales = self.engine.counts, self._memory.scales_in(values)
        if not self._memory.overflowed(values, self.index):  # then one line, so that no interrupt comes in between
            self.seen, self.seen_at, counts.applied = values, at, counts.applied + 1
            self._watch.clean(scales)
            return
        self.seen, self.seen_at, counts.skipped = values, at, counts.skipped + 1
        collapsed = self._watch.collapsed(scales, used)
        if self.engine.verbosity:
            self._tell_of_overflow(scales, used)
        if collapsed:
            raise LossScaleCollapsed(self._collapse_message(scales, used))

    def _tell_of_overflow(self, scales: Sequence[float], used: Sequence[int]) -> None:
        if not self.engine.moves_before_step:  # a GradScaler: its update() backs off after the step
            scales = [s.rules.after_overflow(scale) for s, scale in zip(self.engine.scalers, scales, strict=True)]
        say("gradient overflow: step skipped, loss scale %s", ", ".join(f"{scales[i]:g}" for i in used))

    def _collapse_message(self, scales: Sequence[float], used: Sequence[int]) -> str:
        at = ", ".join(f"{scales[i]:g}" for i in used)
        rules = self.engine.scalers[used[0]].rules
        kind = f"at its floor (min_loss_scale={rules.floor:g})" if rules.dynamic else "static"
        names = self.engine.names_of(self.gradients.not_finite())
        whole = len(names) > 1 and len(names) == sum(p.grad is not None for p in self.gradients.stepped)
        nearest = " These are all there are, so the loss itself may be inf or nan." if whole else ""
        if len(names) > 1 and not whole:
            nearest = f" Nearest to the loss is {names[-1]}, the last of these in the model."
        listed = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        by_flag = self.engine.backend.capabilities(self.engine.device).overflow == "flag"
        none = "unknown, for this chip tells of an overflow by a flag" if by_flag else "none at this moment"
        wide = ", ".join(levels_where(lambda row: row.dtype == "bfloat16"))
        return (
            f"optimizer.step(): {COLLAPSE_RUN} overflows in a row with the loss scale {at}, {kind}: no smaller scale "
            f"will cure it. Gradients that are not finite: {listed or none}.{nearest} Look for a "
            "division, log or exp there, lower the learning rate, keep the module in fp32 (keep_fp32), or use "
            f"bfloat16 ({wide}). The first module and operator: run a step in `with "
            "xamp.debug.find_nonfinite(model, optimizer) as found:`, then print(found.report)."
        )


# It counts, and a number that moves is compiled twice. What it calls is compiled.
keep_eager(OptimizerState._finish, inner=False)


def has_stepped(mark: tuple[torch.Tensor, int] | None, result: Any, error: BaseException) -> bool:
    """Return whether the optimizer had stepped when ``error`` was raised.

    Args:
        mark: what :meth:`OptimizerState._mark` returned before the step.
        result: what the step has returned, or :data:`NOT_STEPPED`.
        error: the exception. Where a step hook raised it, torch's wrapper around the step has a result already; fused
            kernels leave no other trace, for they move tensors without a new version.
    """
    if result is not NOT_STEPPED or (mark is not None and mark[0]._version != mark[1]):
        return True
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_code is _HOOKED and "out" in frame.f_locals for frame in frames)


def _state_of(optimizer: Optimizer) -> Mapping[Any, Any]:
    """Return the optimizer's state; empty for an object that has ``param_groups`` and ``step`` but no ``state``."""
    return getattr(optimizer, "state", {})


def _with_state(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Yield the parameters that have state, and those of an SGD without momentum, which needs none."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = _state_of(optimizer).get(param)
            has_some = isinstance(state, dict) and any(isinstance(v, torch.Tensor) for v in state.values())
            if has_some or group.get("momentum") == 0:
                yield param
