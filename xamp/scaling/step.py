"""The step of one optimizer, but for its order, which :meth:`xamp.scaling.engine.Engine.step` has.

A backward that overflows raises the optimizer's ``overflowed_since_step``, on the device. If it is raised the step is
skipped: by the kernel, which gets the flag as ``found_inf``, or by the host, which must read it. After the step the
masters are written into the model.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from xamp.errors import StateError
from xamp.policy import levels_where, listed
from xamp.registry.fused_classes import is_torchs
from xamp.scaling import masters
from xamp.scaling.counts import StepOutcome
from xamp.scaling.fused import FusedChoice, WarmState
from xamp.scaling.gradients import Gradients
from xamp.scaling.outcomes import Outcomes, Record
from xamp.scaling.scale import DeviceState
from xamp.scaling.weights import MasterVersions
from xamp.torch_compat.closures import loss_of

__all__ = ["OptimizerState", "StepWay", "call_closure"]


class StepWay(enum.Enum):
    """Who decides whether a step is skipped."""

    UNCHECKED = "nobody: no gradient is checked"
    DEVICE = "the kernel, by a flag"
    HOST = "the host, which reads the flag"


class OptimizerState:
    """The state of one optimizer in the engine, which holds the optimizer weakly.

    Attributes:
        index: the index of the optimizer among the engine's.
        ref: returns the optimizer; None once it is gone.
        fused: its implementation.
        gradients: its gradients.
        outcomes: what its steps did.
        master_versions: tells whether the model has what the masters have.
        checked_since_step: a backward was checked since the last step; else ``overflowed_since_step`` is down.
        overflowed_now: fp32 scalar: the backward that just ended overflowed; used where this cannot go into
            ``overflowed_since_step`` at once.
        overflowed_since_step: fp32 scalar: any backward since the last step overflowed.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        index: int,
        fused: FusedChoice,
        gradients: Gradients,
        outcomes: Outcomes,
        memory: DeviceState,
        *,
        checks: bool,
    ) -> None:
        self.index = index
        self.fused = fused
        self.gradients = gradients
        self.outcomes = outcomes
        self.master_versions = MasterVersions(gradients)
        self.checked_since_step = False
        self.overflowed_now = memory.overflowed_now[index]
        self.overflowed_since_step = memory.overflowed_since_step[index]
        self.ref: Callable[[], Any] = weakref.ref(optimizer)
        self._memory = memory
        self._checks = checks
        self._warm = WarmState(self.ref, fused)
        self._most_missing = 0  # the most stepped tensors that had no gradient at a step
        self._had_none = False

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer."""
        found: Optimizer | None = self.ref()
        assert found is not None, "the optimizer leads here"
        return found

    @property
    def is_alive(self) -> bool:
        """Whether the optimizer still exists. The engine may hold this object longer than the optimizer lives."""
        return self.ref() is not None

    def find_parameters(self, pairs: Sequence[masters.Pair]) -> None:
        """Read the optimizer's groups again. Called when they changed. ``pairs``: those of the session."""
        self.gradients.find_parameters(self.optimizer.param_groups, pairs)
        self.fused.refresh(self.optimizer)
        self._warm.refresh(self.gradients.params)
        self.master_versions.remember()

    # ---------------------------------------------------------------- a backward was checked

    def note_check(self) -> None:
        """Record that a backward was checked into ``overflowed_since_step``."""
        self.checked_since_step = True

    def add_overflow(self) -> None:
        """Raise ``overflowed_since_step`` if the flag of the last backward is raised."""
        torch.maximum(self.overflowed_since_step, self.overflowed_now, out=self.overflowed_since_step)
        self.checked_since_step = True

    def forget_backwards(self) -> None:
        """Drop all gradients since the last step, and the overflows that were found in them."""
        self.gradients.drop()
        self.gradients.end_step()
        self.overflowed_since_step.zero_()
        self.checked_since_step = False

    # ---------------------------------------------------------------- may it step?

    def note_missing(self) -> bool:
        """Note how many stepped tensors have no gradient; return whether more than at any step before."""
        missing = self.gradients.count_missing()
        more = missing > self._most_missing
        self._most_missing = max(missing, self._most_missing)
        return more

    def note_no_gradient(self) -> bool:
        """Note a step that finds no gradient at all; return whether it is the first."""
        first, self._had_none = not self._had_none, True
        return first

    def refuse_stray(self) -> None:
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

    # ---------------------------------------------------------------- the step

    def in_one_pass(self, has_pre_hooks: bool) -> Any:
        """Return the step of held gradients by the kernels; None where there are none, or where it does not suit.

        A hook before the step may read gradients, so with one they are not stepped so.
        """
        held, one_pass = self.gradients.held, self.gradients.one_pass
        if held is None or one_pass is None or has_pre_hooks:
            return None
        return one_pass.step_of(self.optimizer, held, self.overflowed_since_step if self._checks else None)

    def way(self, one_pass: Any) -> tuple[StepWay, bool]:
        """Return who decides on the step about to be taken, and whether it runs in the user's implementation.

        A fused kernel that does not suit the state is not used: the host then decides. ``one_pass``: what
        :meth:`in_one_pass` returned.
        """
        if one_pass is not None:
            decides = StepWay.HOST if one_pass.is_first else StepWay.DEVICE
            return decides if self._checks else StepWay.UNCHECKED, False
        if not self._checks:
            return StepWay.UNCHECKED, self.fused.active and not self._warm.fits_fused()
        if not self.fused.skips_on_device:
            return StepWay.HOST, False
        if self._warm.fits_fused() or not is_torchs(self.fused.kind):  # others' do what their word is
            return StepWay.DEVICE, False
        return StepWay.HOST, True

    def run(self, way: StepWay, base: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call ``base``, the optimizer's own step. Where the device decides it gets the flag by which it skips."""
        if way is not StepWay.DEVICE:
            if self._warm.is_proven or not (self._checks or self.gradients.params.pairs):
                return base(*args, **kwargs)
            return self._warm.prove(base, args, kwargs)
        optimizer: Any = self.optimizer
        # For one step. A ``grad_scale`` of the user's own counts.
        optimizer.grad_scale = getattr(optimizer, "grad_scale", None)
        optimizer.found_inf = self.overflowed_since_step
        result = base(*args, **kwargs)
        self._take_flag_back()
        return result

    def _take_flag_back(self) -> None:
        attributes = vars(self.optimizer)
        attributes.pop("grad_scale", None)
        attributes.pop("found_inf", None)

    def in_users_implementation(self, base: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``base`` to step in the implementation that the user gave the optimizer."""
        return self._warm.in_users_implementation(base)

    def read_flags(self) -> tuple[StepOutcome, list[float]]:
        """Read the device state, the one wait for the device; return whether the step is skipped, and the state."""
        values: list[float] = self._memory.values.tolist()
        return (StepOutcome.SKIPPED if self._memory.overflowed(values, self.index) else StepOutcome.APPLIED), values

    def end_without_gradients(self) -> None:
        """End a step that found no gradient: nothing is counted."""
        if self.checked_since_step:
            self.overflowed_since_step.zero_()
            self.checked_since_step = False
        self.gradients.end_step()
        self.outcomes.nothing_stepped()
        if self.fused.skips_on_device:
            self._warm.refresh(self.gradients.params)  # gradients of zeros may have made the state

    def end_step(
        self, way: StepWay, decided: StepOutcome | torch.Tensor, values: Sequence[float], one_pass: Any
    ) -> Sequence[Record]:
        """End a step: let the model follow the masters, lower the flag; return the records that are to be observed now.

        Args:
            way: who decided.
            decided: what was decided: an outcome, or the flag on the device that tells it.
            values: what the host has read; empty: nothing.
            one_pass: the step in one pass by which the masters moved; None: another one.
        """
        if decided is not StepOutcome.SKIPPED and self.gradients.params.pairs:
            self._let_model_follow(one_pass)
        records: Sequence[Record] = ()
        if way is StepWay.UNCHECKED:
            self.outcomes.unchecked(self.overflowed_since_step)
        elif isinstance(decided, torch.Tensor):
            records = self.outcomes.decided_on_device(decided)
        else:
            records = self.outcomes.decided_on_host(decided, values)
        if decided is not StepOutcome.APPLIED and self.checked_since_step:  # else the host has read that it is down
            self.overflowed_since_step.zero_()
        self.checked_since_step = False
        self.gradients.end_step(drop_held=one_pass is not None and one_pass.uses_up)
        return records

    def _let_model_follow(self, one_pass: Any) -> None:
        pairs = self.gradients.params.pairs
        if one_pass is not None:  # it has written what has a gradient; what a script wrote besides, it has not
            pairs = self.master_versions.pairs(changed=True)
            one_pass.mark_written()
            if one_pass.is_first:
                self._warm.refresh(self.gradients.params)
        if pairs:
            masters.copy_back(pairs, self.gradients.params.copy)
        self.master_versions.remember()

    # ---------------------------------------------------------------- what exceptions have left

    def take_back(self) -> None:
        """Take back what a step that an exception ended has lent the optimizer, or changed in it for a while."""
        self._take_flag_back()
        self.fused.on_again(self.optimizer)

    def let_model_follow(self) -> None:
        """Write all masters into the model: kernels that stepped them give no new versions."""
        for param, _ in (pairs := self.gradients.params.pairs):
            masters.exact(param)  # one that no backward has used first takes over what was written into the model
        masters.copy_back(pairs, self.gradients.params.copy)
        self.master_versions.remember()

    # ---------------------------------------------------------------- checkpoints

    def resume(self, overflow_run: int) -> None:
        """Go on as after ``overflow_run`` overflows that no smaller scale could cure, with scales just loaded.

        ``overflowed_since_step`` belongs to the run before the load, and so do existing gradients: before the next step
        the user must clear them, or add to them in a ``scale_loss``.
        """
        self.outcomes.resume(overflow_run)
        self.gradients.end_step()
        self.overflowed_since_step.zero_()
        self.checked_since_step = False

    def parts(self) -> tuple[list[object], list[torch.Tensor]]:
        """Return the objects and the tensors that :meth:`resume` writes."""
        objects, tensors = self.outcomes.parts()
        return [self, self.gradients, *objects], tensors


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
        in_fp32 = levels_where(lambda row: not row.manages_gradients and not row.casts_parameters)  # history too
        return StateError(
            f"{name}.step(closure): under loss scaling or master weights (level {level}) a closure {did} backward "
            "without them. Compute the loss before step(), in scale_loss; an optimizer that needs a closure (LBFGS) "
            f"works at {listed(in_fp32, 'and')}."
        )

    if not gradients.came_through:
        raise error("would run")
    reached: list[torch.Tensor] = []
    hooks = [
        param.register_post_accumulate_grad_hook(reached.append)
        for param in gradients.params.of_the_models
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
    result = loss_of(value)
    return lambda: result
