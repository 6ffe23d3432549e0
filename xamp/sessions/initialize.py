"""``initialize``: look at everything, refuse what cannot be right, then change all of it or nothing.

The way of a call: normalise the arguments (:class:`Arguments`) -> find the device and its backend -> compile the
:class:`~xamp.policy.Policy` -> check models and optimizers against it -> plan and allocate -> apply, with every change
on an exit stack that a failure unwinds at once and ``session.close()`` later.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import pkgutil
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from xamp.casting import ops
from xamp.contract import Backend, BackendSpec
from xamp.errors import PolicyError, StateError, UnsupportedPolicy
from xamp.ground.arguments import boolean, number_between
from xamp.ground.log import say
from xamp.policy import LEVELS, Level, Policy, Request, best_level, compile_policy, parse_level
from xamp.registry import device_in_use, registry
from xamp.registry.spellings import SPELLINGS
from xamp.scaling import masters
from xamp.scaling.engine import Engine
from xamp.scaling.fused import FusedForm
from xamp.scaling.optimizer import cast_state, manage, replace_params
from xamp.sessions import checks, lowering
from xamp.sessions.session import register

__all__ = ["Arguments", "initialize", "set_up"]

DELEGATES = {"apex": "xamp.apex._delegate:hand_over"}
"""By what ``backend=`` says, ``"module:function"`` of what ``delegate=True`` hands the work over to.

The function takes the policy, the backend, the device of the first parameter and :class:`Arguments`, and registers the
engine of the session that it returns.
"""

_SHAPING = tuple(field.name for field in dataclasses.fields(Request))


def initialize(
    models: Any,
    optimizers: Any = None,
    level: str = Request.level,
    *,
    backend: str = "auto",
    loss_scale: float | str | None = Request.loss_scale,
    dtype: torch.dtype | str | None = Request.dtype,
    keep_batchnorm_fp32: bool | str | None = Request.keep_batchnorm_fp32,
    keep_fp32: Iterable[type | str] = Request.keep_fp32,
    master_weights: bool | str | None = Request.master_weights,
    cast_model_outputs: torch.dtype | str | bool | None = Request.cast_model_outputs,
    methods: Sequence[str] = Request.methods,
    num_losses: int = Request.num_losses,
    init_scale: float = Request.init_scale,
    growth_factor: float = Request.growth_factor,
    backoff_factor: float = Request.backoff_factor,
    growth_interval: int = Request.growth_interval,
    min_loss_scale: float | None = Request.min_loss_scale,
    max_loss_scale: float | None = Request.max_loss_scale,
    on_static_overflow: str | None = Request.on_static_overflow,
    op_policy: str = Request.op_policy,
    fused: bool | str = Request.fused,
    process_group: Any = None,
    delegate: bool | str = False,
    enabled: bool | str = True,
    verbosity: int | str = 1,
    opt_level: str | None = None,
) -> Any:
    """Put models and their optimizers under a precision level.

    Args:
        models: an ``nn.Module`` with fp32 parameters, or a list or tuple of them.
        optimizers: a ``torch.optim.Optimizer`` over their parameters, a list or tuple, or None for inference.
        level: ``"O0"`` to ``"O5"``, an alias, or ``"auto"``: O4 where bf16 is native, else O1 where fp16 is, else O0.
        backend: its name, or ``"auto"``: ``XAMP_BACKEND``, else by the device type of the parameters. ``"apex"`` is
            the device's own with the op policy of NVIDIA's Apex.
        loss_scale: ``"dynamic"`` or a static number, also as a string; None: the level's.
        dtype: fp16 or bf16 in place of the level's.
        keep_batchnorm_fp32: at O2, O3 and O5, whether batch norm stays fp32; None: the level's.
        keep_fp32: module classes, qualified names or glob patterns of modules that stay fp32 at every level.
        master_weights: at O2, O3 and O5, whether the optimizer steps fp32 masters; None: the level's.
        cast_model_outputs: dtype of floating outputs; None: fp32; False: as they come.
        methods: methods of the models that run under the policy, besides ``forward``.
        num_losses: how many loss scales; ``scale_loss(..., loss_id=i)`` chooses.
        init_scale: dynamic scale at the start.
        growth_factor: what the scale is multiplied by after ``growth_interval`` clean updates.
        backoff_factor: what it is multiplied by on an overflow.
        growth_interval: number of clean updates in a row, then it grows.
        min_loss_scale: floor of the dynamic scale.
        max_loss_scale: its ceiling.
        on_static_overflow: under a static scale, ``"skip"`` checks gradients and skips an overflowed step, ``"step"``
            never checks; None: ``"skip"``, but a static scale of 1.0 is not checked.
        op_policy: which operator runs in which dtype at O1 and O4: ``"portable"`` is one table for every device,
            ``"native"`` the device's own list, ``"apex"`` the lists of Apex (of backend ``"apex"``, and its default).
        fused: ``"auto"`` uses an optimizer's fused form where it is right and the user left the choice open.
        process_group: ranks that decide together whether to skip; None: the default group where there is one.
        delegate: hand over to another implementation, where the backend has one.
        enabled: False: nothing is changed, and everything else of xamp does nothing.
        verbosity: 0 is silent, 1 logs the effective setting and overflows, and at O0 warns of what takes digits from
            fp32 on this device.
        opt_level: Apex's name for ``level``.

    Returns:
        ``models``, or ``(models, optimizers)`` where optimizers were given: the very same objects, in the same shape.

    Raises:
        PolicyError: an argument that cannot be right. UnsupportedPolicy: this device or model cannot do it.
        BackendUnavailable: no usable backend of that name or for that device.
        StateError: a model or optimizer is in a session, or in a wrapper that must come later.
        In every case models and optimizers are as they were.
    """
    given = locals()
    if torch.is_inference_mode_enabled() and optimizers is not None:
        raise StateError(
            "initialize: called under torch.inference_mode(), where no tensor that is made can be trained. Call it "
            "outside."
        )
    spelt = int(verbosity) if isinstance(verbosity, bool) else verbosity
    loudness = int(number_between("verbosity", spelt, -1, math.inf, whole=True))
    if not isinstance(backend, str):
        raise PolicyError(f"initialize(backend={backend!r}): must be a backend's name, or 'auto'.")
    request = Request(**{name: given[name] for name in _SHAPING if name != "level"}, level=_level_of(level, opt_level))
    model_list: list[nn.Module] = checks.as_list("models", models, nn.Module)  # type: ignore[assignment]
    given_optimizers = [] if optimizers is None else optimizers
    optimizer_list: list[Optimizer] = checks.as_list("optimizers", given_optimizers, Optimizer)  # type: ignore[assignment]
    if not model_list:
        raise PolicyError("initialize(models=[]): there is no model. Pass one nn.Module or a list of them.")
    delegated = bool(boolean("delegate", delegate))
    arguments = Arguments(model_list, optimizer_list, backend, process_group, delegated, loudness)
    if boolean("enabled", enabled) is not False:
        _set_up(request, arguments)
    else:
        _set_up_disabled(arguments)
    return models if optimizers is None else (models, optimizers)


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What ``initialize`` was given besides the policy."""

    given: list[nn.Module]
    optimizers: list[Optimizer]
    backend: str
    process_group: Any
    delegate: bool
    verbosity: int

    @property
    def models(self) -> list[nn.Module]:
        """The models inside their wrappers."""
        return [checks.unwrap(model) for model in self.given]

    @property
    def objects(self) -> list[object]:
        """Everything that leads to the session."""
        return [*self.given, *self.models, *self.optimizers]


def _level_of(level: object, opt_level: object) -> object:
    if opt_level is None or opt_level == level:
        return level
    if level != Request.level:
        raise PolicyError(
            f"initialize(level={level!r}, opt_level={opt_level!r}): two names for one thing that say different things. "
            "Give level."
        )
    return opt_level


def _set_up(request: Request, arguments: Arguments) -> None:
    level = parse_level(request.level)
    if level is not None:  # arguments that are wrong everywhere are refused before any backend is asked
        compile_policy(request, level, tuple(ops.OP_POLICIES))
    existing = checks.check_not_initialized(arguments.models, arguments.optimizers)
    device = checks.device_of(arguments.models, arguments.optimizers) or device_in_use.device()
    backend = registry.resolve(arguments.backend, device.type)
    own_op_policy = SPELLINGS.get(backend.name)
    if own_op_policy is not None and request.op_policy == Request.op_policy:
        request = dataclasses.replace(request, op_policy=own_op_policy)
    policy = compile_policy(request, level or _best_level(backend, device), tuple(ops.OP_POLICIES))
    checks.check_capabilities(backend, device, policy)
    checks.check_op_policy(backend, device, policy)
    hand_over = _delegate_of(backend) if arguments.delegate else None
    if existing is not None:
        _attach(existing, policy, arguments)
        return
    checks.check_models(arguments.models, arguments.given, policy)
    checks.check_optimizers(arguments.optimizers, arguments.models, policy)
    narrowed = _less_than_fp32(backend, device) if arguments.verbosity and policy.level == "O0" else []
    if hand_over is not None:
        hand_over(policy, backend, device, arguments)
    else:
        set_up(policy, backend, device, arguments)
    if arguments.verbosity:
        say("%s, backend %s on %s", policy, backend.name, device)
    for line in narrowed:
        say("%s", line, level=logging.WARNING)


def _delegate_of(backend: Backend) -> Callable[[Policy, Backend, torch.device, Arguments], object]:
    """The function that hands models and optimizers to another implementation, named in :data:`DELEGATES`.

    Raises:
        UnsupportedPolicy: there is none for ``backend``.
    """
    target = DELEGATES.get(backend.name)
    if target is None:
        raise UnsupportedPolicy(
            f"initialize(delegate=True): backend {backend.name!r} has nothing to hand over to. Leave delegate out."
        )
    found: Callable[[Policy, Backend, torch.device, Arguments], object] = pkgutil.resolve_name(target)
    return found


def set_up(
    policy: Policy, backend: Backend, device: torch.device, arguments: Arguments, make: type[Engine] = Engine
) -> Engine:
    """Put models and optimizers that were found good under ``policy``: all of them or nothing.

    Args:
        policy: complete and checked.
        backend: of the device.
        device: where the loss scale is to live.
        arguments: what is put under it.
        make: what runs their steps.
    """
    saturates = backend.capabilities(device).overflow == "flag"
    plan = lowering.plan(
        arguments.models, policy, device.type, saturates=saturates, cast=make.cast, plain=backend.plain
    )
    engine = make(
        policy, backend, device, arguments.models, process_group=arguments.process_group, verbosity=arguments.verbosity
    )
    engine.prepare_state(len(arguments.optimizers))
    forms = _fused_forms(engine, arguments)
    if policy.autocast:
        ops.named(policy.op_policy).install(device.type, backend)
    with contextlib.ExitStack() as undo:
        if policy.autocast:
            undo.callback(ops.hold(policy.op_policy, engine))
        plan.apply(undo)
        _take_optimizers(engine, arguments.optimizers, forms, undo)
        plan.commit()
        engine.undo = undo.pop_all()
    register(engine, arguments.objects)
    return engine


def _less_than_fp32(backend: Backend, device: torch.device) -> list[str]:
    """What makes O0 other than plain fp32 here, a line each: who compares a level with it should know."""
    rows = [row for row in backend.precision_settings(device) if row.narrows_fp32 or not row.expected]
    return [
        f"O0 on {device}: {row.name} is {row.value}: {row.effect}; to undo: {row.undo}"
        + (", or xamp.exact_fp32()" if row.exact else "")
        for row in rows
    ]


def _best_level(backend: Backend, device: torch.device) -> Level:
    """What ``"auto"`` means on ``device``."""
    return best_level(backend.capabilities(device).fast_dtypes)


def _attach(engine: Engine, policy: Policy, arguments: Arguments) -> None:
    """Give optimizers to a session that was made for inference: an optimizer built after the model was cast."""
    if policy != engine.policy:
        raise StateError(
            f"initialize: this model was given to initialize before, as [{engine.policy}], and is now asked for as "
            f"[{policy}]. Ask for the same, or call xamp.session(model).close() first."
        )
    checks.check_optimizers(arguments.optimizers, arguments.models, policy)
    engine.prepare_state(len(arguments.optimizers))
    forms = _fused_forms(engine, arguments)
    with contextlib.ExitStack() as undo:
        _take_optimizers(engine, arguments.optimizers, forms, undo)
        engine.undo.push(undo.pop_all())
    register(engine, arguments.objects)


def _fused_forms(engine: Engine, arguments: Arguments) -> list[FusedForm]:
    """The choice of the fused form for each optimizer; raises before anything is changed."""
    policy = engine.policy
    for optimizer in arguments.optimizers:
        checks.check_stepped_rightly(optimizer, engine.backend, policy)
    choice = policy.fused if policy.checks or policy.master_weights or policy.fused is True else False
    names = engine.backend.capabilities(engine.device).fused_optimizers
    sparse = any(getattr(module, "sparse", False) is True for model in arguments.models for module in model.modules())
    forms = [
        FusedForm(optimizer, choice, names if checks.is_plain(optimizer, engine.backend) else (), sparse=sparse)
        for optimizer in arguments.optimizers
    ]
    for form, optimizer in zip(forms, arguments.optimizers, strict=True):
        form.check(optimizer)
    return forms


def _take_optimizers(
    engine: Engine, optimizers: Sequence[Optimizer], forms: Sequence[FusedForm], undo: contextlib.ExitStack
) -> None:
    """Put masters in the optimizers' places and let the engine run their steps."""
    states = []
    for index, (optimizer, form) in enumerate(zip(optimizers, forms, strict=True)):
        params = [p for group in optimizer.param_groups for p in group["params"]]
        pairs = [(p, m) for p in params if (m := masters.ensure_master(p, engine.policy)) is not None]
        engine.add_pairs(pairs)
        undo.callback(_back_to_model, weakref.ref(engine), weakref.ref(optimizer))
        replace_params(optimizer, pairs)
        stepped = [m for _, m in pairs] or [p for p in params if p.dtype in masters.LOWER]
        undo.callback(cast_state(optimizer, stepped))
        undo.callback(_unfuse, form, weakref.ref(optimizer))
        form.switch_on(optimizer)
        state = engine.state_class(engine, optimizer, index, form)
        undo.callback(manage(optimizer, state))
        states.append(state)
    engine.add_states(states)


# What undoes a change is kept by the engine, which must not keep models or optimizers alive: it holds them weakly.


def _back_to_model(engine: weakref.ref[Engine], optimizer: weakref.ref[Optimizer]) -> None:
    """Undo: the optimizer steps the model's parameters again, also those of groups added since."""
    owner, found = engine(), optimizer()
    if owner is not None and found is not None:
        replace_params(found, [(m, p) for p, m in owner.pairs()])


def _unfuse(form: FusedForm, optimizer: weakref.ref[Optimizer]) -> None:
    """Undo: the groups say what they said before."""
    if (found := optimizer()) is not None:
        form.switch_off(found)


def _set_up_disabled(arguments: Arguments) -> None:
    """A session in which everything works and does nothing."""
    checks.check_not_initialized(arguments.models, arguments.optimizers)
    device = next((p.device for model in arguments.models for p in model.parameters()), torch.device(registry.HOST))
    policy = compile_policy(Request(), LEVELS["O0"], tuple(ops.OP_POLICIES))
    backend = Backend(BackendSpec("disabled", (device.type,), "xamp.contract:Backend"))
    engine = Engine(policy, backend, device, arguments.models, verbosity=0, enabled=False)
    register(engine, arguments.objects)
