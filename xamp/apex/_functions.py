"""Decorators and registrations that add Apex's casts to functions of the user.

These casts act while the casts of a handle are on, in every thread. They do nothing in the regions of xamp's own
sessions. They are separate from ``xamp.half_function`` and its relatives, which act in regions only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from xamp.apex._casts import here
from xamp.apex._patches import Registration
from xamp.apex._rules import CHANGES
from xamp.torch_compat.compiler import own_code

__all__ = [
    "bfloat16_function",
    "float_function",
    "half_function",
    "promote_function",
    "register_bfloat16_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "switch",
    "take_registered",
]

_Function = TypeVar("_Function", bound=Callable[..., Any])

_registered: dict[tuple[int, str, str], Registration] = {}


class _Decorators:
    """The switch of all decorated functions.

    Attributes:
        on: whether they cast: False after ``init(enabled=False)``, until the next enabled ``init`` or ``initialize``.
    """

    on = True


_decorators = _Decorators()


def half_function(fn: _Function) -> _Function:
    """Decorate ``fn`` to get its floating arguments in fp16 while casts are on. Casts of Parameters are cached."""
    made: _Function = _decorated("half", fn)
    return made


def bfloat16_function(fn: _Function) -> _Function:
    """Decorate ``fn`` to get its floating arguments in bf16 while casts are on."""
    made: _Function = _decorated("bfloat16", fn)
    return made


def float_function(fn: _Function) -> _Function:
    """Decorate ``fn`` to get its floating arguments in fp32 while casts are on."""
    made: _Function = _decorated("float", fn)
    return made


def promote_function(fn: _Function) -> _Function:
    """Decorate ``fn`` to get its floating arguments in the widest of their dtypes while casts are on."""
    made: _Function = _decorated("promote", fn)
    return made


def _decorated(kind: str, fn: Any) -> Any:
    change, name = CHANGES[kind], getattr(fn, "__name__", repr(fn))

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        casting = here() if _decorators.on else None
        if casting is not None and casting.active:
            args, kwargs = change(casting, name, args, kwargs)
        return fn(*args, **kwargs)

    return own_code(wrapper)


def register_half_function(module: Any, name: str) -> None:
    """Make ``module.name`` get its floating arguments in fp16, under the next handle only.

    If Apex lists the function too, Apex's cast is the outer one. With ``user_cast_preferred`` there is only this one.

    Raises:
        ValueError: ``module`` has no such function.
    """
    _register("half", module, name)


def register_bfloat16_function(module: Any, name: str) -> None:
    """As :func:`register_half_function`, in bf16."""
    _register("bfloat16", module, name)


def register_float_function(module: Any, name: str) -> None:
    """As :func:`register_half_function`, in fp32."""
    _register("float", module, name)


def register_promote_function(module: Any, name: str) -> None:
    """As :func:`register_half_function`, in the widest of the dtypes of its arguments."""
    _register("promote", module, name)


def _register(kind: str, module: Any, name: str) -> None:
    if not hasattr(module, name):
        raise ValueError(f"No function named {name} in module {module}.")
    _registered[id(module), name, kind] = (module, name, kind)


def take_registered() -> tuple[Registration, ...]:
    """The functions that were registered since the last call; each is returned once."""
    found = tuple(_registered.values())
    _registered.clear()
    return found


def switch(on: bool) -> None:
    """Switch the casts of decorated functions on or off."""
    _decorators.on = on
