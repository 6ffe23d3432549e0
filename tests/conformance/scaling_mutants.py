"""A broken engine, and broken chips, for the clauses of tier ``scaling``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from mutants import Mutant, also, patched, registered
from saturating_chip import SaturatingBackend
from torch.amp.grad_scaler import OptState

from xamp import policy
from xamp.policy import Policy
from xamp.scaling import outcomes
from xamp.scaling.backwards import Backwards
from xamp.scaling.block import Block, OpenBlocks
from xamp.scaling.counts import CollapseWatch, StepOutcome
from xamp.scaling.engine import Engine
from xamp.scaling.gradients import Gradients
from xamp.scaling.outcomes import Outcomes
from xamp.scaling.overflow_flag import FlagWatch
from xamp.scaling.parts import Numbers
from xamp.scaling.scale import LossScaler, ScaleRules
from xamp.scaling.step import OptimizerState, StepWay
from xamp.sessions import scale_loss
from xamp.sessions.grad_scaler import GradScaler
from xamp.sessions.scaler_steps import ScalerSteps

_update, _check, _decide = LossScaler.update, Engine._check, Engine._decide
_end_step, _prepare, _unscale_by_hand = OptimizerState.end_step, Numbers.prepare, GradScaler.unscale_
_move_by_hand = ScalerSteps.move


class NeverClears(SaturatingBackend):
    """Whatever overflowed before the backward counts as the backward's."""

    def clear_overflow(self, device: torch.device) -> None:
        pass

    def unscale_(self, *args: Any) -> None:
        super().unscale_(*args)
        self.overflowed = False


def _looks_at_backwards_only(self: FlagWatch, function: Any, args: Any, kwargs: Any) -> Any:
    """Lowers the flag on entering ``scale_loss``, and never asked for it before."""
    return function(*args, **kwargs)


def _keeps_the_count(self: LossScaler, found_inf: torch.Tensor, *options: Any) -> None:
    """An overflow does not start the count of clean updates again."""
    before = self.growth_tracker.clone()
    _update(self, found_inf, *options)
    torch.where(found_inf > 0, before, self.growth_tracker, out=self.growth_tracker)


def _keeps_the_inverse(self: LossScaler, found_inf: torch.Tensor, *options: Any) -> None:
    """The inverse stays that of the scale before."""
    fresh = self.inverse
    _update(self, found_inf, *options)
    self._inverse_is_stale = fresh is None


def _reads(self: LossScaler, found_inf: torch.Tensor, *options: Any) -> None:
    """Asks the device whether there was an overflow, as torch_npu does."""
    if found_inf.item() in (0.0, 1.0):
        _update(self, found_inf, *options)


def _moves_with_each_backward(self: Engine, block: Block, params: Any) -> torch.Tensor:
    """However many backwards a step has, as Apex."""
    found = _check(self, block, params)
    block.scaler.update(found)
    return found


def _goes_on_counting(self: CollapseWatch, scales: Any) -> None:
    """A clean step does not end a run of overflows."""
    self.scales = scales


def _never_checks_a_static_scale(_: object, dynamic: bool, static_scale: float) -> bool:
    """As Apex and torch_npu."""
    return dynamic


def _always_checks(*_: object) -> bool:
    return True


def _reads_the_state(self: Engine, state: OptimizerState, way: StepWay) -> Any:
    self.memory.values.tolist()
    return _decide(self, state, way)


def _always_applied(self: Outcomes) -> StepOutcome | None:
    """Of a fused step says that it was applied, as accelerate does."""
    return StepOutcome.APPLIED if isinstance(self.last, torch.Tensor) else self.last


def _prints(message: str, *args: object) -> None:
    print(message % args)


def _leaves_what_is_there(self: Gradients, scaler: LossScaler) -> None:
    """Gradients of earlier losses are not brought to the scale of this one."""


def _unscales_at_once(self: Engine, block: Block) -> None:
    params = [p for state in block.states for p in state.gradients.params.of_the_models]
    self.record_check(block, self._check(block, params))


def _the_first_scaler(call: str, engine: Engine, loss_id: int) -> LossScaler:
    """One scale, whatever the ``loss_id``."""
    return engine.scalers[0]


def _flag_stays_up(self: OptimizerState, *args: Any) -> Any:
    flag = self.overflowed_since_step.clone()
    records = _end_step(self, *args)
    self.overflowed_since_step.copy_(flag)
    return records


def _gradients_stay_unscaled(self: OptimizerState, *args: Any) -> Any:
    records = _end_step(self, *args)
    self.gradients.came_through = True
    return records


def _whatever_session(call: str, optimizers: Any) -> Any:
    """Takes the scale of the first optimizer's session for all."""
    given = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    return [optimizer._xamp.state for optimizer in given], given[0]._xamp.engine


def _forgets_that_it_unscaled(self: GradScaler, optimizer: Any) -> None:
    """``step`` unscales once more."""
    _unscale_by_hand(self, optimizer)
    self._per_optimizer_states[id(optimizer)]["stage"] = OptState.READY


def _once_for_each(self: ScalerSteps, *args: Any) -> None:
    """The scale moves once for each optimizer."""
    for _ in self.by_optimizer:
        self.moves_from = None
        _move_by_hand(self, *args)


@contextlib.contextmanager
def _one_scale_for_all() -> Iterator[None]:
    """The loss scalers are the process's, as Apex's were."""
    shared: list[LossScaler] = []

    def prepare(self: Numbers, optimizers: int) -> None:
        _prepare(self, optimizers)
        if self._policy.dynamic:
            shared[:] = shared or self.scalers
            self.scalers = shared

    with mock.patch.object(Numbers, "prepare", prepare):
        yield


MUTANTS = [
    Mutant(
        "looks at backwards only",
        "scaling.overflow_in_forward",
        also(registered("saturating_chip:SaturatingBackend"), patched(FlagWatch, "run", _looks_at_backwards_only)),
        "mutant",
    ),
    Mutant(
        "the count goes on after an overflow",
        "scaling.scale_sequence",
        patched(LossScaler, "update", _keeps_the_count),
    ),
    Mutant(
        "starts outside the bounds",
        "scaling.start_within_bounds",
        patched(ScaleRules, "within", lambda self, scale: scale),
    ),
    Mutant(
        "the floor is believed to be far away",
        "scaling.floor",
        patched(ScaleRules, "moves_before_bound", lambda self, scale: 10**6),
    ),
    Mutant("never reports a collapse", "scaling.floor", patched(CollapseWatch, "count_overflow", lambda *_: False)),
    Mutant(
        "a clean step does not end a run",
        "scaling.clean_step_restarts_the_count_to_collapse",
        patched(CollapseWatch, "clean", _goes_on_counting),
        error="xamp.errors.LossScaleCollapsed: optimizer.step(): 50 overflows in a row",
    ),
    Mutant(
        "a static scale is not checked",
        "scaling.static_scale_skips",
        patched(policy, "_checks", _never_checks_a_static_scale),
    ),
    Mutant(
        "a scale of 1 is never checked",
        "scaling.static_one_can_be_checked",
        patched(policy, "_checks", lambda _, dynamic, scale: dynamic or scale != 1.0),
    ),
    Mutant("checks what it must not", "scaling.static_scale_that_steps", patched(policy, "_checks", _always_checks)),
    Mutant(
        "multiplies by 1",
        "scaling.static_one_is_a_pass_through",
        patched(Policy, "scales", property(lambda self: True)),
    ),
    Mutant(
        "a fused step is decided on the host",
        "scaling.no_host_reads_when_fused",
        patched(OptimizerState, "way", lambda self, one_pass: (StepWay.HOST, False)),
    ),
    Mutant(
        "asks the device at each update",
        "scaling.one_host_read_when_unfused",
        patched(LossScaler, "update", _reads),
    ),
    Mutant(
        "reads where nothing is checked",
        "scaling.no_host_reads_when_static",
        patched(Engine, "_decide", _reads_the_state),
    ),
    Mutant(
        "a fused step is always called applied",
        "scaling.outcomes_can_be_read",
        patched(Outcomes, "known", _always_applied),
    ),
    Mutant("prints", "scaling.overflow_is_logged", patched(outcomes, "say", _prints)),
    Mutant(
        "what is accumulated is unscaled again",
        "scaling.accumulation_equals_one_batch",
        patched(Gradients, "enter", _leaves_what_is_there),
    ),
    Mutant(
        "each micro-batch moves the scale",
        "scaling.overflow_in_a_micro_batch",
        patched(Engine, "_check", _moves_with_each_backward),
    ),
    Mutant(
        "an overflow is found again in the sum",
        "scaling.optimizers_that_step_at_different_moments",
        patched(Backwards, "counted_elsewhere", lambda *_: False),
    ),
    Mutant(
        "unscales by an old scale",
        "scaling.scale_moves_between_backwards",
        patched(LossScaler, "update", _keeps_the_inverse),
    ),
    Mutant("delay_unscale does not delay", "scaling.delay_unscale", patched(Engine, "_postpone", _unscales_at_once)),
    Mutant(
        "a chip's flag is lost under delay_unscale",
        "scaling.overflow_under_delay_unscale",
        also(registered("saturating_chip:SaturatingBackend"), patched(FlagWatch, "postpone", lambda *_: None)),
        "mutant",
    ),
    Mutant(
        "one scale for all losses",
        "scaling.losses_with_own_scales",
        patched(scale_loss, "_scaler_of", _the_first_scaler),
    ),
    Mutant(
        "a chip's flag is not cleared",
        "scaling.overflow_outside_backward",
        registered(f"{__name__}:NeverClears"),
        "mutant",
    ),
    Mutant(
        "the flag stays up after a step",
        "scaling.overflow_is_gone_in_the_next_iteration",
        patched(OptimizerState, "end_step", _flag_stays_up),
    ),
    Mutant(
        "takes gradients that were never scaled",
        "scaling.backward_without_scale_loss",
        patched(Gradients, "has_stray", lambda self: False),
    ),
    Mutant("steps twice", "scaling.step_twice", patched(OptimizerState, "end_step", _gradients_stay_unscaled)),
    Mutant(
        "does not ask whether a block is open",
        "scaling.use_inside_the_block",
        patched(OpenBlocks, "refuse", lambda *_: None),
    ),
    Mutant(
        "scales for two sessions by one",
        "scaling.two_sessions_in_one_scale_loss",
        patched(scale_loss, "_states_of", _whatever_session),
    ),
    Mutant("unscales twice", "scaling.grad_scaler", patched(GradScaler, "unscale_", _forgets_that_it_unscaled)),
    Mutant(
        "an update for each optimizer",
        "scaling.grad_scaler_of_two_optimizers",
        patched(ScalerSteps, "move", _once_for_each),
    ),
    Mutant("has no floor", "scaling.grad_scaler_floor", patched(GradScaler, "_floor", 2.0**-100)),
    Mutant(
        "scales for an optimizer that is managed",
        "scaling.grad_scaler_order",
        patched(ScalerSteps, "_refuse_managed", lambda *_: None),
    ),
    Mutant("one scale for all sessions", "scaling.sessions_side_by_side", _one_scale_for_all),
]
