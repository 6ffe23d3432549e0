"""``amp.initialize`` with Apex's arguments, order, checks and messages; the engine does the work."""

from __future__ import annotations

import operator
import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from xamp.apex import _casts_handle, _handle
from xamp.apex._amp_state import _amp_state as state
from xamp.apex._engine import ApexEngine
from xamp.apex._properties import LEVELS, OVERRIDES, Properties, tell, warn_or_err
from xamp.apex._scaler import LossScaler
from xamp.apex._start import Scaling, start_engine
from xamp.errors import StateError
from xamp.scaling.optimizer import state_of
from xamp.sessions.session import find_session
from xamp.sessions.set_up import Arguments
from xamp.values.log import say

__all__ = ["Scaling", "initialize", "start_engine"]

_WITHOUT_MEANING = {
    "combine_grad": "gradients are unscaled in groups as they lie",
    "combine_ddp": "use torch's DistributedDataParallel",
    "ddp_replica_count": "use torch's DistributedDataParallel",
    "check_combined_tensors": "gradients are not combined",
}
"""The keywords of Ascend's Apex that change nothing here, each with the reason."""
_REPLICAS = 4  # the default of ddp_replica_count


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: Any = None,
    patch_torch_functions: Any = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float | None = 2.0**24,
    *,
    patch_torch_functions_type: torch.dtype | None = None,
    dynamic_init_scale: float = 2.0**16,
    scale_growth_factor: float = 2.0,
    scale_backoff_factor: float = 0.5,
    scale_window: int = 2000,
    user_cast_preferred: bool | None = None,
    combine_grad: Any = None,
    combine_ddp: Any = None,
    ddp_replica_count: int = _REPLICAS,
    check_combined_tensors: Any = None,
) -> Any:
    """Put models and optimizers under one of Apex's levels, and patch torch's functions if the level says so.

    Args:
        models: an ``nn.Module`` or a list of them, not yet wrapped for data parallelism.
        optimizers: a ``torch.optim.Optimizer``, a list of them, or None for inference.
        enabled: False makes every call of amp do nothing.
        opt_level: ``"O0"`` to ``"O3"``; ROCm's ``"O4"`` and ``"O5"`` are O1 and O2 with bfloat16.
        cast_model_type: the dtype that parameters, buffers and inputs are cast to; False: none is cast. This argument
            and the next four override the level's property of the same name, unless they are None.
        patch_torch_functions: whether torch's functions cast their arguments (O1, O4).
        keep_batchnorm_fp32: whether batch norm with weights stays fp32; also as a string.
        master_weights: whether the optimizer steps fp32 masters.
        loss_scale: ``"dynamic"`` or a number, also as a string.
        cast_model_outputs: the dtype that outputs are cast to; None: fp32 where the model is cast.
        num_losses: the number of loss scales; ``scale_loss(..., loss_id=i)`` chooses one.
        verbosity: 0 logs nothing, 1 settings and overflows, 2 every cast too.
        min_loss_scale: the floor of a dynamic scale; None: the smallest that fp32 can use, 2**-126.
        max_loss_scale: the ceiling of a dynamic scale.
        patch_torch_functions_type: from ROCm's Apex: the dtype that functions lower to.
        dynamic_init_scale: from Ascend's Apex, as the next three: the initial dynamic scale.
        scale_growth_factor: the factor by which it grows.
        scale_backoff_factor: the factor by which it falls.
        scale_window: the number of clean updates after which it grows.
        user_cast_preferred: from Ascend's Apex: the built-in lists do not cast functions that the user registered.
        combine_grad: from Ascend's Apex, as the next three: accepted without effect; the log says why.
        combine_ddp: see ``combine_grad``.
        ddp_replica_count: see ``combine_grad``.
        check_combined_tensors: see ``combine_grad``.

    Returns:
        The models, or models and optimizers if optimizers were given: the same objects, in the same shape.

    Raises:
        RuntimeError: the level or an override is not possible, a model is already wrapped or in half precision, or an
            optimizer was given before.
        TypeError: a container is no list, or ``num_losses`` is no number.
        AssertionError, ValueError: an override has a wrong value. No error changes models or optimizers.
    """
    given = locals()
    properties = Properties()
    if not enabled:
        _take_state(properties, verbosity, min_loss_scale, max_loss_scale)
        state.loss_scalers = []
        _unpatch_for_the_dead()
        return _returned(models, optimizers)
    num_losses = given["num_losses"] = _count(num_losses)
    before = state.verbosity, state.handle
    state.verbosity = verbosity
    handle = None
    try:
        _settle(properties, given)
        arguments = _arguments(models, optimizers)
        if properties.patch_torch_functions:
            preferred = bool(user_cast_preferred)
            handle = _handle.start(properties.patch_type, verbose=verbosity == 2, user_cast_preferred=preferred)
        engine = start_engine(arguments, properties, Scaling.of(given), cast_model_outputs)
    except BaseException:
        if handle is not None:
            handle._deactivate()
        state.verbosity, state.handle = before
        raise
    _take_state(properties, verbosity, min_loss_scale, max_loss_scale)
    state.loss_scalers = [LossScaler(engine, index) for index in range(num_losses)]
    for name in _WITHOUT_MEANING:
        _explain(name, given[name])
    _unpatch_for_the_dead()
    if handle is not None:
        _hold(engine, handle)
    return _returned(models, optimizers)


def _take_state(properties: Properties, verbosity: int, floor: float | None, ceiling: float | None) -> None:
    state.opt_properties = properties
    state.verbosity = verbosity
    state.min_loss_scale, state.max_loss_scale = floor, ceiling


def _settle(properties: Properties, given: dict[str, Any]) -> None:
    """Set the properties of the level and apply the overrides; log both as Apex does."""
    level = given["opt_level"]
    if not torch.backends.cudnn.enabled:
        raise RuntimeError("Amp requires torch.backends.cudnn.enabled = True")
    if level not in LEVELS:
        raise RuntimeError(
            f"Unexpected optimization level {level}. Options are 'O0', 'O1', 'O2', 'O3'.  Note that in `O0`, `O1`, "
            "etc., the prefix O is the letter O, not the number zero."
        )
    properties.take(level)
    tell(f"Selected optimization level {LEVELS[level].brief}")
    tell("Defaults for this optimization level are:")
    for line in properties.lines():
        tell(line)
    tell("Processing user overrides (additional kwargs that are not None)...")
    for name in OVERRIDES:
        if given[name] is not None:
            setattr(properties, name, given[name])
    tell("After processing overrides, optimization options are:")
    for line in properties.lines():
        tell(line)


_explained: set[str] = set()


def _explain(name: str, value: Any) -> None:
    """Log once that a keyword changes nothing, and why."""
    asked = value != _REPLICAS if name == "ddp_replica_count" else value not in (None, False)
    if asked and name not in _explained:
        _explained.add(name)
        say("amp.initialize(%s=%r) changes nothing here: %s", name, value, _WITHOUT_MEANING[name])


# ---------------------------------------------------------------- models and optimizers


def _count(num_losses: Any) -> int:
    try:
        count = operator.index(num_losses)
    except TypeError:
        raise TypeError(f"amp.initialize: num_losses={num_losses!r} is not a number of losses.") from None
    if count < 0:
        raise ValueError(f"amp.initialize: num_losses={num_losses!r} is less than none.")
    return count


def _arguments(models: Any, optimizers: Any) -> Arguments:
    """Models and optimizers as lists, after Apex's checks in Apex's order."""
    if _is_optimizer(optimizers):
        optimizer_list = [optimizers]
    elif optimizers is None or isinstance(optimizers, list):
        optimizer_list = list(optimizers or ())
    else:
        raise TypeError("optimizers must be either a single optimizer or a list of optimizers.")
    if isinstance(models, nn.Module):
        model_list = [models]
    elif isinstance(models, list):
        model_list = list(models)
    else:
        raise TypeError("models must be either a single model or a list of models.")
    for model in model_list:
        _check_model(model)
    for optimizer in optimizer_list:
        if name := getattr(type(optimizer), "refused_by_amp", ""):
            raise RuntimeError(
                f"An incoming optimizer is an instance of {name}. The optimizer(s) passed to amp.initialize() must be "
                "bare \ninstances of either ordinary Pytorch optimizers, or Apex fused \noptimizers.\n"
            )
        if state_of(optimizer) is not None:
            raise RuntimeError("A given optimizer should only be passed through amp.initialize once.")
    return Arguments(model_list, optimizer_list, state.verbosity)


def _is_optimizer(found: Any) -> bool:
    """Whether ``found`` is an optimizer, or a wrapper with the same methods, such as LARC."""
    names = ("param_groups", "state", "step", "zero_grad", "add_param_group")
    return isinstance(found, Optimizer) or (not isinstance(found, nn.Module) and all(hasattr(found, n) for n in names))


def _check_model(model: nn.Module) -> None:
    for wrapper in (DistributedDataParallel, DataParallel):
        if isinstance(model, wrapper):
            raise RuntimeError(
                f"Incoming model is an instance of torch.nn.parallel.{wrapper.__name__}. Parallel wrappers should only "
                "be applied to the model(s) AFTER \nthe model(s) have been returned from amp.initialize."
            )
    found = find_session(model)
    if found is not None and not isinstance(found.engine, ApexEngine):
        raise StateError(
            f"amp.initialize: this {type(model).__name__} is in a session of xamp.initialize. Call "
            "xamp.session(model).close() first, or go on with xamp."
        )
    if not state.allow_incoming_model_not_fp32:
        for kind, tensors in (("param", model.named_parameters()), ("buffer", model.named_buffers())):
            for name, tensor in tensors:
                _check_fp32(kind, name, tensor)


def _check_fp32(kind: str, name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype in (torch.float16, torch.bfloat16):
        found = tensor.type()
        wanted = found.replace("Half", "Float").replace("BFloat16", "Float")
        warn_or_err(
            f"Found {kind} {name} with type {found}, expected {wanted}.\n"
            "When using amp.initialize, you do not need to call .half() on your model\n"
            "before passing it, no matter what optimization level you choose."
        )


def _returned(models: Any, optimizers: Any) -> Any:
    return models if optimizers is None else (models, optimizers)


def _hold(engine: ApexEngine, handle: _handle.AmpHandle) -> None:
    """Keep the patches until the models are deleted, and run the engine's steps without casts."""
    engine.around_step, engine.after_backward = _casts_handle.disable_casts, _casts_handle.clear_caches
    engine.undo.steps.append(handle._deactivate)
    _patched.append((weakref.ref(engine), handle))


_patched: list[tuple[weakref.ref[ApexEngine], _handle.AmpHandle]] = []


def _unpatch_for_the_dead() -> None:
    """End the patches of earlier calls whose models are deleted. Apex left such patches in force."""
    for entry in list(_patched):
        engine = entry[0]()
        if engine is None or not engine.models.alive():
            _patched.remove(entry)
            entry[1]._deactivate()
