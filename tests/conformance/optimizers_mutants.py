"""A broken engine for the clauses of tier ``optimizers``."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from mutants import Mutant, also, patched

import xamp
from xamp.scaling import engine, fused, masters, optimizer, unscale
from xamp.scaling.block import Block, ScaledLoss
from xamp.scaling.counts import StepOutcome
from xamp.scaling.engine import Engine
from xamp.scaling.fused import FusedChoice
from xamp.scaling.gradients import Gradients
from xamp.scaling.scale import DeviceState
from xamp.scaling.step import OptimizerState, StepWay
from xamp.sessions import checks
from xamp.sessions.session import Session

_leave, _check, _run = Engine.leave, Engine._check, OptimizerState.run
_move_scales, _decide = Engine._move_scales, Engine._decide
_unscale, _exit, _close = Gradients.unscale, ScaledLoss.__exit__, Session.close
_step_of, _zero_grad_of, _unscale_by_group_ = optimizer._step_of, optimizer._zero_grad_of, unscale.unscale_by_group_


def _zeroes_and_steps(self: Engine, state: OptimizerState, way: StepWay) -> Any:
    """On an overflow the optimizer steps with gradients of zero: the momentum moves, and what decays."""
    decided, values = _decide(self, state, way)
    if decided is StepOutcome.SKIPPED:
        for param in state.gradients.params.stepped:
            if param.grad is not None:
                param.grad.zero_()
        own: Any = state.optimizer
        own._xamp_base.step(own)
    return decided, values


@contextlib.contextmanager
def _kernel_without_found_inf() -> Iterator[None]:
    """The fused AdamW is not tried, and ignores ``found_inf``, as torch_npu's does."""
    kernel = torch._fused_adamw_

    def ignores(*args: Any, **kwargs: Any) -> Any:
        return kernel(*args, **{**kwargs, "found_inf": None})

    with (
        mock.patch.object(torch, "_fused_adamw_", ignores),
        mock.patch.object(fused, "is_right", return_value=True),
    ):
        yield


def _unscales_the_second_again(self: Engine, block: Block, kind: Any) -> None:
    """As accelerate and Fabric do when each optimizer's step updates the one scaler."""
    _leave(self, block, kind)
    for state in block.states[1:]:
        unscale.multiply_([grad for _, grad in state.gradients.present()], block.scaler.inverse)


def _one_flag_for_all(self: Engine, block: Block, params: Any) -> torch.Tensor:
    found = _check(self, block, params)
    for state in block.states:
        torch.maximum(state.overflowed_since_step, found, out=state.overflowed_since_step)
    return found


def _anybodys(self: DeviceState, values: Any, optimizer: int) -> bool:
    """An overflow is everybody's."""
    return any(values[self._first_of_optimizers :])


def _unscales_by_the_new_scale(self: Engine, state: OptimizerState) -> None:
    before = [scaler.scale.clone() for scaler in self.scalers]
    _move_scales(self, state)
    grads = [grad for _, grad in state.gradients.present()]
    for scale, scaler in zip(before, self.scalers, strict=True):
        unscale.multiply_(grads, scale / scaler.scale)


def _clips_each_by_itself(optimizer: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    norms = [torch.nn.utils.clip_grad_norm_([p], max_norm, norm_type) for p in xamp.master_params(optimizer)]
    return torch.stack(norms).max()


def _steps_by_the_first_group(self: OptimizerState, *args: Any) -> Any:
    groups = self.optimizer.param_groups
    rates = [group["lr"] for group in groups]
    for group in groups:
        group["lr"] = rates[0]
    try:
        return _run(self, *args)
    finally:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate


def _no_master(self: Engine, state: OptimizerState, group: Any) -> None:
    """A group that is added is stepped in half precision."""
    state.fused.switch_on(state.optimizer)
    self._read_groups(state)


def _fills_in_zeros(self: Gradients, *args: Any) -> None:
    """What has no gradient gets one of zeros."""
    _unscale(self, *args)
    for param in self.params.stepped:
        if param.grad is None:
            param.grad = torch.zeros_like(param)


def _returns_nothing(self: OptimizerState, *args: Any) -> None:
    _run(self, *args)


def _skip_is_no_step(base: Any) -> Callable[..., Any]:
    """After a skipped step the scheduler warns that it is called too early."""
    inner = _step_of(base)

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = inner(self, *args, **kwargs)
        self._opt_called = self._xamp.state.outcomes.last is not StepOutcome.SKIPPED
        return result

    step.hooked = step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return step


def _not_the_masters(base: Any) -> Callable[..., Any]:
    """``zero_grad`` clears the parameters that stayed fp32, and forgets the others with their masters."""
    inner = _zero_grad_of(base)

    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        if not self._xamp.state.gradients.params.pairs:
            inner(self, *args, **kwargs)
        for param in self._xamp.state.gradients.params.without_master:
            param.grad = None

    return zero_grad


def _fresh_classes(name: str, new: Any) -> Any:
    """Breaks a method of the managed optimizers, whose classes are made once."""
    return also(
        patched(optimizer, name, new),
        lambda: mock.patch.object(optimizer, "_subclasses", weakref.WeakValueDictionary()),
    )


def _copies_of_sparse(grad: torch.Tensor) -> torch.Tensor:
    """What is written to the values of a sparse gradient is lost."""
    return grad._values().clone() if grad.is_sparse else grad


def _blind_to_sparse(grads: Any, found_inf: torch.Tensor, inverse: torch.Tensor, unscale_: Any) -> None:
    _unscale_by_group_([g for g in grads if not g.is_sparse], found_inf, inverse, unscale_)
    unscale.multiply_([g for g in grads if g.is_sparse], inverse)


def _as_if_all_went_well(self: ScaledLoss, *_: object) -> None:
    _exit(self, None)


def _rounds(self: Session) -> None:
    """Gives back what the model computed with, not what the optimizer stepped."""
    with torch.no_grad():
        for param, master in self.engine.weights.pairs:
            master.copy_(param)
    _close(self)


MUTANTS = [
    Mutant("masters are not written back", "optimizers.update_equals_plain", patched(masters, "copy_back", print)),
    Mutant(
        "steps with zeros on an overflow",
        "optimizers.skipped_step_changes_nothing",
        patched(Engine, "_decide", _zeroes_and_steps),
    ),
    Mutant(
        "a kernel ignores found_inf and is believed", "optimizers.fused_works_or_is_refused", _kernel_without_found_inf
    ),
    Mutant(
        "the fused implementation is never used",
        "optimizers.declared_form_is_used",
        patched(FusedChoice, "switch_on", lambda self, optimizer: None),
    ),
    Mutant(
        "a state says that xamp chose the fused implementation",
        "optimizers.declared_form_is_used",
        patched(FusedChoice, "as_before", lambda self, optimizer, groups: groups),
    ),
    Mutant(
        "the second optimizer is unscaled twice",
        "optimizers.two_optimizers_joint_loss_and_clip",
        patched(Engine, "leave", _unscales_the_second_again),
    ),
    Mutant(
        "one flag for all optimizers",
        "optimizers.overflow_in_one_of_two",
        patched(Engine, "_check", _one_flag_for_all),
    ),
    Mutant(
        "anybody's flag skips",
        "optimizers.overflow_in_one_of_two_losses",
        patched(DeviceState, "overflowed", _anybodys),
    ),
    Mutant(
        "unscales by the scale after the update",
        "optimizers.growth_between_two",
        patched(Engine, "_move_scales", _unscales_by_the_new_scale),
    ),
    Mutant(
        "clips each parameter by itself",
        "optimizers.clipping_sees_plain_gradients",
        patched(xamp, "clip_grad_norm_", _clips_each_by_itself),
    ),
    Mutant(
        "one learning rate for all groups",
        "optimizers.groups_keep_their_settings",
        patched(OptimizerState, "run", _steps_by_the_first_group),
    ),
    Mutant(
        "an added group gets no masters",
        "optimizers.group_added_in_the_middle",
        patched(Engine, "adopt_group", _no_master),
    ),
    Mutant(
        "zeros where there is no gradient",
        "optimizers.parameter_left_out",
        patched(Gradients, "unscale", _fills_in_zeros),
    ),
    Mutant(
        "divides by an eps of zero",
        "optimizers.eps_that_rounds_to_zero",
        patched(checks, "_check_eps", lambda *_: None),
    ),
    Mutant(
        "step(closure) loses the loss",
        "optimizers.closure",
        patched(OptimizerState, "run", _returns_nothing),
    ),
    Mutant(
        "a closure runs past the scale",
        "optimizers.closure_is_refused",
        patched(engine, "call_closure", lambda _, args, kwargs, **words: (args, kwargs)),
    ),
    Mutant(
        "a skipped step is none to a scheduler",
        "optimizers.scheduler",
        _fresh_classes("_step_of", _skip_is_no_step),
        error="UserWarning: Detected call of `lr_scheduler.step()`",
    ),
    Mutant(
        "sparse gradients stay scaled",
        "optimizers.sparse_gradients",
        patched(unscale, "values", _copies_of_sparse),
    ),
    Mutant(
        "sparse gradients are not looked at",
        "optimizers.sparse_overflow",
        patched(unscale, "unscale_by_group_", _blind_to_sparse),
    ),
    Mutant(
        "an exception is taken for a finished backward",
        "optimizers.exception_in_the_body",
        patched(ScaledLoss, "__exit__", _as_if_all_went_well),
    ),
    Mutant("zero_grad forgets the masters", "optimizers.zero_grad", _fresh_classes("_zero_grad_of", _not_the_masters)),
    Mutant("close gives back rounded weights", "optimizers.close_gives_back_fp32", patched(Session, "close", _rounds)),
]
