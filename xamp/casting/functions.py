"""Functions that run in a dtype of the user's choice wherever autocast is on; and blocks without xamp's casts."""

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
from xamp.casting.mark import Mark, no_casts_mark
from xamp.casting.needs import needs
from xamp.errors import PolicyError
from xamp.ground.containers import CASTABLE, cast_floats, tensors_in

__all__ = ["call", "disable_casts", "float_function", "half_function", "is_torchs", "promote_function"]

HALF, FLOAT, PROMOTE = "half", "float", "promote"

needs.ask_for_marks()

_Function = TypeVar("_Function", bound=Callable[..., Any])


def call(kind: str, plain: bool, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call ``function`` as ``kind`` says, if autocast is on for a tensor among its arguments.

    Args:
        kind: one of the three.
        plain: ``function`` runs with autocast off, so that autocast's own list does not undo the choice.
        function: what to call.
        args: its arguments.
        kwargs: its keyword arguments.
    """
    tensors = tensors_in((args, kwargs))
    device = _autocast_device(tensors)
    if device is None or kwargs.get("out") is not None:  # what is written into cannot be a copy
        return function(*args, **kwargs)
    dtype = torch.float32
    if kind == HALF:
        dtype = torch._C.get_autocast_dtype(device)
    elif kind == PROMOTE:
        dtype = _widest(tensors, device)
    args, kwargs = cast_floats(args, dtype, device), cast_floats(kwargs, dtype, device)
    if kind != FLOAT and not plain:
        return function(*args, **kwargs)
    with torch.autocast(device, enabled=False):
        return function(*args, **kwargs)


def _autocast_device(tensors: list[torch.Tensor]) -> str | None:
    """The first device type of ``tensors`` for which autocast is on."""
    seen: list[str] = []
    for tensor in tensors:
        kind = tensor.device.type
        if kind not in seen:
            seen.append(kind)
            if torch.amp.is_autocast_available(kind) and torch._C.is_autocast_enabled(kind):
                return kind
    return None


def _widest(tensors: list[torch.Tensor], device: str) -> torch.dtype:
    """What the fp16, bf16 and fp32 tensors on ``device`` promote to."""
    found = {tensor.dtype for tensor in tensors if tensor.device.type == device and tensor.dtype in CASTABLE}
    return next(iter(found)) if len(found) == 1 else torch.float32


def half_function(fn: _Function) -> _Function:
    """Decorate ``fn`` to run in the lower dtype wherever autocast is on, and as it is where it is not.

    Its fp16, bf16 and fp32 tensor arguments, in containers too, are cast to autocast's dtype. Autocast stays on inside,
    so that weights that ``fn`` holds are cast as well; it is off inside a function of torch's own.
    """
    decorated: _Function = _decorated(HALF, fn)
    return decorated


def float_function(fn: _Function) -> _Function:
    """Decorate ``fn`` to run in fp32 wherever autocast is on: its arguments are cast and autocast is off inside."""
    decorated: _Function = _decorated(FLOAT, fn)
    return decorated


def promote_function(fn: _Function) -> _Function:
    """Decorate ``fn`` to get arguments of one dtype, the widest of their fp16, bf16 and fp32, where autocast is on."""
    decorated: _Function = _decorated(PROMOTE, fn)
    return decorated


def _decorated(kind: str, fn: Any) -> Any:
    if not callable(fn) or inspect.isclass(fn):
        raise PolicyError(f"{kind}_function({fn!r}): decorates functions. For a class, decorate its methods.")
    plain = is_torchs(fn)

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return call(kind, plain, fn, args, kwargs)

    return wrapper


def is_torchs(function: Any, holder: object = None) -> bool:
    """Whether ``function`` is torch's own, or compiled, and so holds no weights of the user's."""
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
    """A block, or a decorated function, in which xamp casts nothing, whatever region it is in.

    In a region that casts (a model at O1 or O4, ``session.autocast()``, ``xamp.autocast``), autocast is off until the
    block ends, and regions entered in the block are entered without casts. A ``torch.autocast`` in the block, or around
    it and outside of xamp's regions, stays as it is. Models at O2, O3 and O5 cast their inputs as always, to the dtype
    of their parameters. It holds for the thread that enters it.
    """

    _cached = None

    def _mark(self) -> Mark:
        around = active.current()
        return no_casts_mark(None if around is None else around.device_type)

    def _recreate_cm(self) -> disable_casts:
        return disable_casts()
