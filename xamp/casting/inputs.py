"""Which arguments of a method are cast: all, but for the names and types that ``cast_model_inputs`` exempts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from xamp.errors import PolicyError
from xamp.ground.containers import cast_floats_except

__all__ = ["cast_some", "check_names"]

_Cast = Callable[[Any, Any], tuple[Any, Any]]


def cast_some(
    function: Callable[..., Any], spared: Sequence[type | str], dtype: torch.dtype, *, bound: bool = False
) -> _Cast:
    """Return a function that casts the arguments of ``function`` to ``dtype``, but for those in ``spared``.

    Args:
        function: the method; without ``bound``, its first parameter is ``self``.
        spared: names of its parameters, and types. A type counts wherever an object of it is nested.
        dtype: the dtype to which floating tensors are cast.
        bound: ``function`` has no parameter ``self``.
    """
    names = frozenset(each for each in spared if isinstance(each, str))
    cast = cast_floats_except(tuple(each for each in spared if isinstance(each, type)))
    positions, rest, named = _positions(function, names, skip=not bound)

    def spares(name: str) -> bool:
        return name in names or (named is not None and name not in named)

    def cast_arguments(args: Any, kwargs: Any) -> tuple[Any, Any]:
        given = tuple(value if at in positions or at >= rest else cast(value, dtype) for at, value in enumerate(args))
        return given, {name: value if spares(name) else cast(value, dtype) for name, value in kwargs.items()}

    return cast_arguments


def _positions(
    function: Callable[..., Any], names: frozenset[str], skip: bool
) -> tuple[frozenset[int], float, frozenset[str] | None]:
    """Find the parameters called ``names``.

    Returns:
        Their positions; the position where ``*args`` of such a name begins, or inf; and, where ``**kwargs`` has such a
        name, the names of the parameters that are not in it, or None.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a callable without a signature: names stand for keywords only
        return frozenset(), float("inf"), None
    if skip and parameters and parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL:
        del parameters[0]
    places = list(enumerate(parameters))
    starred = (at for at, p in places if p.kind is p.VAR_POSITIONAL and p.name in names)
    plain = frozenset(at for at, p in places if p.name in names and p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD))
    double = any(p.kind is p.VAR_KEYWORD and p.name in names for p in parameters)
    return plain, next(starred, float("inf")), frozenset(p.name for p in parameters) if double else None


def check_names(methods: Sequence[Callable[..., Any]], spared: Sequence[type | str]) -> None:
    """Refuse the name of an argument that no method has.

    Args:
        methods: the bound methods that run under the policy, of all models.
        spared: names and types; see :func:`cast_some`.

    Raises:
        PolicyError: the message lists the arguments there are.
    """
    known: dict[str, None] = {}
    for method in methods:
        try:
            parameters = inspect.signature(method).parameters.values()
        except (TypeError, ValueError):
            return
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return  # any name may come
        known.update(dict.fromkeys(p.name for p in parameters))
    for name in spared:
        if isinstance(name, str) and name not in known:
            raise PolicyError(
                f"initialize(cast_model_inputs={tuple(spared)!r}): no method under the policy has an argument "
                f"{name!r}. Arguments: {', '.join(known) or 'none'}."
            )
