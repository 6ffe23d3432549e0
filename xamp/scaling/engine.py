"""The order of a step: what :func:`xamp.scale_loss` does on entering and on leaving, and ``optimizer.step()``.

Entering and the step first ask whatever may be refused, then set the mark (:mod:`xamp.scaling.writing_mark`), write,
and take the mark away; leaving and ``zero_grad`` refuse nothing before they write. :mod:`xamp.scaling.parts` has the
parts that they call. ``xamp.apex`` overrides what Apex does otherwise (``xamp/apex/_engine.py``).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from xamp.distributed import ranks
from xamp.errors import LossScaleCollapsed, StateError
from xamp.scaling.block import Block, ScaledLoss
from xamp.scaling.counts import StepOutcome
from xamp.scaling.outcomes import Record
from xamp.scaling.parts import Parts
from xamp.scaling.scale import LossScaler
from xamp.scaling.step import OptimizerState, StepWay, call_closure
from xamp.scaling.torch_step import has_pre_hooks
from xamp.torch_compat.compiler import eager_by_rule
from xamp.values.log import say

__all__ = ["Engine"]


class Engine(Parts):
    """The engine of one ``initialize`` call, which its models and optimizers share."""

    def scale_loss(
        self, loss: torch.Tensor, block: Block, optimizers: Optimizer | Sequence[Optimizer]
    ) -> contextlib.AbstractContextManager[torch.Tensor]:
        """Return the context manager of :func:`xamp.scale_loss`. ``optimizers``: as given, for who hands them over."""
        del optimizers
        return ScaledLoss(self, block, loss)

    @eager_by_rule
    def compare_settings(self, params: Sequence[torch.Tensor]) -> None:
        """Compare the settings with those of the ranks that share ``params``, where gradients are left as they are."""
        self.refuse_sharded("scale_loss")
        self.fellows.compare_settings(params, [scaler.host_scale for scaler in self.scalers])

    # ---------------------------------------------------------------- a backward

    def enter(self, owner: object, block: Block, loss: torch.Tensor) -> torch.Tensor:
        """Before a backward: bring masters up to date, existing gradients to the scale, and scale the loss.

        ``owner`` is the context manager, by which an abandoned block is known.
        """
        states = block.states
        self.mark.settle()
        if self.blocks.entered:
            self._refuse_overlap(block)
        changed: Sequence[OptimizerState] = ()
        for state in states:
            if self.refuse_changes(state, "scale_loss"):
                changed = [*changed, state]
            state.gradients.refuse("scale_loss")
        new_wrappers = self.fellows.look()
        if not self.fellows.alone:
            self._check_fellows(new_wrappers, states)
        if self.weights.pairs:
            self.weights.refuse_sharded(self.fellows.alone)

        self.mark.begin("scale_loss")
        self.watch.open()
        for state in changed:
            self.adopt_changes(state)
        if self.weights.pairs:
            self.weights.take_in_writes(new_wrappers)
        for state in states:
            state.gradients.look_before_entry()
            if state.gradients.backwards.windows and self.policy.dynamic:
                self._end_cleared_window(block.scaler)  # may move the scale, by which gradients are multiplied below
        for state in states:
            state.gradients.enter(block.scaler)
            if state.gradients.pending is None:
                self.watch.forget(state.index, forwards=False)
        if self.policy.scales:
            factor = block.scaler.factor
            loss = loss * (factor if loss.device == self.device else factor.to(loss.device))  # memory may run out
        self.blocks.add(owner, block)
        self.mark.end()
        return loss

    def _refuse_overlap(self, block: Block) -> None:
        self.blocks.refuse(
            "scale_loss(loss, optimizer): another scale_loss over this optimizer or with this loss_id is open. Leave "
            "it first, or add the losses up and scale their sum.",
            block.states,
            block.scaler,
        )

    def _check_fellows(self, new_wrappers: Sequence[Any], states: Sequence[OptimizerState]) -> None:
        self.fellows.prepare_backward(
            new_wrappers,
            _params_of(states),
            [state.optimizer for state in states],
            [scaler.host_scale for scaler in self.scalers],
            has_masters=bool(self.weights.pairs),
        )

    def _end_cleared_window(self, scaler: LossScaler) -> None:
        """End the window of ``scaler`` where all gradients of its backwards were cleared without a step.

        Not where replays move the scale: they would do it each time, and a step reads the flag of its graph.
        """
        own = [each.gradients for each in self.states if each.is_alive]
        reached = [each for each in own if each.backwards.windows.get(scaler.index) == scaler.window]
        if reached and all(each.were_cleared() for each in reached) and not scaler.moves_unseen():
            scaler.end_window(stepped=False)

    def leave(self, block: Block, kind: type[BaseException] | None) -> None:
        """After a backward: unscale and check the gradients, or postpone this; drop them where the body raised.

        ``kind``: of the exception in the body; None: there was none.
        """
        self.mark.begin("scale_loss")
        if not self.blocks.remove(block):
            self._leave_closed(block, kind)
            return
        self.end_backward()
        params = () if self.fellows.alone else _params_of(block.states)
        if kind is not None:
            for state in block.states:
                state.gradients.drop_backward(block.scaler)
            self.fellows.note_error(params, kind)
        elif block.delay_unscale or self.fellows.postpone(params):
            self._postpone(block)
        elif not self.policy.checks:
            for state in block.states:
                state.gradients.unscale(block.scaler, None, False)
        else:
            self.record_check(block, self._check(block, params))
        self.mark.end()
        if not self.fellows.alone and kind is None:
            self.fellows.compare_again()

    def _leave_closed(self, block: Block, kind: type[BaseException] | None) -> None:
        """Leave a block that another call has closed: what its backward left is dropped."""
        for state in block.states:
            self._forget_backwards(state)
        self.mark.end()
        if kind is None:
            raise StateError(
                "scale_loss(loss, optimizer): this block was closed by a call within it, after another was refused, so "
                "its gradients are dropped. Let such an error leave the block."
            )

    def _postpone(self, block: Block) -> None:
        why = "delay_unscale=True" if block.delay_unscale else "the wrapper's no_sync"
        what = "postponed it" if block.delay_unscale else "postponed its reduction"
        for state in block.states:
            self.watch.postpone(state.index)
            state.gradients.postpone(block.scaler, f"{why} {what}")

    def _check(self, block: Block, params: Sequence[torch.Tensor]) -> torch.Tensor:
        """Unscale and check the gradients, raise ``overflowed_since_step``, and return one flag for the block."""
        only, scaler = block.states[0], block.scaler
        if len(block.states) == 1 and not only.checked_since_step and not block.delay_overflow_check:
            self.watch.take(only.index, only.overflowed_since_step)
            only.gradients.unscale(scaler, only.overflowed_since_step, True)
            only.note_check()
            self.fellows.agree(only.overflowed_since_step, params)
            return only.overflowed_since_step
        flags = self.memory.overflowed_now
        flags.zero_()
        for state in block.states:
            self.watch.take(state.index, state.overflowed_now)
            counts = not block.delay_overflow_check
            state.gradients.unscale(scaler, state.overflowed_now, not state.checked_since_step, counts)
        self.fellows.agree(flags, params)
        if block.delay_overflow_check:
            return flags.max()
        found = self.overflow_of(flags)
        for state in block.states:
            state.add_overflow()
        return found

    def overflow_of(self, flags: torch.Tensor) -> torch.Tensor:
        """Return whether a backward overflowed. ``flags``: of its optimizers; an engine may raise them all with one."""
        return flags.max()

    def record_check(self, block: Block, found_inf: torch.Tensor) -> None:
        """Record the overflow that a check found, for the scale and for those of backwards that were left scaled."""
        if block.delay_overflow_check:
            return
        if self.policy.dynamic:
            block.scaler.note_overflow(found_inf)
        for state in block.states:
            if owed := state.gradients.backwards.owed:
                for scaler in owed.values() if self.policy.dynamic else ():
                    scaler.note_overflow(found_inf)
                state.gradients.backwards.owe_nothing()

    # ---------------------------------------------------------------- between a backward and a step

    def begin_reading(self, state: OptimizerState, call: str) -> None:
        """Let ``call`` read or change the unscaled gradients, and set the mark: it ends with ``mark.end()``.

        Raises:
            StateError: inside of ``scale_loss``; the gradients are still scaled, or not what ``call`` takes them for.
        """
        self.settle()
        has_changed, _ = self._refuse_reading(state, call)
        self.mark.begin(call)
        if has_changed:
            self.adopt_changes(state)
        state.gradients.take_in_clears()

    def _refuse_reading(self, state: OptimizerState, call: str) -> tuple[bool, bool]:
        """Raise the StateError of :meth:`begin_reading`; return whether groups have changed, and others cleared."""
        if self.blocks.entered:
            inside = f"{call}: inside `with xamp.scale_loss(...)` of this optimizer. Call it after the block."
            self.blocks.refuse(inside, [state])
        gradients = state.gradients
        has_other_count = gradients.params.has_other_count(state.ref().param_groups)  # more takes 8 us for 300
        has_changed = has_other_count and self.refuse_changes(state, call)
        return has_changed, gradients.refuse_reading(call)

    def zero_grad(
        self, state: OptimizerState, own: Callable[[], object] | None = None, values: Sequence[Any] = ()
    ) -> None:
        """Clear the gradients of an optimizer, and those of the model that it does not reach.

        ``own``: its own ``zero_grad``, with its arguments, the ``values``; None: that of torch, without any.
        """
        self.mark.begin("zero_grad")
        if own is None:
            for group in state.ref().param_groups:
                for param in group["params"]:
                    param.grad = None
        else:
            if values and values != (True,):
                state.gradients.move_held()  # zeros stay
            self.mark.run_foreign(own)
        state.gradients.cleared()
        self.watch.forget(state.index, forwards=False)
        self.mark.end()

    # ---------------------------------------------------------------- the step

    def step(
        self, state: OptimizerState, base: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run ``optimizer.step(*args, **kwargs)``, or skip it. ``base`` is the optimizer's own ``step``.

        Raises:
            StateError: gradients are still scaled, a backward ran without ``scale_loss``, or a closure runs one.
            LossScaleCollapsed: :data:`xamp.scaling.counts.COLLAPSE_RUN` overflows in a row that no smaller scale could
                cure.
        """
        gradients, one_pass = state.gradients, None
        self.refuse_wrong(state)
        if self.policy.manages_gradients:
            if (args or kwargs) and any(callable(value) for value in (*args, *kwargs.values())):
                name = type(state.optimizer).__name__
                args, kwargs = call_closure(gradients, args, kwargs, name=name, level=self.policy.level)
            if True in self._refuse_reading(state, "optimizer.step()"):
                self.begin_reading(state, "optimizer.step()")
                self.mark.end()
            if (gradients.held is None or not gradients.came_through) and gradients.has_stray():  # else it was asked
                state.refuse_stray()
            if gradients.were_cleared():  # there are no gradients but zeros: others were refused in the line above
                return self._step_without_gradients(state, base, args, kwargs)
            if gradients.held is not None:
                one_pass = state.in_one_pass(has_pre_hooks(state.optimizer))
                if one_pass is None:  # way() asks which gradients torch's step finds
                    self.mark.begin("optimizer.step()")
                    gradients.move_held()
                    self.mark.end()
        elif not (args or kwargs) and self._finds_nothing(state):  # a closure would make gradients
            return base()
        way, in_users_implementation = state.way(one_pass)
        if way is StepWay.HOST and self.numbers.unseen.possible:
            name, can_skip = type(state.optimizer).__name__, state.fused.skips_on_device
            self.numbers.unseen.refuse_host_step(name, can_skip, self.backend, self.device)
        if self.weights.pairs and state.master_versions.is_model_written():
            self.weights.look_for_lost_writes(in_turn=False)

        self.mark.begin("optimizer.step()")
        if one_pass is not None:
            base = one_pass.bound_to(state.optimizer)
        if in_users_implementation:
            base = state.in_users_implementation(base)
        self._move_scales(state)
        decided, values = self._decide(state, way)
        result = None
        if decided is not StepOutcome.SKIPPED:
            result = self.mark.run_foreign(state.run, way, base, args, kwargs)
        records = state.end_step(way, decided, values, one_pass)
        self.mark.end()
        self._observe(state, records)
        return result

    def _observe(self, state: OptimizerState, records: Sequence[Record]) -> None:
        """Judge steps, all of them; then raise the first LossScaleCollapsed."""
        collapsed = None
        for step, seen in records:
            try:
                state.outcomes.observe(step, seen)
            except LossScaleCollapsed as error:
                collapsed = collapsed or error
        if collapsed is not None:
            raise collapsed

    def refuse_wrong(self, state: OptimizerState) -> None:
        """Raise a StateError where a step would be wrong, by its backend or by what happened."""
        self.settle()
        optimizer = state.ref()
        if self.fellows.refusal:
            raise StateError(f"optimizer.step(): {self.fellows.refusal}")
        if self.policy.casts_parameters:
            self.backend.join_gradients(optimizer)
        if why := self.backend.optimizer_refusal(optimizer, casts=False):
            raise StateError(f"optimizer.step(): {type(optimizer).__name__} {why}")
        if ranks.is_running() and state.note_missing():
            self.refuse_sharded("optimizer.step()")

    def _move_scales(self, state: OptimizerState) -> None:
        """Move the scales whose backwards reached this optimizer, unless another step has moved them."""
        for index, window in state.gradients.backwards.windows.items():
            scaler = self.numbers.scalers[index]
            if scaler.window == window:
                scaler.end_window()

    def _decide(self, state: OptimizerState, way: StepWay) -> tuple[StepOutcome | torch.Tensor, Sequence[float]]:
        """Return whether the step is taken, or the flag that tells the device; and what the host has read."""
        if way is StepWay.UNCHECKED:
            return StepOutcome.APPLIED, ()
        if way is StepWay.DEVICE:
            return state.overflowed_since_step.clone(), ()
        outcome, values = state.read_flags()
        scalers = self.numbers.scalers
        for index, scaler in enumerate(scalers):
            scaler.know(values[index], values[len(scalers) + index])
        return outcome, values

    def _step_without_gradients(self, state: OptimizerState, base: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """End a window of which no gradient is left, and let the optimizer step: nothing is counted."""
        self._warn_of_no_gradient(state)
        self.mark.begin("optimizer.step()")
        self._move_scales(state)
        result = self.mark.run_foreign(base, *args, **kwargs)
        state.end_without_gradients()
        self.mark.end()
        return result

    def _finds_nothing(self, state: OptimizerState) -> bool:
        """Return whether a step would find no gradient, on this rank or another one; say so once."""
        params = state.gradients.params
        if any(param.grad is not None for param in params.stepped):
            return False
        self._warn_of_no_gradient(state)
        if params.in_shards:
            return False
        state.outcomes.nothing_stepped()
        return True

    def _warn_of_no_gradient(self, state: OptimizerState) -> None:
        """Say once that a step finds no gradient at all: the optimizer may hold other tensors than the model."""
        if state.gradients.present() or state.gradients.params.in_shards or not state.note_no_gradient():
            return
        self.refuse_sharded("optimizer.step()")
        say(
            "%s.step() finds no gradient on anything that this optimizer holds, and changes nothing. If a backward "
            "ran, the optimizer was made from other parameters: of a copy of the model, or before the model was "
            "moved, sharded or replaced. Make it from model.parameters() of the very model, last.",
            type(state.optimizer).__name__,
            level=logging.WARNING,
        )


def _params_of(states: Sequence[OptimizerState]) -> list[torch.Tensor]:
    return [p for state in states for p in state.gradients.params.of_the_models]
