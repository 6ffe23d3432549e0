"""The parts that one ``initialize`` call set up, and what is asked of them outside of a step.

:class:`xamp.scaling.engine.Engine` adds the order of a step. The parts hold models and optimizers weakly.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from xamp.contract import Backend
from xamp.errors import StateError
from xamp.policy import Policy
from xamp.scaling import masters
from xamp.scaling.block import Block, OpenBlocks
from xamp.scaling.capture import Capture
from xamp.scaling.counts import Counts, Stats
from xamp.scaling.fellows import Fellows, Unreduced
from xamp.scaling.fused import FusedChoice
from xamp.scaling.gradients import Gradients
from xamp.scaling.models import Models
from xamp.scaling.outcomes import Outcomes
from xamp.scaling.overflow_flag import FlagWatch, Watch
from xamp.scaling.param_groups import replace_params
from xamp.scaling.scale import DeviceState, LossScaler
from xamp.scaling.step import OptimizerState
from xamp.scaling.weights import Weights
from xamp.scaling.writing_mark import WritingMark
from xamp.values.containers import cast_floats
from xamp.values.log import say
from xamp.values.lowered import handed_out
from xamp.values.undo import Undo

__all__ = ["Numbers", "Parts"]


class Numbers:
    """The numbers that a session keeps on the device, and its loss scales.

    Attributes:
        unseen: tells whether the device does the work of a session without the host, as in a captured graph.
        memory: all numbers; one tensor.
        scalers: the loss scales, by ``loss_id``.
    """

    def __init__(self, policy: Policy, device: torch.device, unseen: Capture) -> None:
        self.unseen = unseen
        self.memory = DeviceState(0, 0, device)
        self.scalers: Sequence[LossScaler] = ()
        self._policy = policy
        self._device = device

    def prepare(self, optimizers: int) -> None:
        """Make the device state for a number of optimizers. Scales that were loaded before stay."""
        before, losses = self.scalers, self._policy.num_losses
        self.memory = DeviceState(losses, optimizers, self._device)
        note = self.unseen.note_use_of_scale if self.unseen.possible else None
        self.scalers = [LossScaler(self._policy, self.memory, i, note) for i in range(losses)]
        for old, new in zip(before, self.scalers, strict=False):
            new.set(old.host_scale, int(old.growth_tracker))


class Parts:
    """The parts that one call of ``initialize`` set up.

    Attributes:
        policy: the settings.
        backend: the backend in use.
        device: the device of the loss scale, which is that of the models' first parameter.
        enabled: False where ``initialize(enabled=False)`` made the engine, which then does nothing.
        models: the models.
        numbers: the loss scales and all that lies on the device.
        weights: the models' weights and their masters.
        fellows: the ranks that share these.
        counts: applied and skipped steps, as far as the host knows of them.
        states: what is kept for each optimizer.
        undo: gives the models and optimizers back in fp32 and in their own classes.
        mark: set while xamp writes.
        blocks: the open ``scale_loss`` blocks.
        watch: watches the device for overflows that gradients do not show.
    """

    def __init__(
        self,
        policy: Policy,
        backend: Backend,
        device: torch.device,
        models: Sequence[nn.Module],
        *,
        undo: Undo,
        process_group: Any = None,
        verbosity: int = 1,
        enabled: bool = True,
        regions: Any = None,
    ) -> None:
        self.policy = policy
        self.backend = backend
        self.device = device
        self.enabled = enabled
        self.undo = undo
        self.states: Sequence[OptimizerState] = ()
        self.mark = WritingMark(self._repair, _tell_of_repair)
        self.models = Models(models, lambda: self.weights.pairs)
        self.numbers = Numbers(policy, device, Capture.of(backend, device))
        gradients_tell = backend.capabilities(device).overflow != "flag"
        self.counts = Counts(
            verbosity=verbosity,
            names_of=self.models.names_of,
            gradients_tell=gradients_tell,
            all_scalers=lambda: self.numbers.scalers,
        )
        self.weights = self._make_weights()
        self.fellows = Fellows(self.models.refs, policy, process_group, enabled, gradients_tell)
        self.blocks = OpenBlocks(self._drop_backward, self._forget, regions)
        self.watch = Watch(backend, device) if gradients_tell or not policy.checks else self._make_watch(models)

    # ---------------------------------------------------------------- what it is made of

    @staticmethod
    def caster() -> Callable[[Any, torch.dtype], Any]:
        """Return the function that casts the models' arguments and results."""
        return cast_floats

    def _make_watch(self, models: Sequence[nn.Module]) -> Watch:
        of_states = lambda: [state.index for state in self.states]  # noqa: E731
        return FlagWatch(self.backend, self.device, models, self.settle, of_states)

    def _make_weights(self) -> Weights:
        return Weights(*self._arguments_of_weights())

    def _arguments_of_weights(self) -> tuple[Any, ...]:
        return (
            self.policy.level,
            lambda: [state.master_versions for state in self.states],
            self.models.names_of,
            self.refuse_sharded,
            self.numbers.unseen.is_running,
        )

    def _make_gradients(
        self, optimizer: weakref.ref[Optimizer], kept: Unreduced, met_sparse: Callable[[Optimizer], None]
    ) -> Any:
        return Gradients(self.policy, self.backend, optimizer, kept, met_sparse)

    def _make_outcomes(self, index: int, gradients: Any) -> Outcomes:
        return Outcomes(self.counts, self.numbers.memory, index, gradients, self.numbers.unseen)

    def make_state(self, optimizer: Optimizer, index: int, fused: FusedChoice) -> OptimizerState:
        """Make the state of ``optimizer``, the ``index``-th, which has its masters already."""
        ref = weakref.ref(optimizer)

        def own() -> Sequence[torch.Tensor]:
            return gradients.params.without_master  # type: ignore[no-any-return]

        def others() -> Iterable[torch.Tensor]:
            return (p for state in self.states if state.index != index for p in state.gradients.params.without_master)

        gradients = self._make_gradients(ref, self.fellows.kept_by_wrappers(own, others), fused.met_sparse)
        outcomes = self._make_outcomes(index, gradients)
        checks = self.policy.checks
        state = OptimizerState(optimizer, index, fused, gradients, outcomes, self.numbers.memory, checks=checks)
        self._read_groups(state, again=False)
        return state

    def _read_groups(self, state: OptimizerState, *, again: bool = True) -> None:
        """Read the groups of an optimizer, and choose how it steps. ``again``: they have changed.

        Raises:
            UnsupportedPolicy: steps in one pass were asked for, and cannot be had. Where groups have changed, a warning
                says so instead, and torch steps.
        """
        state.find_parameters(self.weights.pairs)
        if not state.fused.one_pass:
            return
        from xamp.scaling import one_pass  # kernels and their plans, which nothing else needs

        params, optimizer = state.gradients.params, state.optimizer
        why = one_pass.refusal(optimizer, state.fused, params, self.device, self.counts.gradients_tell)
        if why and not again:
            raise one_pass.error_for(state.fused.kind, why)
        if why:
            say(
                "%s no longer steps in one pass, as fused='one-pass' asks, but as torch steps it: %s.",
                state.fused.kind.__name__,
                why,
                level=logging.WARNING,
            )
        made = None if why else one_pass.OnePass(optimizer, params, state.fused, self.numbers.unseen)
        state.gradients.use_one_pass(made)

    def add_states(self, states: Iterable[OptimizerState]) -> None:
        """Add the states of optimizers. The engine decides on their steps from now on."""
        states = list(states)
        self.states = [*self.states, *states]
        self.fellows.remember_params(p for state in states for p in state.gradients.params.of_the_models)

    def remove_states(self, states: Iterable[OptimizerState]) -> None:
        """Undo :meth:`add_states`."""
        gone = {id(state) for state in states}
        self.states = [state for state in self.states if id(state) not in gone]

    # ---------------------------------------------------------------- what others ask

    @property
    def scalers(self) -> Sequence[LossScaler]:
        """The loss scales, by ``loss_id``."""
        return self.numbers.scalers

    @property
    def memory(self) -> DeviceState:
        """All numbers that the session keeps on the device."""
        return self.numbers.memory

    def stats(self) -> Stats:
        """Return the counts of applied and skipped steps. Waits for the device."""
        known = [self.counts.stats, *(state.outcomes.not_counted() for state in self.states)]
        return Stats(sum(each.applied for each in known), sum(each.skipped for each in known))

    def judge_unseen(self) -> None:
        """Raise a LossScaleCollapsed where replays of a captured step met a run of overflows. Waits for the device."""
        for state in self.states:
            state.outcomes.judge_unseen()

    def last_step(self) -> Any:
        """Return the outcome of the last step; for several optimizers a dict by optimizer. May wait for the device."""
        outcomes = {state.optimizer: state.outcomes.known() for state in self.states if state.is_alive}
        return next(iter(outcomes.values()), None) if len(outcomes) <= 1 else outcomes

    def serves(self, optimizer: object) -> bool:
        """Return whether ``optimizer`` is one of the engine's optimizers."""
        return any(state.is_alive and state.optimizer is optimizer for state in self.states)

    def is_handed_over(self) -> bool:
        """Return whether another implementation does the work, and cannot be asked to stop."""
        return False

    def before_forward(self) -> None:
        """Before a forward of a model with masters: let it follow them. Costs a look at their versions."""
        self.settle()
        if not self.fellows.alone:
            for state in self.states:
                state.gradients.adopt_copies()
        self.weights.copy_masters_to_model()

    def follow_afresh(self, *, by_optimizer: bool = False) -> None:
        """Where a model with masters may be about to evaluate: let it have what they hold."""
        self.settle()
        self.weights.follow_afresh(by_optimizer=by_optimizer)

    def may_be_behind(self) -> bool:
        """Return whether compiled forwards must ask whether a master has changed."""
        return self.weights.may_be_behind()

    def before_saving(self) -> None:
        """Prepare for saving or loading a state. Every master is known after this call."""
        self.settle()

    def refuse_open(self, call: str, cure: str) -> None:
        """Raise a StateError where a ``scale_loss`` is open, whatever it is over."""
        self.mark.settle()
        self.blocks.refuse(f"{call}: inside `with xamp.scale_loss(...)`. {cure}", self.states)

    def refuse_closing(self) -> None:
        """Raise a StateError where models and optimizers cannot be given back in their present state."""
        self.refuse_open("session.close()", "Close after the block.")
        for state in self.states:
            state.gradients.refuse_scaled("session.close()")

    def move_held(self, call: str) -> None:
        """Move gradients to where they stay, because ``call`` ends what they were held for."""
        self.mark.begin(call)
        for state in self.states:
            state.gradients.move_held()
        self.mark.end()

    # ---------------------------------------------------------------- groups that change

    def refuse_shared(self, state: OptimizerState, params: Iterable[torch.Tensor]) -> None:
        """Raise a StateError if another optimizer of this engine than that of ``state`` holds one of ``params``.

        Both optimizers would unscale its gradient and step its master.
        """
        if not self.policy.manages_gradients:
            return
        others = [other for other in self.states if other is not state and other.is_alive]
        held = {id(p) for other in others for p in other.gradients.params.of_the_models}
        shared = [p for p in params if id(p) in held]
        if shared:
            raise StateError(
                f"param_groups: {self.models.names_of(shared)[0]} is in another optimizer of this session too, and two "
                f"would unscale its gradient. At level {self.policy.level} give each parameter to one optimizer."
            )

    def adopt_group(self, state: OptimizerState, group: Mapping[str, Any]) -> None:
        """Take in a group that was added to an optimizer: give its low-precision parameters masters."""
        if self.policy.master_weights:
            pairs = [(p, m) for p in group["params"] if (m := masters.ensure_master(p, self.policy)) is not None]
            self.weights.add(pairs)
            replace_params(state.optimizer, pairs)
        state.fused.switch_on(state.optimizer)
        self._read_groups(state)

    def loaded(self, state: OptimizerState) -> None:
        """Called after ``optimizer.load_state_dict``."""
        self._read_groups(state)

    def saved_groups(self, state: OptimizerState, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return what ``optimizer.state_dict()`` shall hold of ``groups``."""
        del state
        return groups

    def refuse_changes(self, state: OptimizerState, call: str) -> bool:
        """Refuse parameters that a script, as for densification, has put into the groups by hand, and may not.

        ``call`` is what asks. Where that is not ``scale_loss``, gradients exist.

        Raises:
            StateError: a new parameter has a gradient that may still be scaled, or is in another optimizer.

        Returns:
            Whether the groups hold anything else than when they were read, so that :meth:`adopt_changes` is due.
        """
        optimizer = state.ref()
        new = None if optimizer is None else state.gradients.params.not_held(optimizer.param_groups)
        if new is None:
            return False
        late = [p for p in new if p.grad is not None] if call != "scale_loss" and self.policy.scales else []
        if late:
            raise StateError(
                f"{call}: {self.models.names_of(late)[0]} was put into param_groups after the scale_loss that gave it "
                "its gradient, which is still multiplied by the loss scale. Put it in before the scale_loss, or clear "
                "its gradient."
            )
        self.refuse_shared(state, new)
        return True

    def adopt_changes(self, state: OptimizerState) -> None:
        """Read the groups again, which a script has changed by hand."""
        for group in state.optimizer.param_groups:
            self.adopt_group(state, group)

    def refuse_sharded(self, call: str) -> None:
        """Raise a StateError for a model that was sharded or parallelized after ``initialize``."""
        alive = [state for state in self.states if state.is_alive]
        self.fellows.refuse_sharded(
            call, ((state.optimizer, p) for state in alive for p in state.gradients.params.of_the_models)
        )

    # ---------------------------------------------------------------- what exceptions have left

    def settle(self) -> None:
        """Put right what exceptions have left: parts, and blocks. Take in what was written into copies of weights."""
        self.mark.settle()
        if handed_out:
            from xamp.scaling.handed_out import take_in

            take_in()
        if self.blocks.entered:
            self.blocks.drop_abandoned()

    def end_backward(self) -> None:
        """End a backward, at the end of the body of ``scale_loss``, also after an exception."""
        self.watch.close()

    def _drop_backward(self, block: Block) -> None:
        """Drop the backward of a block that was abandoned."""
        self.mark.begin("scale_loss")
        self.end_backward()
        for state in block.states:
            state.gradients.drop_backward(block.scaler)
        self.blocks.remove(block)
        self.mark.end()

    def _forget(self, block: Block) -> None:
        """Drop all gradients of a block's optimizers since their last steps."""
        self.mark.begin("scale_loss")
        self.end_backward()
        for state in block.states:
            self._forget_backwards(state)
        self.blocks.remove(block)
        self.mark.end()

    def _forget_backwards(self, state: OptimizerState) -> None:
        state.forget_backwards()
        self.watch.forget(state.index)

    def _repair(self) -> None:
        """Make the session whole after an exception in the midst of a call: see :mod:`xamp.scaling.writing_mark`."""
        for _ in self.blocks.close_all():
            self.end_backward()
        for state in self.states:
            self._forget_backwards(state)
            if state.is_alive:
                state.take_back()
                for group in state.optimizer.param_groups:  # they may have been read in part
                    self.adopt_group(state, group)
                state.let_model_follow()
        self.memory.lower_flags()
        for scaler in self.scalers if self.policy.dynamic else ():
            scaler.set(scaler.rules.within(float(scaler.scale)), int(scaler.growth_tracker))
        self.watch.close_all()


def _tell_of_repair(call: str) -> None:
    say(
        "%s was ended by an exception before it was done: the gradients of this session since its last step are "
        "dropped, and the model has the weights that the optimizer steps. Run the iteration again.",
        call,
        level=logging.WARNING,
    )
