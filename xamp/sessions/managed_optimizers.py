"""Optimizers come under an engine: their fused form, masters in place of lowered parameters, and the way back."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef

from xamp.ground.undo import Undo
from xamp.scaling import masters
from xamp.scaling.engine import Engine
from xamp.scaling.fused import FusedForm
from xamp.scaling.optimizer import cast_state, manage, replace_params
from xamp.scaling.step import OptimizerState
from xamp.sessions import optimizer_checks

__all__ = ["fused_forms", "take_optimizers"]


def fused_forms(engine: Engine, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> list[FusedForm]:
    """Choose the fused form of each optimizer. If this raises, nothing has been changed yet."""
    policy = engine.policy
    choice = policy.fused if policy.checks or policy.master_weights or policy.fused is True else False
    names = engine.backend.capabilities(engine.device).fused_optimizers
    sparse = any(getattr(module, "sparse", False) is True for model in models for module in model.modules())

    def stepped(param: torch.Tensor) -> torch.dtype:
        """The dtype of what the optimizer will step: a half parameter gets a master in fp32."""
        return torch.float32 if policy.master_weights and param.dtype in masters.LOWER else param.dtype

    forms = [
        FusedForm(
            optimizer,
            choice,
            names if optimizer_checks.is_plain(optimizer, engine.backend) else (),
            sparse=sparse,
            stepped=stepped,
        )
        for optimizer in optimizers
    ]
    if policy.fused is True:  # what that cannot do is the nearer reason
        _check_forms(forms, optimizers)
    for optimizer in optimizers:
        optimizer_checks.check_stepped_rightly(optimizer, engine.backend, policy)
    _check_forms(forms, optimizers)
    return forms


def _check_forms(forms: Sequence[FusedForm], optimizers: Sequence[Optimizer]) -> None:
    for form, optimizer in zip(forms, optimizers, strict=True):
        form.check(optimizer)


def take_optimizers(engine: Engine, optimizers: Sequence[Optimizer], forms: Sequence[FusedForm], undo: Undo) -> None:
    """Put masters into the optimizers in place of lowered parameters, and let the engine run the steps."""
    states = []
    for index, (optimizer, form) in enumerate(zip(optimizers, forms, strict=True)):
        params = [p for group in optimizer.param_groups for p in group["params"]]
        alone = [TensorWeakRef(p) for p in params if not masters.is_lowered(p)]  # outside the models
        undo.steps.append(functools.partial(_forget_masters, alone))
        pairs = [(p, m) for p in params if (m := masters.ensure_master(p, engine.policy)) is not None]
        engine.masters.add(pairs)
        undo.steps.append(functools.partial(_back_to_model, weakref.ref(engine), weakref.ref(optimizer)))
        replace_params(optimizer, pairs)
        stepped = [m for _, m in pairs] or [p for p in params if p.dtype in masters.LOWER]
        undo.steps.append(cast_state(optimizer, stepped))
        undo.steps.append(functools.partial(_unfuse, form, weakref.ref(optimizer)))
        form.switch_on(optimizer)
        state = engine.state_class(engine, optimizer, index, form)
        undo.steps.append(manage(optimizer, state))
        states.append(state)
    undo.steps.append(functools.partial(_take_out_states, weakref.ref(engine), states, undo.before))
    engine.add_states(states)


# The engine keeps these functions to undo changes. It must not keep optimizers alive, so they hold them weakly.


def _back_to_model(engine: weakref.ref[Engine], optimizer: weakref.ref[Optimizer]) -> None:
    """Undo: the optimizer steps the model's parameters again, also in groups added since."""
    owner, found = engine(), optimizer()
    if owner is not None and found is not None:
        replace_params(found, [(m, p) for p, m in owner.pairs()])


def _forget_masters(params: Sequence[TensorWeakRef]) -> None:
    """Undo: parameters outside the models, which are in the lower dtype by themselves, have no masters."""
    for ref in params:
        if (param := ref()) is not None:
            masters.forget_lowered(param)


def _unfuse(form: FusedForm, optimizer: weakref.ref[Optimizer]) -> None:
    """Undo: the groups have again the ``fused`` that the user gave, and the state has the very step counters."""
    if (found := optimizer()) is not None:
        form.switch_off(found)


def _take_out_states(engine: weakref.ref[Engine], states: Sequence[OptimizerState], before: dict[Any, Any]) -> None:
    """Undo, where the call failed: the engine does not know these. One that was closed still tells its counts."""
    if before and (owner := engine()) is not None:
        owner.remove_states(states)
