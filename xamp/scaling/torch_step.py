"""How torch's own ``step`` of an optimizer is called: with hooks and entries for the profiler where there are any.

torch wraps the ``step`` of each class. Each call of the wrapper makes an entry for the profiler, which takes 15 to 35
us on a CPU, a third of the step of one small parameter. So where nobody profiles and no hook is registered, the step
inside of the wrapper is called instead. An ``ExecutionTraceObserver`` that is started by itself, without a profiler,
does not see that entry.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from xamp.torch_compat.torch_private.autograd import is_profiling
from xamp.torch_compat.torch_private.modules import optimizer_post_hooks, optimizer_pre_hooks

__all__ = ["bind", "bound_step", "has_pre_hooks", "torch_step", "unwrapped"]

_WRAPPER = Optimizer.profile_hook_step(Optimizer.step).__code__


def unwrapped(own: Any) -> Callable[..., Any] | None:
    """Return the ``step`` that torch's wrapper ``own`` calls; None where ``own`` is no such wrapper."""
    return own.__wrapped__ if getattr(own, "__code__", None) is _WRAPPER else None


def has_pre_hooks(optimizer: Any) -> bool:
    """Return whether code of others runs before a step of ``optimizer``."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer_pre_hooks)


def _is_watched(optimizer: Any) -> object:
    own = optimizer._optimizer_step_post_hooks or optimizer._optimizer_step_pre_hooks
    return own or optimizer_post_hooks or optimizer_pre_hooks or is_profiling()


def bind(optimizer: Any, own: Callable[..., Any], inner: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return the function that runs in place of ``own``, the ``step`` of the optimizer's class, bound to it.

    ``inner`` is what :func:`unwrapped` says of ``own``.
    """
    if inner is None or _is_watched(optimizer):
        return functools.partial(own, optimizer)
    return functools.partial(inner, optimizer)


def torch_step(step: Callable[..., Any], optimizer: Any) -> Callable[..., Any]:
    """Return ``step(optimizer, ...)``, bound, as torch would call it as the ``step`` of the optimizer's class."""
    return bind(optimizer, Optimizer.profile_hook_step(step) if _is_watched(optimizer) else step, step)


def bound_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that runs in place of ``step``, the attribute of an optimizer that no session manages."""
    own = getattr(step, "__func__", None)  # there is none where a scheduler or a user put a function there
    return step if own is None else bind(step.__self__, own, unwrapped(own))  # type: ignore[attr-defined]
