"""``initialize``: check everything first, then change all of it or nothing.

The steps of a call: normalise the arguments -> find the device and its backend -> compile the
:class:`~xamp.policy.Policy` -> check models and optimizers against it -> plan, allocate and apply
(:mod:`xamp.sessions.set_up`). How to undo a change is listed before it is made (:class:`~xamp.values.undo.Undo`). A
failure, or Ctrl-C before the call has returned, unwinds the list at once, ``session.close()`` later.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import pkgutil
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, TypeVar, overload

import torch
from torch import nn
from torch.optim import Optimizer

from xamp.casting import ops
from xamp.contract import Backend, BackendSpec
from xamp.distributed import ddp
from xamp.errors import PolicyError, StateError, UnsupportedPolicy
from xamp.policy import LEVELS, WHY_BEST, Policy, Request, Unsaid, best_level, compile_policy, parse_level
from xamp.registry import device_in_use, registry
from xamp.registry.plugins import ALIASES
from xamp.scaling.engine import Engine
from xamp.sessions import checks
from xamp.sessions.session import forget_sessions, register
from xamp.sessions.set_up import Arguments, attach, set_up
from xamp.values.arguments import boolean, number_between
from xamp.values.log import say
from xamp.values.shown import shown

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["LevelName", "Settings", "initialize"]

DELEGATES = {"apex": "xamp.apex._delegate:hand_over"}
"""For each value of ``backend=``: the function, as ``"module:function"``, to which ``delegate=True`` hands the work.

It takes what :func:`xamp.sessions.set_up.set_up` takes, registers the engine of the session and returns it.
"""
_MakeSession: TypeAlias = Callable[[Policy, Backend, torch.device, Arguments], object]

OneModel = TypeVar("OneModel", bound=nn.Module)
OneOptimizer = TypeVar("OneOptimizer", bound=Optimizer)
Models = TypeVar("Models", bound=nn.Module | Sequence[nn.Module])
Optimizers = TypeVar("Optimizers", bound=Optimizer | Sequence[Optimizer])

LevelName: TypeAlias = Literal[
    "auto", "O0", "O1", "O2", "O3", "O4", "O5", "fp32", "amp-fp16", "fp16", "amp-bf16", "fp8", "amp-fp8"
]
"""The levels and their aliases. Arguments take any ``str`` too, such as a setting that was read from a file."""

_SHAPING = tuple(field.name for field in dataclasses.fields(Request))


class Settings(TypedDict, total=False):
    """The arguments of ``initialize`` that are given by name; their defaults stand there."""

    backend: str
    loss_scale: Literal["dynamic"] | float | str | None
    dtype: torch.dtype | str | None
    keep_batchnorm_fp32: bool | str | None
    keep_fp32: Iterable[type | str]
    master_weights: bool | str | None
    cast_model_inputs: bool | str | type | Iterable[type | str]
    cast_model_outputs: torch.dtype | str | bool | None
    methods: Sequence[str]
    num_losses: int
    init_scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    min_loss_scale: float | None
    max_loss_scale: float | None
    on_static_overflow: Literal["skip", "step"] | str | None
    op_policy: Literal["portable", "native", "apex"] | str
    fused: Literal["auto"] | bool | str
    fp8: Literal["auto", "tensorwise", "rowwise", "rowwise_gw_hp", "mxfp8"] | str | None
    keep_bf16: Iterable[type | str] | None
    process_group: Any
    delegate: bool | str
    enabled: bool | str
    verbosity: int | str
    opt_level: LevelName | str | None


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
    fp8: str | None = Request.fp8,
    keep_bf16: Iterable[type | str] | None = Request.keep_bf16,
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
            native fp16, else O0. ``"fp8"``, ``"amp-fp8"``: O4 with ``fp8="auto"``.
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
        growth_interval: the number of clean updates, one for each step, in a row after which the scale grows.
        min_loss_scale: the floor of the dynamic scale. None: the default.
        max_loss_scale: the ceiling of the dynamic scale. None: the default.
        on_static_overflow: what to do with an overflow under a static scale. ``"skip"``: check the gradients, and skip
            a step that overflowed. ``"step"``: do not check. None: ``"skip"``, but ``"step"`` for a scale of 1.0.
        op_policy: the table that says which operator runs in which dtype at O1 and O4. ``"portable"``: one for all
            devices. ``"native"``: the device's own lists. ``"apex"``: that of Apex, for backend ``"apex"`` alone.
        fused: ``"auto"``: use the fused implementation where it is right on this device and the user left that open.
            True: require it. ``"one-pass"``: at O2 and O5, unscale, clip, step and write the model in one pass over
            memory, by Triton's kernels; then masters have no gradients before ``xamp.master_params`` is called, and a
            captured graph holds ``scale_loss`` with its step. False: leave it as it is.
        fp8: at O4, run products of linear layers in fp8 by this recipe: ``"tensorwise"``, ``"rowwise"``,
            ``"rowwise_gw_hp"``, ``"mxfp8"``. ``"auto"``: the fastest of the hardware; on a CPU the first.
        keep_bf16: module classes, qualified names or glob patterns of modules that stay in bf16 where there is fp8.
            None: the last layer, those whose weight is an embedding's, and those too small to gain. ``()``: no layer.
        process_group: the ranks that decide together whether to skip a step. None: those of the wrappers (DDP, FSDP,
            the mesh of a DTensor) that hold the parameters; without a wrapper the default group, if there is one.
        delegate: True: let another implementation do the work, such as Apex itself, where the backend has one.
        enabled: False: change nothing. All other calls to xamp for these models and optimizers then do nothing.
        verbosity: 0: log nothing. 1: log the policy and each overflow; at O0 warn of settings that make fp32 imprecise.
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
    verbosity = int(verbosity) if isinstance(verbosity, bool) else verbosity
    loudness = int(number_between("verbosity", verbosity, -1, math.inf, whole=True))
    if not isinstance(backend, str):
        raise PolicyError(f"initialize(backend={shown(backend)}): must be a backend's name, or 'auto'.")
    request = Request(**{name: given[name] for name in _SHAPING if name != "level"}, level=_level_of(level, opt_level))
    model_list = checks.as_list("models", models, nn.Module)
    optimizer_list = checks.as_list("optimizers", [] if optimizers is None else optimizers, Optimizer)
    if not model_list:
        raise PolicyError("initialize(models=[]): there is no model. Pass one nn.Module or a list of them.")
    delegated = bool(boolean("delegate", delegate))
    arguments = Arguments(model_list, optimizer_list, loudness, process_group)
    undo = arguments.undo
    try:
        if boolean("enabled", enabled) is not False:
            _set_up(request, backend, delegated, arguments)
        else:
            _set_up_disabled(arguments)
        # One line, so that the call is done when it returns: no Ctrl-C comes between the two.
        return (models if optimizers is None else (models, optimizers), undo.before.clear())[0]  # type: ignore[func-returns-value]
    except BaseException:
        undo.unwind()
        raise


def _level_of(level: object, opt_level: object) -> object:
    if opt_level is None or opt_level is level or (isinstance(opt_level, str) and opt_level == level):
        return level
    if not isinstance(level, str) or level != Request.level:
        raise PolicyError(
            f"initialize(level={shown(level)}, opt_level={shown(opt_level)}): two names for one thing that say "
            "different things. Give level."
        )
    return opt_level


def _set_up(request: Request, backend_name: str, delegated: bool, arguments: Arguments) -> None:
    level = parse_level(request.level)
    if level is not None:  # refuse arguments that are wrong on every device before a backend is loaded
        compile_policy(request, level, tuple(ops.OP_POLICIES))
    existing = checks.check_not_initialized(arguments.models, arguments.optimizers)
    device = checks.device_of(arguments.models, arguments.optimizers) or device_in_use.device()
    backend = registry.resolve(backend_name, device.type)
    own_op_policy = ALIASES.get(backend.name)
    if own_op_policy is not None and isinstance(request.op_policy, Unsaid):
        request = dataclasses.replace(request, op_policy=own_op_policy)
    can = backend.capabilities(device)
    policy = compile_policy(request, level or best_level(can.fast_dtypes), tuple(ops.OP_POLICIES))
    checks.check_capabilities(backend, device, policy)
    checks.check_op_policy(backend, device, policy)
    if policy.fp8:
        from xamp.sessions.fp8_layers import with_recipe

        policy = with_recipe(policy, backend, device)
    make_session: _MakeSession = _delegate_of(backend) if delegated else set_up
    if existing is not None:
        attach(existing, policy, arguments)
        return
    checks.check_models(arguments.models, arguments.given, policy)
    checks.check_optimizers(arguments.optimizers, arguments.models, policy)
    narrowed = _less_than_fp32(backend, device) if arguments.verbosity and policy.dtype == torch.float32 else []
    engine = make_session(policy, backend, device, arguments)
    if arguments.verbosity:
        if level is None:
            lacking = "".join(can.why_not(dtype) for dtype, _ in can.lacking)  # that one would expect there
            why = WHY_BEST[LEVELS[policy.level].dtype]
            say("level='auto' is %s on %s: %s.%s", policy.level, device, why, lacking)
        say("%s, backend %s on %s", policy, backend.name, device)
        if policy.fp8:
            from xamp.sessions.fp8_layers import tell

            tell(engine, arguments.given)
    for line in narrowed:
        say("%s", line, level=logging.WARNING)


def _delegate_of(backend: Backend) -> _MakeSession:
    """Return the function of :data:`DELEGATES`, or raise an UnsupportedPolicy where ``backend`` has none."""
    target = DELEGATES.get(backend.name)
    if target is None:
        raise UnsupportedPolicy(
            f"initialize(delegate=True): backend {backend.name!r} has nothing to hand over to. Leave delegate out."
        )
    return pkgutil.resolve_name(target)  # type: ignore[no-any-return]


def _less_than_fp32(backend: Backend, device: torch.device) -> list[str]:
    """List the settings by which O0 differs from strict fp32 on this device, for whoever compares a level with O0."""
    rows = [row for row in backend.precision_settings(device) if row.narrows_fp32 or not row.expected]
    return [
        f"O0 on {device}: {row.name} is {row.value}: {row.effect}; to undo: {row.undo}"
        + (", or xamp.exact_fp32()" if row.exact else "")
        for row in rows
    ]


def _set_up_disabled(arguments: Arguments) -> None:
    """Make a session in which every call works and does nothing."""
    checks.check_not_initialized(arguments.models, arguments.optimizers)
    device = next((p.device for model in arguments.models for p in model.parameters()), torch.device(registry.HOST))
    policy = compile_policy(Request(), best_level(()), tuple(ops.OP_POLICIES))
    backend = Backend(BackendSpec("disabled", (device.type,), "xamp.contract:Backend"))
    group = arguments.process_group
    engine = Engine(
        policy,
        backend,
        device,
        arguments.models,
        undo=arguments.undo,
        process_group=group,
        verbosity=0,
        enabled=False,
    )
    engine.undo.weakly(forget_sessions, engine)
    for model in arguments.given:  # no region notes it
        ddp.note_given(model)
    register(engine, arguments.objects)
