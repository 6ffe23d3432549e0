"""What stands in the place of a listed function: the original, unless something among the arguments has to be cast.

A call that needs no cast pays for a look at its arguments, and asks nobody whether casts are on. That look is written
out in each kind of wrapper, since to call another function would cost as much as all of it; what it does not know at
sight is left to the rule. Only then :func:`xamp.apex._casts.here` is asked, so that a wrapper that somebody keeps does
nothing once there is nothing to do.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from xamp.apex._casts import here
from xamp.apex._rules import CHANGES, Change, banned

__all__ = ["make_wrapper"]

HALF, BFLOAT16, FLOAT = torch.float16, torch.bfloat16, torch.float32

_Call = Callable[..., Any]

_REFUSING = ("refuse_method", "refuse_function", "banned")
"""Kinds that act while casts are switched off too, as Apex's do."""


def make_wrapper(original: _Call, name: str, kinds: tuple[str, ...], message: str = "", *, wide: bool = False) -> _Call:
    """What stands in the place of ``original``.

    Args:
        original: what is called.
        name: as it is called in messages.
        kinds: of :data:`xamp.apex._rules.CHANGES`, the outermost first; or ``"banned"``.
        message: of the error, where it is banned.
        wide: a :class:`~xamp.apex._casts.Casting` that has this set may hold.
    """
    changes = [banned(message) if kind == "banned" else CHANGES[kind] for kind in kinds]
    if len(kinds) > 1:
        made = _chain(original, name, kinds, changes)
    elif wide or kinds[0] not in _MAKERS:
        made = _asking(original, name, changes[0], always=kinds[0] in _REFUSING)
    elif kinds == ("float",) and (written := _written_out(original, name, changes[0])) is not None:
        made = written
    else:
        made = _MAKERS[kinds[0]](original, name, changes[0])
    return functools.wraps(original)(made)


def _lowering(original: _Call, name: str, change: Change) -> _Call:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()) if kwargs else args:
            kind = type(value)
            if kind is Tensor or kind is Parameter:
                if value.dtype is FLOAT:
                    break
            elif kind is int or value is None or kind is float or kind is bool or kind is str:
                continue
            elif (kind is not tuple and kind is not list) or (value and type(value[0]) is not int):
                break
        else:
            return original(*args, **kwargs)
        casting = here()
        if casting is None or not casting.active:
            return original(*args, **kwargs)
        args, kwargs = change(casting, name, args, kwargs)
        return original(*args, **kwargs)

    return wrapper


def _lifting(original: _Call, name: str, change: Change, always: bool = False) -> _Call:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()) if kwargs else args:
            kind = type(value)
            if kind is Tensor or kind is Parameter:
                dtype = value.dtype
                if dtype is HALF or dtype is BFLOAT16:
                    break
            elif kind is int or value is None or kind is float or kind is bool or kind is str:
                continue
            elif (kind is not tuple and kind is not list) or (value and type(value[0]) is not int):
                break
        else:
            return original(*args, **kwargs)
        casting = here()
        if casting is None or not (casting.active or always):
            return original(*args, **kwargs)
        args, kwargs = change(casting, name, args, kwargs)
        return original(*args, **kwargs)

    return wrapper


def _promoting(original: _Call, name: str, change: Change) -> _Call:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        first = None
        for value in (*args, *kwargs.values()) if kwargs else args:
            kind = type(value)
            if kind is Tensor or kind is Parameter:
                if first is None:
                    first = value.dtype
                elif value.dtype is not first:
                    break
            elif kind is int or value is None or kind is float or kind is bool or kind is str:
                continue
            elif (kind is not tuple and kind is not list) or (value and type(value[0]) is not int):
                break
        else:
            return original(*args, **kwargs)
        casting = here()
        if casting is None or not casting.active:
            return original(*args, **kwargs)
        args, kwargs = change(casting, name, args, kwargs)
        return original(*args, **kwargs)

    return wrapper


_WRITTEN = """
def wrapper({parameters}):
    if {plain}:
        return _original({arguments})
    return _asking({arguments})
"""
_PLAIN = "({0} is None or ((_k := type({0})) is _T or _k is _P) and (_d := {0}.dtype) is not _H and _d is not _B)"


def _written_out(original: _Call, name: str, change: Change) -> _Call | None:
    """:func:`_lifting` for a function in Python that says which of its parameters are tensors: with its very signature.

    Half as dear, since nothing is packed and unpacked. None where the signature does not tell.
    """
    if getattr(original, "__module__", None) != "torch.nn.functional" or hasattr(original, "__wrapped__"):
        return None
    found = _code(original)
    if found is None:
        return None
    names = {"_T": Tensor, "_P": Parameter, "_H": HALF, "_B": BFLOAT16, "_original": original, **found[1]}
    names["_asking"] = _asking(original, name, change, always=False)
    exec(found[0], names)
    written: _Call = names["wrapper"]
    return written


@functools.cache
def _code(original: _Call) -> tuple[types.CodeType, dict[str, Any]] | None:
    """What :data:`_WRITTEN` is for a function, and the names that it uses for the defaults."""
    try:
        parameters = list(inspect.signature(original).parameters.values())
    except ValueError:  # a builtin
        return None
    by_name, by_place = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    tensors = [p.name for p in parameters if "Tensor" in str(p.annotation)]
    if not tensors or any(p.kind not in (by_name, by_place) or p.annotation is p.empty for p in parameters):
        return None
    told = [p.name if p.default is p.empty else f"{p.name}=_{p.name}" for p in parameters]
    first = next((i for i, p in enumerate(parameters) if p.kind is by_name), None)
    if first is not None:
        told.insert(first, "*")
    text = _WRITTEN.format(
        parameters=", ".join(told),
        plain=" and ".join(_PLAIN.format(tensor) for tensor in tensors),
        arguments=", ".join(p.name if p.kind is by_place else f"{p.name}={p.name}" for p in parameters),
    )
    return compile(text, __file__, "exec"), {f"_{p.name}": p.default for p in parameters if p.default is not p.empty}


def _asking(original: _Call, name: str, change: Change, always: bool) -> _Call:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        casting = here()
        if casting is None or not (casting.active or always):
            return original(*args, **kwargs)
        args, kwargs = change(casting, name, args, kwargs)
        return original(*args, **kwargs)

    return wrapper


def _chain(original: _Call, name: str, kinds: Sequence[str], changes: Sequence[Change]) -> _Call:
    """For a function that is listed more than once: by Apex and by the user."""
    steps = [(change, kind in _REFUSING) for kind, change in zip(kinds, changes, strict=True)]

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        casting = here()
        if casting is not None:
            for change, always in steps:
                if casting.active or always:
                    args, kwargs = change(casting, name, args, kwargs)
        return original(*args, **kwargs)

    return wrapper


def _sequences(original: _Call, name: str, change: Change) -> _Call:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else kwargs.get("tensors")
        first = None
        if type(given) is list or type(given) is tuple:
            for value in given:
                kind = type(value)
                if kind is not Tensor and kind is not Parameter:
                    break
                if first is None:
                    first = value.dtype
                elif value.dtype is not first:
                    break
            else:
                return original(*args, **kwargs) if kwargs else original(*args)
        casting = here()
        if casting is None or not casting.active:
            return original(*args, **kwargs)
        args, kwargs = change(casting, name, args, kwargs)
        return original(*args, **kwargs)

    return wrapper


_MAKERS: dict[str, Callable[..., _Call]] = {
    "lower": _lowering,
    "lower_fp16": _lowering,
    "lower_bf16": _lowering,
    "float": _lifting,
    **dict.fromkeys(_REFUSING, functools.partial(_lifting, always=True)),
    "promote": _promoting,
    "match": _promoting,
    "sequence": _sequences,
}
