"""Models and optimizers, which were checked, are put under a policy: all of them or nothing."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef

from xamp.casting import ops
from xamp.contract import Backend
from xamp.errors import StateError
from xamp.policy import Policy
from xamp.scaling import masters
from xamp.scaling.engine import Engine
from xamp.scaling.fused import FusedChoice
from xamp.scaling.optimizer import Managed, manage
from xamp.scaling.param_groups import cast_state, replace_params
from xamp.scaling.step import OptimizerState
from xamp.sessions import checks, lowering
from xamp.sessions.averaged_models import serve_averaged_models
from xamp.sessions.foreign import unwrap
from xamp.sessions.pickles import serve_pickles
from xamp.sessions.session import forget_sessions, register
from xamp.sessions.torch_states import serve_torch_states
from xamp.values import followers
from xamp.values.log import say
from xamp.values.undo import Undo

__all__ = ["Arguments", "add_optimizers", "attach", "fused_choices", "set_up"]


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The arguments of ``initialize`` besides the policy; ``undo`` takes back what the call has changed so far."""

    given: list[nn.Module]
    optimizers: list[Optimizer]
    verbosity: int
    process_group: Any = None
    undo: Undo = dataclasses.field(default_factory=Undo)

    @property
    def models(self) -> list[nn.Module]:
        """The models without their wrappers."""
        return [unwrap(model) for model in self.given]

    @property
    def objects(self) -> list[object]:
        """All objects for which ``xamp.session`` finds the session."""
        return [*self.given, *self.models, *self.optimizers]


def set_up(
    policy: Policy, backend: Backend, device: torch.device, arguments: Arguments, make: type[Engine] = Engine
) -> Engine:
    """Put models and optimizers, which were checked, under ``policy``. Where it raises, the caller unwinds the list.

    ``device`` is that of the loss scale; ``make`` the class of the engine.
    """
    fp8 = importlib.import_module("xamp.sessions.fp8_layers") if policy.fp8 else None
    choice = fp8.choose(arguments.models, policy) if fp8 else None
    casts = lowering.ModelCasts(arguments.models, policy, backend, device, make.caster())
    engine = make(
        policy,
        backend,
        device,
        arguments.models,
        undo=arguments.undo,
        process_group=arguments.process_group,
        verbosity=arguments.verbosity,
        regions=functools.partial(_regions, device.type, policy.level, policy.dtype),
    )
    engine.numbers.prepare(len(arguments.optimizers))
    choices = fused_choices(engine, arguments.models, arguments.optimizers)
    if policy.autocast:
        ops.named(policy.op_policy).install(device.type, backend)
    if choice:
        choice.prepare(engine)
    undo = arguments.undo
    undo.weakly(forget_sessions, engine)
    if policy.autocast:
        undo.steps.append(ops.hold(policy.op_policy, engine))
    if policy.casts_parameters:
        serve_pickles(casts.low_precision)
    casts.apply(undo, choice.modules if choice else ())
    if casts.low_precision:
        serve_averaged_models()
    if casts.low_precision and policy.master_weights:
        serve_torch_states()
    for model in arguments.models if policy.casts_parameters else ():
        followers.register(model, engine.before_forward, engine.may_be_behind, engine.follow_afresh)
    add_optimizers(engine, arguments.optimizers, choices, undo)
    register(engine, arguments.objects)
    if arguments.verbosity > 0:
        _tell_buffers(casts, policy)
    return engine


@functools.cache
def _regions(*session: Any) -> Any:
    from xamp.casting.outside import Regions  # no loop without regions around it needs them

    return Regions(*session)


def _tell_buffers(casts: lowering.ModelCasts, policy: Policy) -> None:
    rounded, counts = casts.doubtful_buffers()
    dtype = str(policy.dtype).removeprefix("torch.")
    if rounded:
        say(
            "level %s rounds buffers that were computed in fp32 to %s: %s. Tables of positions and frequencies lose "
            "digits that count. keep_fp32=[the module's class] keeps such a module in fp32.",
            *(policy.level, dtype, _some(rounded)),
            level=logging.WARNING,
        )
    if counts and policy.dtype is not None:
        say(
            "level %s casts buffers that may be counts or running sums to %s: %s. If one counts steps, it stops at %d; "
            "if it averages, small changes are lost. keep_fp32=[the module's class] keeps such a module in fp32; a "
            "buffer without a dimension, torch.tensor(0.0), stays fp32 anyway.",
            *(policy.level, dtype, _some(counts), round(2 / torch.finfo(policy.dtype).eps)),
            level=logging.WARNING,
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def attach(engine: Engine, policy: Policy, arguments: Arguments) -> None:
    """Add optimizers to a session that was made for inference, as for an optimizer made after the model was cast."""
    if policy != engine.policy:
        raise StateError(
            f"initialize: this model was given to initialize before, as [{engine.policy}], and is now asked for as "
            f"[{policy}]. Ask for the same, or call xamp.session(model).close() first."
        )
    checks.check_optimizers(arguments.optimizers, arguments.models, policy)
    checks.check_not_sharded_since(arguments.optimizers, policy)
    engine.numbers.prepare(len(arguments.optimizers))
    choices = fused_choices(engine, arguments.models, arguments.optimizers)
    undo = arguments.undo
    added = [weakref.ref(optimizer) for optimizer in arguments.optimizers]
    undo.weakly(functools.partial(forget_sessions, objects=added), engine)
    engine.undo.steps.append(undo.unwind)  # the list is empty, and this does nothing, where the call fails
    engine.undo.preparing.append(undo.prepare)
    add_optimizers(engine, arguments.optimizers, choices, undo)
    register(engine, arguments.objects)


# ---------------------------------------------------------------- optimizers come under the engine, and go back


def fused_choices(engine: Engine, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> list[FusedChoice]:
    """Choose the fused implementation of each optimizer. If this raises, nothing has been changed yet."""
    policy = engine.policy
    setting = policy.fused if policy.checks or policy.master_weights or policy.fused != "auto" else False
    names = engine.backend.capabilities(engine.device).fused_optimizers
    sparse = any(getattr(module, "sparse", False) is True for model in models for module in model.modules())

    def stepped(param: torch.Tensor) -> torch.dtype:
        """The dtype of what the optimizer will step: a half parameter, of a level with masters, gets one."""
        return torch.float32 if param.dtype in masters.LOWER else param.dtype

    choices = []
    for optimizer in optimizers:
        usable = names if checks.has_usual_format(optimizer, engine.backend) else ()
        choice = FusedChoice(optimizer, setting, usable, sparse=sparse, stepped=stepped)
        choices.append(choice)
        if policy.fused is True:  # what that cannot do is the nearer reason
            choice.check(optimizer)
        checks.check_stepped_rightly(optimizer, engine.backend, policy)
        choice.check(optimizer)
    return choices


def add_optimizers(engine: Engine, optimizers: Sequence[Optimizer], choices: Sequence[FusedChoice], undo: Undo) -> None:
    """Put masters into the optimizers in place of low-precision parameters, and let the engine run the steps."""
    states = []
    for index, (optimizer, choice) in enumerate(zip(optimizers, choices, strict=True)):
        params = [p for group in optimizer.param_groups for p in group["params"]]
        alone = [TensorWeakRef(p) for p in params if not masters.is_low_precision(p)]  # outside the models
        undo.steps.append(functools.partial(_forget_masters, alone))
        pairs = [(p, m) for p in params if (m := masters.ensure_master(p, engine.policy)) is not None]
        engine.weights.add(pairs)
        undo.weakly(_back_to_model, engine, optimizer)
        replace_params(optimizer, pairs)
        stepped = [m for _, m in pairs] or [p for p in params if p.dtype in masters.LOWER]
        undo.steps.append(cast_state(optimizer, stepped))
        undo.weakly(choice.switch_off, optimizer)
        choice.switch_on(optimizer)
        state = engine.make_state(optimizer, index, choice)
        undo.steps.append(manage(optimizer, Managed(engine, state)))
        states.append(state)
    undo.weakly(functools.partial(_remove_states, states, undo.before), engine)
    engine.add_states(states)


def _back_to_model(engine: Engine, optimizer: Optimizer) -> None:
    """Undo: the optimizer steps the model's parameters again, also in groups added since."""
    replace_params(optimizer, [(m, p) for p, m in engine.weights.pairs])


def _forget_masters(params: Sequence[TensorWeakRef]) -> None:
    """Undo: parameters outside the models, which are in the lower dtype by themselves, have no masters."""
    for ref in params:
        if (param := ref()) is not None:
            masters.forget_low_precision(param)


def _remove_states(states: Sequence[OptimizerState], before: dict[Any, Any], engine: Engine) -> None:
    """Undo, where the call failed: the engine does not know these. One that was closed still tells its counts."""
    if before:
        engine.remove_states(states)
