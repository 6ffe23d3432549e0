"""The wrappers that replace listed functions: each casts the arguments where needed, then calls the original.

A wrapper first looks at the types and dtypes of its arguments. Where they show that no cast is needed, it calls the
original at once, without asking whether casts are on. Where the look cannot decide, the rule does. Only then the
wrapper asks :func:`xamp.apex._casts.here` which casting is in force. So a wrapper that outlives its handle casts
nothing.
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
from xamp.torch_compat.compiler import own_code

__all__ = ["CHECK_INPUT", "check_input_wrapper", "make_wrapper"]

HALF, BFLOAT16, FLOAT = torch.float16, torch.bfloat16, torch.float32

_Call = Callable[..., Any]

CHECK_INPUT = "check_input"
"""The kind of wrapper for ``RNNBase.check_input``."""

_REFUSING = ("refuse_method", "refuse_function", "banned")
"""The kinds of wrappers that also act while casts are switched off, as in Apex."""


def make_wrapper(original: _Call, name: str, kinds: tuple[str, ...], message: str = "", *, wide: bool = False) -> _Call:
    """Make the wrapper that replaces ``original``.

    Args:
        original: the function that the wrapper calls.
        name: its name in messages.
        kinds: keys of :data:`xamp.apex._rules.CHANGES`, the outermost first; or ``"banned"``.
        message: the text of the error, for a banned function.
        wide: True where a :class:`~xamp.apex._casts.Casting` with ``wide`` may be in force. The wrapper then asks for
            the casting at each call.
    """
    changes = [banned(message) if kind == "banned" else CHANGES[kind] for kind in kinds]
    if len(kinds) > 1:
        made = _chain(original, name, kinds, changes)
    elif wide or kinds[0] not in _MAKERS:
        made = _unchecked(original, name, changes[0], always=kinds[0] in _REFUSING)
    elif kinds == ("float",) and (written := _generated(original, name, changes[0])) is not None:
        made = written
    else:
        made = _MAKERS[kinds[0]](original, name, changes[0])
    return functools.wraps(original)(own_code(made))


def _looking(
    original: _Call, name: str, change: Change, cast: tuple[torch.dtype, ...] = (), always: bool = False
) -> _Call:
    """A wrapper that leaves the decision to the rule where a tensor has a dtype in ``cast``, or two have two dtypes."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        first = None
        for value in (*args, *kwargs.values()) if kwargs else args:
            kind = type(value)
            if kind is Tensor or kind is Parameter:
                dtype = value.dtype
                if dtype is first:
                    continue
                if first is not None or dtype in cast:
                    break
                first = dtype
            elif kind is int or value is None or kind is float or kind is bool or kind is str:
                continue
            elif (kind is not tuple and kind is not list) or (value and type(value[0]) is not int):
                break
        else:
            return original(*args, **kwargs) if kwargs else original(*args)
        casting = here()
        if casting is None or not (casting.active or always):
            return original(*args, **kwargs)
        args, kwargs = change(casting, name, args, kwargs)
        return original(*args, **kwargs)

    return wrapper


_TEMPLATE = """
def wrapper({parameters}):
    try:
        _plain = {plain}
    except Exception:  # no tensor, or one that does not tell: the rule decides
        _plain = False
    if _plain:
        return _original({arguments})
    return _unchecked({arguments})
"""
_PLAIN = "({0} is None or (_d := {0}.dtype) is not _H and _d is not _B)"
"""A value with another dtype than these two is cast by no rule, whatever its type."""


def _generated(original: _Call, name: str, change: Change) -> _Call | None:
    """A wrapper of kind ``"float"`` with the signature of ``original``; annotations tell which arguments are tensors.

    It costs half as much as :func:`_looking`, since it packs and unpacks no arguments. None where ``original`` is no
    Python function of ``torch.nn.functional``, or its annotations are incomplete.
    """
    if getattr(original, "__module__", None) != "torch.nn.functional" or hasattr(original, "__wrapped__"):
        return None
    found = _code(original)
    if found is None:
        return None
    names = {"_H": HALF, "_B": BFLOAT16, "_original": original, **found[1]}
    names["_unchecked"] = _unchecked(original, name, change, always=False)
    exec(found[0], names)
    written: _Call = names["wrapper"]
    return written


@functools.cache
def _code(original: _Call) -> tuple[types.CodeType, dict[str, Any]] | None:
    """The compiled :data:`_TEMPLATE` for a function, and the default values that it uses, by name."""
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
    text = _TEMPLATE.format(
        parameters=", ".join(told),
        plain=" and ".join(_PLAIN.format(tensor) for tensor in tensors),
        arguments=", ".join(p.name if p.kind is by_place else f"{p.name}={p.name}" for p in parameters),
    )
    return compile(text, __file__, "exec"), {f"_{p.name}": p.default for p in parameters if p.default is not p.empty}


def _unchecked(original: _Call, name: str, change: Change, always: bool) -> _Call:
    """A wrapper that does not look at its arguments first: the rule does."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        casting = here()
        if casting is None or not (casting.active or always):
            return original(*args, **kwargs)
        args, kwargs = change(casting, name, args, kwargs)
        return original(*args, **kwargs)

    return wrapper


def _chain(original: _Call, name: str, kinds: Sequence[str], changes: Sequence[Change]) -> _Call:
    """A wrapper for a function that is listed more than once, such as by Apex and by the user."""
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


_LOWERING = functools.partial(_looking, cast=(FLOAT,))
_RAISING = functools.partial(_looking, cast=(HALF, BFLOAT16))

_MAKERS: dict[str, Callable[..., _Call]] = {
    "lower": _LOWERING,
    "lower_fp16": _LOWERING,
    "lower_bf16": _LOWERING,
    "float": _RAISING,
    **dict.fromkeys(_REFUSING, functools.partial(_RAISING, always=True)),
    "promote": _looking,
    "match": _looking,
    "sequence": _sequences,
}


def check_input_wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make the wrapper that replaces ``RNNBase.check_input``, which requires an input of the weights' dtype.

    Apex packed the weights into one flat buffer by arithmetic on addresses, which needs cuDNN's layout, and missed
    ``nn.RNN``. xamp replaces the attributes of ``torch._VF``, and casts and caches each weight by itself. If the input
    and the weights will both be cast, the wrapper passes an empty tensor of that dtype. So the original still checks
    the shapes.
    """

    @functools.wraps(original)
    def wrapper(self: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
        casting = here()
        if casting is None or not casting.active:
            return original(self, input, *args, **kwargs)
        given, own = input.dtype, self._flat_weights[0].dtype
        if given is not own and {given, own} == {torch.float32, casting.lower}:
            input = torch.empty(input.shape, dtype=own, device="meta")
        return original(self, input, *args, **kwargs)

    return wrapper
