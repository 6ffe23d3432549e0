"""The ``step`` and ``zero_grad`` of torch's optimizers, without their entries for the profiler where nobody profiles.

Each entry takes 15 to 35 us on a CPU, a third of the step of one small parameter. Everything else that torch's wrapper
does is done: where a step hook is registered, for this optimizer or for all, the wrapper itself runs. An
``ExecutionTraceObserver`` that is started by itself, without a profiler, does not see the two entries.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from xamp.ground.torch_private.autograd import is_profiling
from xamp.ground.torch_private.modules import optimizer_post_hooks, optimizer_pre_hooks

__all__ = ["bound_step", "returned_from_step", "step_of", "zero_grad_of"]

_is_compiling, _is_profiling = torch.compiler.is_compiling, is_profiling


def step_of(optimizer: Any, own: Callable[..., Any]) -> Callable[..., Any]:
    """Return what runs in place of ``own``, the ``step`` of the optimizer's class, with the optimizer bound."""
    if (
        _is_compiling()
        or _is_profiling()
        or getattr(own, "__code__", None) is not _WRAPPER
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or optimizer_pre_hooks
        or optimizer_post_hooks
    ):
        return functools.partial(own, optimizer)  # a bound method would come back as `optimizer.step` when traced
    return functools.partial(_call, own.__wrapped__, optimizer)  # type: ignore[attr-defined]


def bound_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return what runs in place of ``step``, the attribute of an optimizer that no session manages."""
    own = getattr(step, "__func__", None)  # there is none where a scheduler or a user put a function there
    return step if own is None else step_of(step.__self__, own)  # type: ignore[attr-defined]


def _call(inner: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Call ``inner`` as torch's wrapper does, and name the result as it does: see :func:`returned_from_step`."""
    out = inner(optimizer, *args, **kwargs)
    optimizer._optimizer_step_code()
    return out


_WRAPPER = Optimizer.profile_hook_step(Optimizer.step).__code__
_CALLERS = (_WRAPPER, _call.__code__)


def returned_from_step(error: BaseException) -> bool:
    """Return whether ``error`` came when the optimizer's ``step`` had returned, as where a step hook raised it.

    Fused kernels leave no other trace, for they move tensors without a new version.
    """
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_code in _CALLERS and "out" in frame.f_locals for frame in frames)


def zero_grad_of(optimizer: Any, own: Callable[..., None], args: Any, kwargs: Any) -> Callable[..., None]:
    """Return what runs in place of ``own``, the ``zero_grad`` of the optimizer's class, with the optimizer bound."""
    if own is Optimizer.zero_grad and not (args or kwargs or _is_compiling() or _is_profiling()):
        return functools.partial(_drop_gradients, optimizer)
    return functools.partial(own, optimizer)


def _drop_gradients(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = None
