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
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

__all__ = ["returned_from_step", "step_in", "zero_grad_in"]

_is_compiling, _is_profiling = torch.compiler.is_compiling, torch._C._autograd._profiler_enabled


def step_in(own: Callable[..., Any]) -> Callable[[Any], Callable[..., Any]]:
    """Return a function that chooses, for an optimizer, what runs in place of its own ``step``.

    Args:
        own: the ``step`` of the optimizer's class.
    """
    if getattr(own, "__code__", None) is not _WRAPPER:
        return lambda _: own
    direct = functools.partial(_call, own.__wrapped__)  # type: ignore[attr-defined]

    def choose(optimizer: Any) -> Callable[..., Any]:
        if (
            _is_compiling()
            or _is_profiling()
            or optimizer._optimizer_step_pre_hooks
            or optimizer._optimizer_step_post_hooks
            or _global_optimizer_pre_hooks
            or _global_optimizer_post_hooks
        ):
            return own
        return direct

    return choose


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


def zero_grad_in(own: Callable[..., None]) -> Callable[..., Callable[..., None]]:
    """Return a function that chooses, by the arguments, what runs in place of an optimizer's own ``zero_grad``."""
    of_torch = own is Optimizer.zero_grad

    def choose(*args: Any, **kwargs: Any) -> Callable[..., None]:
        short = of_torch and not args and not kwargs and not _is_compiling() and not _is_profiling()
        return _drop_gradients if short else own

    return choose


def _drop_gradients(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = None
