"""The step of one optimizer. :meth:`OptimizerState.step` has the order: may it step, who decides, step, record.

A backward that overflows raises the optimizer's ``found_inf_since_step``, on the device. If it is raised the step is
skipped: the fused kernel skips, which gets the flag as ``found_inf``, or the host, which must read it. After the step
the masters are written into the model. :mod:`xamp.scaling.counts` has what becomes of the outcome.
"""

from __future__ import annotations

import functools
import logging
import traceback
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from xamp.distributed import ranks
from xamp.errors import StateError
from xamp.ground.log import say
from xamp.plans import forms
from xamp.policy import levels_where, listed
from xamp.scaling import masters
from xamp.scaling.counts import Outcomes, StepOutcome
from xamp.scaling.fused import FusedChoice, WarmState
from xamp.scaling.gradients import Gradients
from xamp.scaling.one_pass import OnePass, refusal, tell_of_the_end
from xamp.scaling.scale import DeviceState, clock
from xamp.scaling.weights import MasterVersions

if TYPE_CHECKING:
    from xamp.scaling.engine import Engine, Scope  # the whole that an OptimizerState is a part of

__all__ = ["NOT_STEPPED", "OptimizerState", "call_closure", "call_step", "unwrapped"]

NOT_STEPPED = object()
"""Stands for the result of a step that has not returned one."""


class OptimizerState:
    """What xamp keeps for one optimizer. It is the optimizer's attribute ``_xamp`` and holds the optimizer weakly.

    Attributes:
        index: the index of the optimizer among the engine's.
        master_versions: tells whether the model has what the masters have.
        outcomes: what the steps did.
        scope: the ``scale_loss`` over this optimizer that was entered last and not left; see :meth:`is_open`.
        fresh: no backward was checked since the last step, so ``found_inf_since_step`` is down.
        norm: what :func:`xamp.clip_grad_norm_` last returned for this optimizer, on the device.
        found_inf: fp32 scalar: the backward that just ended overflowed; used where this cannot go into
        ``found_inf_since_step`` at once.
        found_inf_since_step: fp32 scalar: any backward since the last step overflowed.
    """

    gradients_class: type[Gradients] = Gradients
    outcomes_class: type[Outcomes] = Outcomes

    def __init__(self, engine: Engine, optimizer: Optimizer, index: int, fused: FusedChoice) -> None:
        self.engine = engine
        self.index = index
        self.fused = fused
        self.scope: Scope | None = None
        self.fresh = True
        self.norm: torch.Tensor | None = None
        self._optimizer = weakref.ref(optimizer)
        self.gradients = self.gradients_class(engine.policy, engine.backend, engine.saturates, fused, self._optimizer)
        self.outcomes = self.outcomes_class(engine.counts, engine.memory, index, self.gradients)
        self.live_in(engine.memory)
        self.master_versions = MasterVersions(self.gradients)
        self._warm = WarmState(self._optimizer, self.gradients, fused)
        self._warned_of_no_gradient = False
        self._unreached = 0  # the most stepped tensors that had no gradient at a step
        self.find_parameters()
        if fused.one_pass and self.gradients.one_pass is None:
            raise forms.error_for(fused.kind, self._one_pass_refusal())

    def live_in(self, memory: DeviceState) -> None:
        """Keep the flags in ``memory`` from now on. All records of the previous memory must have been read."""
        self.outcomes.live_in(memory)
        self._memory = memory
        self.found_inf = memory.found_inf[self.index]
        self.found_inf_since_step = memory.found_inf_since_step[self.index]

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
        self.found_inf_since_step.zero_()
        self.fresh = True

    @property
    def is_alive(self) -> bool:
        """Whether the optimizer still exists. The engine may hold this object longer than the optimizer lives."""
        return self._optimizer() is not None

    def find_parameters(self) -> None:
        """Read the optimizer's groups again. Called when they changed."""
        self.gradients.find_parameters(self.optimizer.param_groups, self.engine.pairs())
        self.fused.refresh(self.optimizer)
        self._warm.refresh()
        self.master_versions.remember()
        if self.fused.one_pass:
            self._use_one_pass()

    def _use_one_pass(self) -> None:
        """Step in one pass from now on, where that suits what the groups hold now."""
        gradients, replays = self.gradients, self.outcomes.replays
        why, before = self._one_pass_refusal(), gradients.one_pass
        capturing = replays.capturing if replays.possible else None
        gradients.one_pass = None if why else OnePass(self.optimizer, gradients, self.fused, capturing)
        if why and before is not None:
            tell_of_the_end(self.optimizer, why)

    def _one_pass_refusal(self) -> str:
        if self.engine.saturates:
            return "the chip tells of an overflow by a flag"
        return refusal(self.optimizer, self.fused, self.gradients, self.engine.device)

    def notice_groups(self, call: str) -> None:
        """Read the groups again where a script has put other parameters into them by hand, as densification does.

        ``call`` is what asks. Where that is not ``scale_loss``, gradients exist.

        Raises:
            StateError: a new parameter has a gradient that may still be scaled, or is in another optimizer.
        """
        optimizer = self._optimizer()
        if optimizer is None:
            return
        groups = optimizer.param_groups
        new = self.gradients.not_held(groups)
        if new is None:
            return
        if call != "scale_loss" and self.engine.policy.scales:
            late = [p for p in new if p.grad is not None]
            if late:
                raise StateError(
                    f"{call}: {self.engine.names_of(late)[0]} was put into param_groups after the scale_loss that gave "
                    "it its gradient, which is still multiplied by the loss scale. Put it in before the scale_loss, or "
                    "clear its gradient."
                )
        self.engine.check_not_shared(self, new)
        for group in groups:
            self.engine.adopt_group(self, group)

    def saved_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return what ``optimizer.state_dict()`` shall hold of ``groups``."""
        return groups

    def loaded(self) -> None:
        """Called after ``optimizer.load_state_dict``."""
        self.find_parameters()

    def mask_found_inf(self) -> None:
        """Clear ``found_inf`` if these gradients were counted in an earlier window, and the next step skips anyway."""
        if self.gradients.mixed:
            self.found_inf.addcmul_(self.found_inf, self.found_inf_since_step, value=-1)

    def add_found_inf(self) -> None:
        """Raise ``found_inf_since_step`` if the flag of this backward is raised."""
        torch.maximum(self.found_inf_since_step, self.found_inf, out=self.found_inf_since_step)
        self.fresh = False

    def zero_grad(self, base: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run ``optimizer.zero_grad(*args, **kwargs)``. ``base`` is its own; the model's gradients go too."""
        if self.gradients.waiting is not None and (*args, *kwargs.values()) in ((), (True,)):
            self.gradients.clear_waiting()
        base(*args, **kwargs)
        self.gradients.cleared()

    # ---------------------------------------------------------------- may it step?

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
        unreached = self.gradients.count_missing()
        if unreached > self._unreached:
            self.engine.check_not_sharded("optimizer.step()")
            self._unreached = unreached

    def _refuse_stray(self) -> None:
        """Refuse gradients of a backward that ran without ``scale_loss``.

        A step with gradients of zeros alone passes where there is no state: ``torch.distributed.checkpoint`` makes the
        state of a new optimizer so. To see it waits for the device, where there would be an error otherwise.
        """
        if self.gradients.has_stray() and (self.optimizer.state or not self.gradients.all_zero()):
            raise StateError(
                "optimizer.step(): there are gradients that did not come through scale_loss since the last step. Run "
                "every backward() as `with xamp.scale_loss(loss, optimizer) as scaled: scaled.backward()`, inside the "
                "with block, and clear the gradients with optimizer.zero_grad() after a step."
            )

    def _refuse_capture(self) -> None:
        """Refuse a step that reads the device, which a graph cannot hold."""
        why = "its parameters have had no step yet, and the host decides on the first"
        cure = "Run at least one whole training step before the capture"
        if not self.fused.skips_on_device:
            name = type(self.optimizer).__name__
            there = self.engine.backend.capabilities(self.engine.device).fused_optimizers
            why = f"this {name} cannot skip on the device"
            others = f", as {listed(there)} have" if there else ""
            cure = f"Take an optimizer with a fused implementation that is right on {self.engine.device}{others}"
            if name in there:
                cure = f"Make it fused: torch.optim.{name}(..., fused=True), with capturable=True where it has that "
                cure += "option"
        raise StateError(
            f"optimizer.step(): while a graph is captured the host cannot read whether to skip this step; {why}. "
            f"{cure}, or leave the step out of the graph."
        )

    def _warn_of_no_gradient(self) -> None:
        """Say once that a step finds no gradient at all: the optimizer may hold other tensors than the model."""
        gradients = self.gradients
        if self._warned_of_no_gradient or any(param.grad is not None for param in gradients.stepped):
            return
        if not gradients.in_shards:
            self.engine.check_not_sharded("optimizer.step()")
            self._warned_of_no_gradient = True
            say(
                "%s.step() finds no gradient on anything that this optimizer holds, and changes nothing. If a backward "
                "ran, the optimizer was made from other parameters: of a copy of the model, or before the model was "
                "moved, sharded or replaced. Make it from model.parameters() of the very model, last.",
                type(self.optimizer).__name__,
                level=logging.WARNING,
            )

    def check_ready(self, call: str) -> None:
        """Raise a StateError where ``call`` may not read or step the gradients now: see ``Gradients.check_ready``."""
        if self.scope is not None and self.is_open():
            raise StateError(f"{call}: inside `with xamp.scale_loss(...)` of this optimizer. Call it after the block.")
        optimizer: Any = self._optimizer()
        count = 0
        for group in optimizer.param_groups:
            count += len(group["params"])
        if count != self.gradients.count:
            self.notice_groups(call)
        self.gradients.check_ready(call)

    # ---------------------------------------------------------------- the step

    def step(self, base: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``optimizer.step(*args, **kwargs)``, or skip it. ``base`` is the optimizer's own ``step``.

        Raises:
            StateError: gradients are still scaled, a backward ran without ``scale_loss``, or a closure runs one.
            LossScaleCollapsed: :data:`xamp.scaling.counts.COLLAPSE_RUN` overflows in a row that no smaller scale could
                cure.
        """
        policy = self.engine.policy
        # May it step?
        self.refuse_wrong()
        if ranks.is_running():
            self._refuse_lost()
        if not policy.manages_gradients:
            return self._step_unchecked(base, args, kwargs)
        if (args or kwargs) and any(callable(value) for value in (*args, *kwargs.values())):
            name = type(self.optimizer).__name__
            args, kwargs = call_closure(self.gradients, args, kwargs, name=name, level=policy.level)
        self.check_ready("optimizer.step()")
        self._refuse_stray()
        if not self.gradients.ready:  # there are no gradients but zeros: any others were refused in the line above
            return self._step_without_gradients(base, args, kwargs)
        # Who decides whether to skip: nobody, the kernel or the host?
        if self.gradients.waiting is not None and (in_one_pass := self._in_one_pass(base)) is not None:
            return in_one_pass(args, kwargs)
        if not policy.checks:
            if self.fused.active and not self._warm.fits_fused():
                base = self._warm.in_users_implementation(base)
            return self._step_unchecked(base, args, kwargs)
        if self.fused.skips_on_device:
            if self._warm.fits_fused():
                return self._step_on_device(base, args, kwargs)
            base = self._warm.in_users_implementation(base)
        if self.outcomes.replays.capturing():
            self._refuse_capture()
        return self._step_on_host(base, args, kwargs)

    def _in_one_pass(self, base: Callable[..., Any]) -> Callable[..., Any] | None:
        """Return a step in one pass; None where it does not suit, and then the masters have their gradients.

        The host decides on the first step of a parameter: one that is skipped leaves no state.
        """
        gradients, checks = self.gradients, self.engine.policy.checks
        waiting, one_pass = gradients.waiting, gradients.one_pass
        found_inf = self.found_inf_since_step if checks else None
        is_hooked = getattr(base, "func", None) is not call_step
        one = None if one_pass is None else one_pass.step(self.optimizer, found_inf, is_hooked)
        own = unwrapped(self.fused.kind.step)
        # A hook that reads gradients would leave a first step to torch.
        if one is None or own is None or (is_hooked and one.is_first):
            gradients.materialize("optimizer.step()")
            return None
        step = one

        def inner(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if gradients.waiting is not waiting:  # a hook has read gradients
                return own(optimizer, *args, **kwargs)
            result = step(optimizer, *args, **kwargs)
            if step.is_first:
                self._warm.refresh()
            return result

        run = Optimizer.profile_hook_step(inner) if is_hooked else functools.partial(call_step, inner)
        bound = functools.partial(run, self.optimizer)
        way = self._step_unchecked if not checks else self._step_on_host if step.is_first else self._step_on_device
        return functools.partial(way, bound)

    def _step_without_gradients(self, base: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """End a window of which no gradient is left, and let the optimizer step: nothing is counted."""
        self._warn_of_no_gradient()
        self.engine.move_scales(self)
        self._clear_found_inf()
        self.gradients.used = {}
        result = base(*args, **kwargs)
        self.outcomes.last = None
        if self.fused.skips_on_device:
            self._warm.refresh()  # gradients of zeros may have made the state; a run that loads it is warm
        return result

    def _clear_found_inf(self) -> None:
        if not self.fresh:
            self.found_inf_since_step.zero_()
            self.fresh = True

    def _step_unchecked(self, base: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        first, applied, result = self._first_stepped(), self.engine.counts.applied, NOT_STEPPED
        if first is None and self.gradients.waiting is None and not (args or kwargs):  # a closure would make gradients
            self._warn_of_no_gradient()
            if not self.gradients.in_shards:  # else other ranks have some
                self.outcomes.last = None
                return base()
        try:
            result = base(*args, **kwargs)
            self._finish(StepOutcome.APPLIED)
            return result
        except BaseException as error:
            if self.engine.counts.applied == applied:
                self._recover(error, first, result, StepOutcome.APPLIED, ())
            raise

    def _first_stepped(self) -> tuple[torch.Tensor, int] | None:
        """Return the first tensor that a step will move, and its version: an exception may come before it or after."""
        if self.gradients.waiting is not None:
            return None
        for param in self.gradients.stepped:
            if param.grad is not None:
                return param, param._version
        return None

    def has_stepped(self, first: tuple[torch.Tensor, int] | None, result: Any, error: BaseException) -> bool:
        """Return whether the optimizer had stepped when ``error`` was raised; the caller then records the step.

        Else it may have, half-way. So the model follows the masters before its next forward. ``first`` is what
        :meth:`_first_stepped` returned before the step, ``result`` what the step has returned, or :data:`NOT_STEPPED`.
        """
        waiting = self.gradients.waiting
        moved = first[0]._version != first[1] if first is not None else waiting is not None and waiting.began
        if result is not NOT_STEPPED or moved or _returned_from_step(error):
            return True
        self.master_versions.distrust()
        return False

    def _step_on_host(self, base: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.engine.move_scales(self)
        values = self._memory.values.tolist()  # the one wait for the device
        result, outcome = NOT_STEPPED, StepOutcome.APPLIED
        first, used = self._first_stepped(), self.gradients.used
        try:
            if self._memory.overflowed(values, self.index):
                result, outcome = None, StepOutcome.SKIPPED
            else:
                result = base(*args, **kwargs)
            for scaler in self.engine.scalers:
                scaler.know(values)
            self._finish(outcome)
            self.outcomes.observe_all()  # the host has waited anyway, and steps must be judged in order
            self.outcomes.observe((used, clock()), values)
            return result
        except BaseException as error:
            self._recover(error, first, result, outcome, (((used, clock()), values),))
            raise

    def _step_on_device(self, base: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        optimizer: Any = self._optimizer()
        self.engine.move_scales(self)
        first, result, readable = self._first_stepped(), NOT_STEPPED, None
        flag = self.found_inf_since_step.clone()  # now, for memory may run out after the step
        try:
            _lend_found_inf(optimizer, self.found_inf_since_step)
            result = base(*args, **kwargs)
            del optimizer.grad_scale, optimizer.found_inf
            readable = self.outcomes.record(flag)
            self._finish(flag)
            for step, values in readable:
                self.outcomes.observe(step, values)
            return result
        except BaseException as error:
            optimizer.__dict__.pop("grad_scale", None)
            optimizer.__dict__.pop("found_inf", None)
            self._recover(error, first, result, flag, readable)
            raise

    # ---------------------------------------------------------------- the end of a step

    def _recover(
        self,
        error: BaseException,
        first: tuple[torch.Tensor, int] | None,
        result: Any,
        outcome: Any,
        records: Iterable[tuple[Any, Sequence[float]]] | None,
    ) -> None:
        """After ``error``: if the optimizer had stepped, do what is left of the step, else let the model follow.

        ``first`` and ``result``: see :meth:`has_stepped`. ``outcome``: what the step did, as :meth:`_finish` takes it;
        ``records``: what is to be observed then; None: the step is not recorded yet.
        """
        if not self.has_stepped(first, result, error):
            return
        records = self.outcomes.record(outcome) if records is None else records
        self._finish(outcome)
        for step, values in records:
            if self.outcomes.seen is not values:
                self.outcomes.observe(step, values)

    def _finish(self, outcome: StepOutcome | torch.Tensor) -> None:
        """End the step: write the masters into the model and lower ``found_inf_since_step``."""
        self.outcomes.last, gradients = outcome, self.gradients
        if gradients.pairs and outcome is not StepOutcome.SKIPPED:
            written = self.master_versions.pairs(changed=True) if gradients.waiting is not None else []
            if not gradients.stepped_in_one_pass():
                masters.copy_back(gradients.pairs)
            elif written:  # by a script; the pass writes where there is a gradient, and nothing where it is skipped
                masters.copy_back(written)
            self.master_versions.remember()
        if self.master_versions.interrupted:
            self.master_versions.follow()
        checks = self.engine.policy.checks
        if outcome is not StepOutcome.APPLIED and checks and not self.fresh and self.engine.moves_before_step:
            # Not needed where the host applied the step, for it has read a zero. A GradScaler's update() reads the flag
            # after the step and lowers it itself.
            self.found_inf_since_step.zero_()
        self.fresh = True
        gradients.ready = False
        gradients.used = {}  # another: the record of this step holds the old one
        if not checks:  # else when the host sees the flag
            if self.outcomes.replays.capturing():
                self.outcomes.record(torch.zeros_like(self.found_inf_since_step))
            else:
                self.engine.counts.applied += 1

    # ---------------------------------------------------------------- checkpoints

    def resume(self, overflow_run: int) -> None:
        """Go on as after ``overflow_run`` overflows that no smaller scale could cure, with scales just loaded.

        ``found_inf_since_step`` belongs to the run before the load, and so do existing gradients: before the next step
        the user must clear them, or add to them in a ``scale_loss``.
        """
        self.outcomes.resume(overflow_run)
        self.gradients.ready = False
        self.gradients.used = {}
        for scaler in self.engine.scalers:
            scaler.lower_own_flag()
        self._clear_found_inf()

    def snapshot(self) -> tuple[Any, ...]:
        """Return what :meth:`resume` changes, for :meth:`put_back`."""
        gradients = self.gradients
        found = [(scaler, scaler.has_own_flag, scaler.found, scaler.found.clone()) for scaler in self.engine.scalers]
        return (
            self.outcomes.snapshot(),
            self.found_inf_since_step.clone(),
            self.fresh,
            gradients.ready,
            gradients.used,
            found,
        )

    def put_back(self, before: tuple[Any, ...]) -> None:
        """Undo :meth:`resume`."""
        outcomes, found_inf_since_step, self.fresh, self.gradients.ready, self.gradients.used, found = before
        for scaler, scaler.has_own_flag, scaler.found, value in found:
            scaler.found.copy_(value)
        self.outcomes.put_back(outcomes)
        self.found_inf_since_step.copy_(found_inf_since_step)


# ---------------------------------------------------------------- the closure of a caller


def call_closure(
    gradients: Gradients, args: tuple[Any, ...], kwargs: dict[str, Any], *, name: str, level: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Call the closure among the arguments of a step; return the arguments with one in its place that has its result.

    Where gradients came through ``scale_loss`` already, a closure mostly runs no backward: Lightning passes one to
    each step, with hooks of its own in it. ``name`` is the optimizer's class, for a message.

    Raises:
        StateError: no gradients came through ``scale_loss``, or the closure ran a backward.
    """

    def error(did: str) -> StateError:
        unmanaged = levels_where(lambda row: not row.manages_gradients)
        return StateError(
            f"{name}.step(closure): under loss scaling or master weights (level {level}) a closure {did} backward "
            "without them. Compute the loss before step(), in scale_loss; an optimizer that needs a closure (LBFGS) "
            f"works at {listed(unmanaged, 'and')}."
        )

    if not gradients.ready:
        raise error("would run")
    reached: list[torch.Tensor] = []
    hooks = [
        param.register_post_accumulate_grad_hook(reached.append)
        for param in (*gradients.direct, *(low_precision for low_precision, _ in gradients.pairs))
        if param.requires_grad and param.is_leaf
    ]
    try:
        args, kwargs = tuple(map(_called, args)), {key: _called(value) for key, value in kwargs.items()}
    finally:
        for hook in hooks:
            hook.remove()
    if reached:
        raise error("ran")
    return args, kwargs


def _called(value: Any) -> Any:
    """Call ``value`` if it is a closure; return a function that has its result."""
    if not callable(value):
        return value
    with torch.enable_grad():
        result = value()
    return lambda: result


# ---------------------------------------------------------------- the step of torch


def unwrapped(own: Any) -> Callable[..., Any] | None:
    """Return the ``step`` that torch's wrapper ``own`` calls; None where ``own`` is no such wrapper."""
    return own.__wrapped__ if getattr(own, "__code__", None) is _WRAPPER else None


def call_step(inner: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Call ``inner`` as torch's wrapper does, and name the result as it does: see :func:`_returned_from_step`."""
    out = inner(optimizer, *args, **kwargs)
    optimizer._optimizer_step_code()
    return out


_WRAPPER = Optimizer.profile_hook_step(Optimizer.step).__code__
_CALLERS = (_WRAPPER, call_step.__code__)


def _returned_from_step(error: BaseException) -> bool:
    """Return whether ``error`` came when the optimizer's ``step`` had returned, as where a step hook raised it.

    Fused kernels leave no other trace, for they move tensors without a new version.
    """
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_code in _CALLERS and "out" in frame.f_locals for frame in frames)


def _lend_found_inf(optimizer: Any, found_inf: torch.Tensor) -> None:
    """Give the optimizer, for one step, the ``found_inf`` by which its kernel skips: fp32 scalar, 1.0 where it does.

    A ``grad_scale`` of the user's own counts for this step.
    """
    optimizer.grad_scale = getattr(optimizer, "grad_scale", None)
    optimizer.found_inf = found_inf
