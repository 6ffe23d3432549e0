"""``initialize``: check everything first, then change all of it or nothing.

The steps of a call: normalise the arguments (:class:`Arguments`) -> find the device and its backend -> compile the
:class:`~xamp.policy.Policy` -> check models and optimizers against it -> plan and allocate -> apply. How to undo a
change is listed before it is made (:class:`~xamp.ground.undo.Undo`). A failure, or Ctrl-C before the call has returned,
unwinds the list at once, ``session.close()`` later.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import pkgutil
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import nn
from torch.optim import Optimizer

from xamp.casting import ops
from xamp.contract import Backend, BackendSpec
from xamp.errors import PolicyError, StateError, UnsupportedPolicy
from xamp.ground.arguments import boolean, number_between
from xamp.ground.log import say
from xamp.ground.shown import shown
from xamp.ground.undo import Undo
from xamp.policy import Level, Policy, Request, Unsaid, best_level, compile_policy, parse_level
from xamp.registry import device_in_use, registry
from xamp.registry.spellings import SPELLINGS
from xamp.scaling import distributed, masters
from xamp.scaling.engine import Engine
from xamp.scaling.fused import FusedForm
from xamp.scaling.optimizer import cast_state, manage, replace_params
from xamp.scaling.step import OptimizerState
from xamp.sessions import checks, lowering
from xamp.sessions.averaged_model import serve_averaged_models
from xamp.sessions.session import forget_sessions, register
from xamp.sessions.torch_states import serve_torch_states
from xamp.sessions.typed import LevelName, Models, OneModel, OneOptimizer, Optimizers, Settings
from xamp.sessions.wrappers import unwrap

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Arguments", "initialize", "set_up"]

DELEGATES = {"apex": "xamp.apex._delegate:hand_over"}
"""For each value of ``backend=``: the function, as ``"module:function"``, to which ``delegate=True`` hands the work.

The function takes the policy, the backend, the device of the first parameter and :class:`Arguments`. It registers the
engine of the session and returns it.
"""

_SHAPING = tuple(field.name for field in dataclasses.fields(Request))


# Lists have overloads of their own: mypy would take those of `(a, b), (c, d) = initialize([a, b], [c, d])` for tuples.
@overload
def initialize(
    models: list[OneModel], optimizers: None = None, level: LevelName | str = ..., **settings: Unpack[Settings]
) -> list[OneModel]: ...


@overload
def initialize(
    models: Models, optimizers: None = None, level: LevelName | str = ..., **settings: Unpack[Settings]
) -> Models: ...


@overload
def initialize(
    models: list[OneModel], optimizers: list[OneOptimizer], level: LevelName | str = ..., **settings: Unpack[Settings]
) -> tuple[list[OneModel], list[OneOptimizer]]: ...


@overload
def initialize(  # type: ignore[overload-overlap]  # of two lists, which the one above takes
    models: list[OneModel], optimizers: Optimizers, level: LevelName | str = ..., **settings: Unpack[Settings]
) -> tuple[list[OneModel], Optimizers]: ...


@overload
def initialize(
    models: Models, optimizers: list[OneOptimizer], level: LevelName | str = ..., **settings: Unpack[Settings]
) -> tuple[Models, list[OneOptimizer]]: ...


@overload
def initialize(
    models: Models, optimizers: Optimizers, level: LevelName | str = ..., **settings: Unpack[Settings]
) -> tuple[Models, Optimizers]: ...


def initialize(
    models: Any,
    optimizers: Any = None,
    level: LevelName | str = Request.level,
    *,
    backend: str = "auto",
    loss_scale: float | str | None = Request.loss_scale,
    dtype: torch.dtype | str | None = Request.dtype,
    keep_batchnorm_fp32: bool | str | None = Request.keep_batchnorm_fp32,
    keep_fp32: Iterable[type | str] = Request.keep_fp32,
    master_weights: bool | str | None = Request.master_weights,
    cast_model_inputs: bool | str | type | Iterable[type | str] = Request.cast_model_inputs,
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
    opt_level: LevelName | str | None = None,
) -> Any:
    """Put models and their optimizers under a precision level. Changes them in place.

    ::

        model, optimizer = xamp.initialize(model, optimizer, level="O2")
        with xamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()

    Move the models to their device and make the optimizers before the call. At O2, O3 and O5 wrap the models in
    DistributedDataParallel after it. Shard with FSDP, or parallelize, before it (not at O3). A call that raises leaves
    models and optimizers as they were. The levels mean::

        level            parameters  operators           masters  batch norm     loss scale
        O0 ("fp32")      fp32        fp32                no       fp32           1.0
        O1 ("amp-fp16")  fp32        fp16, by op_policy  no       by op_policy   dynamic
        O2               fp16        fp16                fp32     fp32           dynamic
        O3 ("fp16")      fp16        fp16                no       fp16           1.0
        O4 ("amp-bf16")  fp32        bf16, by op_policy  no       by op_policy   1.0
        O5               bf16        bf16                fp32     fp32           1.0

    Args:
        models: an ``nn.Module`` with fp32 parameters, or a list or tuple of modules. O5 takes bf16 parameters too, O2
            fp16 ones.
        optimizers: a ``torch.optim.Optimizer`` over the models' parameters, or a list or tuple of optimizers. None:
            inference.
        level: a level or its alias, see above. ``"auto"``: O4 where the device has native bf16, else O1 where it has
            native fp16, else O0.
        backend: the name of a backend. ``"auto"``: the environment variable ``XAMP_BACKEND``, else the backend for the
            parameters' device. ``"apex"``: the backend for that device, with the op policy of NVIDIA's Apex.
        loss_scale: ``"dynamic"``, or a number (also as a string) for a static scale. None: the level's default.
        dtype: fp16 or bf16, to use it instead of the level's lower dtype.
        keep_batchnorm_fp32: whether batch norm stays fp32 at O2, O3 and O5. None: the level's default.
        keep_fp32: module classes, qualified names or glob patterns of modules that stay fp32 at every level.
        master_weights: whether the optimizer steps fp32 master weights at O2, O3 and O5. None: the level's default.
        cast_model_inputs: whether floating arguments of the models are cast at O0, O2, O3 and O5: tensors, also in
            tuples, lists, dicts and dataclasses, but not in other objects. Names of arguments, and types, are not cast:
            ``("boxes", MyBatch)``.
        cast_model_outputs: the dtype to which floating outputs are cast. None: fp32. False: outputs are not cast.
        methods: names of the models' methods that run under the policy, besides ``forward``.
        num_losses: the number of loss scales. ``scale_loss(..., loss_id=i)`` chooses one.
        init_scale: the dynamic scale at the start.
        growth_factor: the scale is multiplied by it after ``growth_interval`` clean updates in a row.
        backoff_factor: the scale is multiplied by it after an overflow.
        growth_interval: the number of clean updates in a row after which the scale grows.
        min_loss_scale: the floor of the dynamic scale. None: the default.
        max_loss_scale: the ceiling of the dynamic scale. None: the default.
        on_static_overflow: what to do with an overflow under a static scale. ``"skip"``: check the gradients, and skip
            a step that overflowed. ``"step"``: do not check. None: ``"skip"``, but ``"step"`` for a scale of 1.0.
        op_policy: the table that says which operator runs in which dtype at O1 and O4. ``"portable"``: one table for
            all devices. ``"native"``: the device's own lists. ``"apex"``: the lists of Apex, for backend ``"apex"``
            only, where it is the default and nothing else is accepted.
        fused: ``"auto"``: use the fused form of an optimizer where it is right on this device and the user has not
            chosen a form. True: require the fused form. False: leave the optimizer as it is.
        process_group: the ranks that decide together whether to skip a step. None: those of the wrappers (DDP, FSDP,
            the mesh of a DTensor) that hold the parameters; without a wrapper the default group, if there is one.
        delegate: True: let another implementation do the work, such as Apex itself, where the backend has one.
        enabled: False: change nothing. All other calls to xamp for these models and optimizers then do nothing.
        verbosity: 0: log nothing. 1: log the effective policy and each overflow, and at O0 warn of settings that make
            fp32 less precise on this device.
        opt_level: Apex's name for ``level``.

    Returns:
        ``models``, or ``(models, optimizers)`` where optimizers were given: the same objects, in the same shape.

    Raises:
        PolicyError: an argument cannot be right.
        UnsupportedPolicy: this device or this model cannot do what was asked.
        BackendUnavailable: there is no usable backend of that name, or none for that device.
        StateError: a session manages a model or optimizer already, or a wrapper was put around a model too early, or
            the call is under ``torch.inference_mode()``.
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
        raise PolicyError(f"initialize(backend={shown(backend)}): must be a backend's name, or 'auto'.")
    request = Request(**{name: given[name] for name in _SHAPING if name != "level"}, level=_level_of(level, opt_level))
    model_list: list[nn.Module] = checks.as_list("models", models, nn.Module)  # type: ignore[assignment]
    given_optimizers = [] if optimizers is None else optimizers
    optimizer_list: list[Optimizer] = checks.as_list("optimizers", given_optimizers, Optimizer)  # type: ignore[assignment]
    if not model_list:
        raise PolicyError("initialize(models=[]): there is no model. Pass one nn.Module or a list of them.")
    delegated = bool(boolean("delegate", delegate))
    arguments = Arguments(model_list, optimizer_list, backend, process_group, delegated, loudness)
    undo = arguments.undo
    try:
        if boolean("enabled", enabled) is not False:
            _set_up(request, arguments)
        else:
            _set_up_disabled(arguments)
        # One line, so that the call is done when it returns: no Ctrl-C comes between the two.
        return (models if optimizers is None else (models, optimizers), undo.before.clear())[0]  # type: ignore[func-returns-value]
    except BaseException:
        undo.unwind()
        raise


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


def _level_of(level: object, opt_level: object) -> object:
    if opt_level is None or opt_level is level or (isinstance(opt_level, str) and opt_level == level):
        return level
    if not isinstance(level, str) or level != Request.level:
        raise PolicyError(
            f"initialize(level={shown(level)}, opt_level={shown(opt_level)}): two names for one thing that say "
            "different things. Give level."
        )
    return opt_level


def _set_up(request: Request, arguments: Arguments) -> None:
    level = parse_level(request.level)
    if level is not None:  # refuse arguments that are wrong on every device before a backend is loaded
        compile_policy(request, level, tuple(ops.OP_POLICIES))
    existing = checks.check_not_initialized(arguments.models, arguments.optimizers)
    device = checks.device_of(arguments.models, arguments.optimizers) or device_in_use.device()
    backend = registry.resolve(arguments.backend, device.type)
    own_op_policy = SPELLINGS.get(backend.name)
    if own_op_policy is not None and isinstance(request.op_policy, Unsaid):
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
    narrowed = _less_than_fp32(backend, device) if arguments.verbosity and policy.dtype == torch.float32 else []
    if hand_over is not None:
        hand_over(policy, backend, device, arguments)
    else:
        set_up(policy, backend, device, arguments)
    if arguments.verbosity:
        say("%s, backend %s on %s", policy, backend.name, device)
    for line in narrowed:
        say("%s", line, level=logging.WARNING)


def _delegate_of(backend: Backend) -> Callable[[Policy, Backend, torch.device, Arguments], object]:
    """Return the function of :data:`DELEGATES` that hands models and optimizers to another implementation.

    Raises:
        UnsupportedPolicy: ``backend`` has no such function.
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
        arguments.models, policy, device.type, saturates=saturates, cast=make.cast, plain=backend.plain
    )
    engine = make(
        policy, backend, device, arguments.models, process_group=arguments.process_group, verbosity=arguments.verbosity
    )
    engine.prepare_state(len(arguments.optimizers))
    forms = _fused_forms(engine, arguments)
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
            masters.follow(model, engine.follow_masters)
        _take_optimizers(engine, arguments.optimizers, forms, undo)
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


def _less_than_fp32(backend: Backend, device: torch.device) -> list[str]:
    """List the settings that make O0 differ from plain fp32 on this device, one line each.

    A user who compares another level with O0 should know them.
    """
    rows = [row for row in backend.precision_settings(device) if row.narrows_fp32 or not row.expected]
    return [
        f"O0 on {device}: {row.name} is {row.value}: {row.effect}; to undo: {row.undo}"
        + (", or xamp.exact_fp32()" if row.exact else "")
        for row in rows
    ]


def _best_level(backend: Backend, device: torch.device) -> Level:
    """Return the level that ``"auto"`` means on ``device``."""
    return best_level(backend.capabilities(device).fast_dtypes)


def _attach(engine: Engine, policy: Policy, arguments: Arguments) -> None:
    """Add optimizers to a session that was made for inference, as for an optimizer made after the model was cast."""
    if policy != engine.policy:
        raise StateError(
            f"initialize: this model was given to initialize before, as [{engine.policy}], and is now asked for as "
            f"[{policy}]. Ask for the same, or call xamp.session(model).close() first."
        )
    checks.check_optimizers(arguments.optimizers, arguments.models, policy)
    checks.check_not_sharded_since(arguments.optimizers, policy)
    engine.prepare_state(len(arguments.optimizers))
    forms = _fused_forms(engine, arguments)
    undo = arguments.undo
    added = [weakref.ref(optimizer) for optimizer in arguments.optimizers]
    undo.steps.append(functools.partial(forget_sessions, weakref.ref(engine), added))
    engine.undo.steps.append(undo.unwind)  # the list is empty, and this does nothing, where the call fails
    engine.undo.preparing.append(undo.prepare)
    _take_optimizers(engine, arguments.optimizers, forms, undo)
    register(engine, arguments.objects)


def _fused_forms(engine: Engine, arguments: Arguments) -> list[FusedForm]:
    """Choose the fused form of each optimizer. If this raises, nothing has been changed yet."""
    policy = engine.policy
    choice = policy.fused if policy.checks or policy.master_weights or policy.fused is True else False
    names = engine.backend.capabilities(engine.device).fused_optimizers
    sparse = any(getattr(module, "sparse", False) is True for model in arguments.models for module in model.modules())

    def stepped(param: torch.Tensor) -> torch.dtype:
        """The dtype of what the optimizer will step: a half parameter gets a master in fp32."""
        return torch.float32 if policy.master_weights and param.dtype in masters.LOWER else param.dtype

    forms = [
        FusedForm(
            optimizer,
            choice,
            names if checks.is_plain(optimizer, engine.backend) else (),
            sparse=sparse,
            stepped=stepped,
        )
        for optimizer in arguments.optimizers
    ]
    if policy.fused is True:  # what that cannot do is the nearer reason
        _check_forms(forms, arguments.optimizers)
    for optimizer in arguments.optimizers:
        checks.check_stepped_rightly(optimizer, engine.backend, policy)
    _check_forms(forms, arguments.optimizers)
    return forms


def _check_forms(forms: Sequence[FusedForm], optimizers: Sequence[Optimizer]) -> None:
    for form, optimizer in zip(forms, optimizers, strict=True):
        form.check(optimizer)


def _take_optimizers(engine: Engine, optimizers: Sequence[Optimizer], forms: Sequence[FusedForm], undo: Undo) -> None:
    """Put masters into the optimizers in place of lowered parameters, and let the engine run the steps."""
    states = []
    for index, (optimizer, form) in enumerate(zip(optimizers, forms, strict=True)):
        params = [p for group in optimizer.param_groups for p in group["params"]]
        alone = [weakref.ref(p) for p in params if not masters.is_lowered(p)]  # outside the models
        undo.steps.append(functools.partial(_forget_masters, alone))
        pairs = [(p, m) for p in params if (m := masters.ensure_master(p, engine.policy)) is not None]
        engine.add_pairs(pairs)
        undo.steps.append(functools.partial(_back_to_model, weakref.ref(engine), weakref.ref(optimizer)))
        replace_params(optimizer, pairs)
        stepped = [m for _, m in pairs] or [p for p in params if p.dtype in masters.LOWER]
        undo.steps.append(cast_state(optimizer, stepped))
        undo.before["step", index] = _step_counters(optimizer)
        undo.steps.append(functools.partial(_unfuse, form, weakref.ref(optimizer), undo.before, index))
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


def _forget_masters(params: Sequence[weakref.ref[torch.Tensor]]) -> None:
    """Undo: parameters outside the models, which are in the lower dtype by themselves, have no masters."""
    for ref in params:
        if (param := ref()) is not None:
            masters.forget_lowered(param)


def _step_counters(optimizer: Optimizer) -> list[tuple[dict[str, Any], torch.Tensor]]:
    """Return the state of each parameter that counts steps in a tensor, and that tensor."""
    states = getattr(optimizer, "state", {}).values()
    return [(s, s["step"]) for s in states if isinstance(s, dict) and isinstance(s.get("step"), torch.Tensor)]


def _unfuse(form: FusedForm, optimizer: weakref.ref[Optimizer], before: dict[Any, Any], index: int) -> None:
    """Undo: the groups have again the ``fused`` that the user gave; after a failed call, the very step counters too."""
    if (found := optimizer()) is not None:
        form.switch_off(found)
    for state, counter in before.get(("step", index), ()):
        state["step"] = counter


def _take_out_states(engine: weakref.ref[Engine], states: Sequence[OptimizerState], before: dict[Any, Any]) -> None:
    """Undo, where the call failed: the engine does not know these. One that was closed still tells its counts."""
    if before and (owner := engine()) is not None:
        owner.remove_states(states)


def _set_up_disabled(arguments: Arguments) -> None:
    """Make a session in which every call works and does nothing."""
    checks.check_not_initialized(arguments.models, arguments.optimizers)
    device = next((p.device for model in arguments.models for p in model.parameters()), torch.device(registry.HOST))
    policy = compile_policy(Request(), best_level(()), tuple(ops.OP_POLICIES))
    backend = Backend(BackendSpec("disabled", (device.type,), "xamp.contract:Backend"))
    group = arguments.process_group
    engine = Engine(policy, backend, device, arguments.models, process_group=group, verbosity=0, enabled=False)
    engine.undo = arguments.undo
    engine.undo.steps.append(functools.partial(forget_sessions, weakref.ref(engine)))
    for model in arguments.given:  # no region notes it
        distributed.note_given(model)
    register(engine, arguments.objects)
