"""Decorators that run a function in a dtype of the user's choice where autocast is on; blocks without xamp's casts."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from xamp.casting import active
from xamp.casting.autocast import Reentrant
from xamp.casting.features_in_use import needs
from xamp.casting.region_mark import Mark, no_casts_mark
from xamp.errors import PolicyError
from xamp.torch_compat.compiler import own_code
from xamp.torch_compat.torch_private.autocast import get_autocast_dtype, is_autocast_enabled
from xamp.values.containers import CASTABLE, cast_floats, tensors_in

__all__ = ["call", "disable_casts", "float_function", "half_function", "is_torchs", "promote_function"]

HALF, FLOAT, PROMOTE = "half", "float", "promote"

needs.marks = True

_Function = TypeVar("_Function", bound=Callable[..., Any])


def call(kind: str, autocast_off: bool, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call ``function`` with its arguments cast as ``kind`` says, if autocast is on for one of its tensors.

    Args:
        kind: ``"half"``, ``"float"`` or ``"promote"``.
        autocast_off: whether ``function`` runs with autocast off, so that autocast's own list does not undo the choice.
        function: the function to call.
        args: its positional arguments.
        kwargs: its keyword arguments.
    """
    tensors = tensors_in((args, kwargs))
    device = _autocast_device(tensors)
    if device is None or kwargs.get("out") is not None:  # the result must go into the caller's tensor, not a copy
        return function(*args, **kwargs)
    dtype = torch.float32
    if kind == HALF:
        dtype = get_autocast_dtype(device)
    elif kind == PROMOTE:
        dtype = _widest(tensors, device)
    args, kwargs = cast_floats(args, dtype, device), cast_floats(kwargs, dtype, device)
    if kind != FLOAT and not autocast_off:
        return function(*args, **kwargs)
    with torch.autocast(device, enabled=False):
        return function(*args, **kwargs)


def _autocast_device(tensors: list[torch.Tensor]) -> str | None:
    """Return the first device type of ``tensors`` for which autocast is on."""
    seen: list[str] = []
    for tensor in tensors:
        kind = tensor.device.type
        if kind not in seen:
            seen.append(kind)
            if _has_autocast(kind) and is_autocast_enabled(kind):
                return kind
    return None


def _has_autocast(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind)


_has_autocast._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch 2.11 does not trace what it calls


def _widest(tensors: list[torch.Tensor], device: str) -> torch.dtype:
    """Return the dtype to which the fp16, bf16 and fp32 tensors on ``device`` promote."""
    found = {tensor.dtype for tensor in tensors if tensor.device.type == device and tensor.dtype in CASTABLE}
    return next(iter(found)) if len(found) == 1 else torch.float32


def half_function(fn: _Function) -> _Function:
    """Decorate ``fn`` to run in the lower dtype where autocast is on. Where autocast is off, ``fn`` runs unchanged.

    The wrapper casts the fp16, bf16 and fp32 tensor arguments, also those in containers, to autocast's dtype. Autocast
    stays on inside, so that it casts the weights that ``fn`` holds too. It is off inside a function of torch's own.
    """
    decorated: _Function = _decorated(HALF, fn)
    return decorated


def float_function(fn: _Function) -> _Function:
    """Decorate ``fn`` to run in fp32 where autocast is on: the arguments are cast, and autocast is off inside."""
    decorated: _Function = _decorated(FLOAT, fn)
    return decorated


def promote_function(fn: _Function) -> _Function:
    """Decorate ``fn`` to get its fp16, bf16 and fp32 arguments in the widest of their dtypes where autocast is on."""
    decorated: _Function = _decorated(PROMOTE, fn)
    return decorated


def _decorated(kind: str, fn: Any) -> Any:
    if not callable(fn) or inspect.isclass(fn):
        raise PolicyError(f"{kind}_function({fn!r}): decorates functions. For a class, decorate its methods.")
    autocast_off, cast_and_call = is_torchs(fn), own_code(call)

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return cast_and_call(kind, autocast_off, fn, args, kwargs)

    return own_code(wrapper)


def is_torchs(function: Any, holder: object = None) -> bool:
    """Tell whether ``function`` is torch's own or a builtin, and so holds no weights of the user."""
    if isinstance(function, functools.partial):
        return is_torchs(function.func)
    owner = holder if isinstance(holder, type) else getattr(function, "__self__", None)
    if isinstance(function, nn.Module) or isinstance(owner, nn.Module):
        return False
    if isinstance(owner, type):
        return not issubclass(owner, nn.Module) and _is_in_torch(owner)
    return isinstance(function, types.BuiltinFunctionType) or _is_in_torch(function)


def _is_in_torch(found: object) -> bool:
    return (getattr(found, "__module__", None) or "").partition(".")[0] == "torch"


class disable_casts(Reentrant, contextlib.ContextDecorator):
    """A block, or a decorated function, in which xamp casts nothing. It works in every region, for its own thread only.

    In a region that casts (a model at O1 or O4, ``session.autocast()``, ``xamp.autocast``), autocast is off until the
    block ends. Regions entered in the block are entered without casts. The block leaves alone a ``torch.autocast``
    inside it, and one around it that is outside of xamp's regions. Models at O2, O3 and O5 still cast their inputs to
    the dtype of their parameters.
    """

    _cached = None

    def _mark(self) -> Mark:
        around = active.current()
        return no_casts_mark(None if around is None else around.device_type)

    def _recreate_cm(self) -> disable_casts:
        return disable_casts()
