"""Models and optimizers, which were checked, are put under a policy: all of them or nothing.

How to undo a change is listed before it is made, in the :class:`~xamp.ground.undo.Undo` of the call.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from xamp.casting import ops
from xamp.contract import Backend
from xamp.errors import StateError
from xamp.ground.log import say
from xamp.ground.undo import Undo
from xamp.policy import Policy
from xamp.scaling import followers
from xamp.scaling.engine import Engine
from xamp.sessions import lowering, optimizer_checks
from xamp.sessions.averaged_model import serve_averaged_models
from xamp.sessions.managed_optimizers import fused_forms, take_optimizers
from xamp.sessions.session import forget_sessions, register
from xamp.sessions.torch_states import serve_torch_states
from xamp.sessions.wrappers import unwrap

__all__ = ["Arguments", "attach", "set_up"]


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What ``initialize`` was given besides the policy.

    Attributes:
        undo: takes back what the call has changed so far.
    """

    given: list[nn.Module]
    optimizers: list[Optimizer]
    backend: str
    process_group: Any
    delegate: bool
    verbosity: int
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
    """Put models and optimizers, which were checked, under ``policy``: all of them or nothing.

    Args:
        policy: the policy, complete and checked.
        backend: the backend of the device.
        device: the device for the loss scale.
        arguments: the models and optimizers, and the other arguments of ``initialize``.
        make: the class of the engine.
    """
    saturates = backend.capabilities(device).overflow == "flag"
    plan = lowering.plan(
        *(arguments.models, policy, device.type),
        saturates=saturates,
        cast=make.cast,
        plain=backend.plain,
        join=backend.join_weights_,
    )
    engine = make(
        policy, backend, device, arguments.models, process_group=arguments.process_group, verbosity=arguments.verbosity
    )
    engine.prepare_state(len(arguments.optimizers))
    forms = fused_forms(engine, arguments.models, arguments.optimizers)
    if policy.autocast:
        ops.named(policy.op_policy).install(device.type, backend)
    engine.undo = undo = arguments.undo
    try:
        undo.steps.append(functools.partial(forget_sessions, weakref.ref(engine)))
        if policy.autocast:
            undo.steps.append(ops.hold(policy.op_policy, engine))
        plan.apply(undo)
        if plan.lowered:
            serve_averaged_models()
        if plan.lowered and policy.master_weights:
            serve_torch_states()
        for model in arguments.models if policy.master_weights else ():
            followers.follow(model, engine.masters)
        take_optimizers(engine, arguments.optimizers, forms, undo)
        rounded, counts = plan.doubtful_buffers() if arguments.verbosity > 0 else ([], [])
        register(engine, arguments.objects)
        _tell_buffers(rounded, counts, policy)
        return engine
    except BaseException:
        undo.unwind()
        raise


def _tell_buffers(rounded: Sequence[str], counts: Sequence[str], policy: Policy) -> None:
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
    optimizer_checks.check_optimizers(arguments.optimizers, arguments.models, policy)
    optimizer_checks.check_not_sharded_since(arguments.optimizers, policy)
    engine.prepare_state(len(arguments.optimizers))
    forms = fused_forms(engine, arguments.models, arguments.optimizers)
    undo = arguments.undo
    added = [weakref.ref(optimizer) for optimizer in arguments.optimizers]
    undo.steps.append(functools.partial(forget_sessions, weakref.ref(engine), added))
    engine.undo.steps.append(undo.unwind)  # the list is empty, and this does nothing, where the call fails
    engine.undo.preparing.append(undo.prepare)
    take_optimizers(engine, arguments.optimizers, forms, undo)
    register(engine, arguments.objects)
