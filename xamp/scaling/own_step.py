"""What xamp does to an optimizer itself: it calls the class's own ``step`` and ``zero_grad``, and sets its attributes.

They are called without their entries for the profiler where nobody profiles. Each entry takes 15 to 35 us on a CPU, a
third of the step of one small parameter. Everything else that torch's wrapper does is done: where a step hook is
registered, for this optimizer or for all, the wrapper itself runs. An ``ExecutionTraceObserver`` that is started by
itself, without a profiler, does not see the two entries.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from xamp.ground.compiler import break_graphs
from xamp.ground.torch_features import traces_attributes_of_optimizers
from xamp.ground.torch_private.autograd import is_profiling
from xamp.ground.torch_private.modules import optimizer_post_hooks, optimizer_pre_hooks

__all__ = [
    "bound_step",
    "lend_flag",
    "note_call",
    "returned_from_step",
    "step_of",
    "take_flag_back",
    "unwrapped",
    "zero_grad_of",
]

_is_compiling, _is_profiling = torch.compiler.is_compiling, is_profiling


def unwrapped(own: Any) -> Callable[..., Any] | None:
    """Return the ``step`` that torch's wrapper ``own`` calls; None where ``own`` is no such wrapper."""
    return own.__wrapped__ if getattr(own, "__code__", None) is _WRAPPER else None


def step_of(optimizer: Any, own: Callable[..., Any], inner: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return what runs in place of ``own``, the ``step`` of the optimizer's class, with the optimizer bound.

    Args:
        optimizer: the optimizer.
        own: the ``step`` of its class.
        inner: what :func:`unwrapped` says of ``own``.
    """
    if (
        inner is None
        or _is_compiling()
        or _is_profiling()
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or optimizer_pre_hooks
        or optimizer_post_hooks
    ):
        return functools.partial(own, optimizer)  # a bound method would come back as `optimizer.step` when traced
    return functools.partial(_call, inner, optimizer)


def bound_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return what runs in place of ``step``, the attribute of an optimizer that no session manages."""
    own = getattr(step, "__func__", None)  # there is none where a scheduler or a user put a function there
    return step if own is None else step_of(step.__self__, own, unwrapped(own))  # type: ignore[attr-defined]


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


def zero_grad_of(base: Any) -> Callable[..., None]:
    """Return the ``zero_grad`` of the managed class of ``base``. It clears what the session keeps as well."""
    own = base.zero_grad
    drops = own is Optimizer.zero_grad

    @functools.wraps(own)
    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        # In this order: the compiler cannot trace _is_profiling, and does not come to it.
        plain = drops and not (args or kwargs or _is_compiling() or _is_profiling())
        self._xamp.zero_grad(functools.partial(_drop_gradients if plain else own, self), args, kwargs)

    return zero_grad


def _drop_gradients(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = None


# ---------------------------------------------------------------- attributes that a step sets

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _writes(function: _Function) -> _Function:
    """Break the graph of compiled code there where the compiler ends in an error of its own at such an assignment."""
    if traces_attributes_of_optimizers():
        return function
    return break_graphs("the compiler of this torch does not trace what sets attributes of an optimizer")(function)


@_writes
def note_call(optimizer: Any) -> None:
    """Let a scheduler see that ``optimizer.step`` was called: it warns of a wrong order elsewhere."""
    optimizer._opt_called = True


@_writes
def lend_flag(optimizer: Any, found_inf: torch.Tensor) -> None:
    """Give the optimizer, for one step, the flag by which its fused form skips.

    Args:
        optimizer: the optimizer. A ``grad_scale`` of the user's own counts for this step.
        found_inf: fp32 scalar on its device: above 0 the step is skipped.
    """
    optimizer.grad_scale = getattr(optimizer, "grad_scale", None)
    optimizer.found_inf = found_inf


@_writes
def take_flag_back(optimizer: Any) -> None:
    """Undo :func:`lend_flag` after the step."""
    del optimizer.grad_scale, optimizer.found_inf
