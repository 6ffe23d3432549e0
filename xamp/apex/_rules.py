"""The rules of Apex's lists: how the arguments of a function of each kind are cast.

Each rule is a function. It takes the arguments of a call, and returns the arguments for the original function. A
:class:`~xamp.apex._casts.Casting` has the settings that a rule depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from xamp.apex._casts import ALL, BFLOAT16, DOUBLE, FLOAT, HALF, LOWER, NAMES, Casting, all_floating, may_keep

__all__ = ["CHANGES", "Change", "banned"]

Change = Callable[[Casting, str, Any, Any], tuple[Any, Any]]
"""(casting, name of the function, args, kwargs) -> args and kwargs for the original."""


def _dtypes_in(values: Iterable[Any]) -> set[torch.dtype]:
    """The dtypes of the floating tensors in ``values``, and in lists and tuples that contain only floating tensors."""
    found: set[torch.dtype] = set()
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.is_floating_point():
                found.add(value.dtype)
        elif isinstance(value, (list, tuple)) and all_floating(value):
            found |= _dtypes_in(value)
    return found


def _change(
    casting: Casting, name: str, args: Any, kwargs: Any, dtype: torch.dtype, given: frozenset[torch.dtype], keep: bool
) -> tuple[Any, Any]:
    keep = keep and may_keep(casting)
    cast = casting.cast
    args = [cast(value, dtype, given, name, keep) for value in args]
    if kwargs:
        kwargs = {key: cast(value, dtype, given, name, keep) for key, value in kwargs.items()}
    return args, kwargs


_FLOAT_ONLY = frozenset({FLOAT})


def _lower(casting: Casting, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    given = ALL if casting.wide else _FLOAT_ONLY
    return _change(casting, name, args, kwargs, casting.lower, given, keep=True)


def _lower_fp16(casting: Casting, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return _lower(casting, name, args, kwargs) if casting.lower is HALF else (args, kwargs)


def _lower_bf16(casting: Casting, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return _lower(casting, name, args, kwargs) if casting.lower is BFLOAT16 else (args, kwargs)


def _chosen(dtype: torch.dtype) -> Change:
    """The rule for functions of the user: cast to ``dtype``, whatever the lower dtype is."""
    given = frozenset({FLOAT, *LOWER})

    def change(casting: Casting, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return _change(casting, name, args, kwargs, dtype, ALL if casting.wide else given, keep=True)

    return change


def _float(casting: Casting, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return _change(casting, name, args, kwargs, FLOAT, ALL if casting.wide else LOWER, keep=False)


def _promote(casting: Casting, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    found = _dtypes_in((*args, *kwargs.values()))
    if len(found) <= 1 or (DOUBLE in found and not casting.wide):
        return args, kwargs
    if found in ({HALF, FLOAT}, {BFLOAT16, FLOAT}):
        return _change(casting, name, args, kwargs, FLOAT, LOWER, keep=False)
    if not found <= ALL:
        return args, kwargs
    types = ", ".join(sorted(f"'{NAMES[dtype]}Tensor'" for dtype in found))
    raise NotImplementedError(f"Do not know how to handle these types to promote: {{{types}}}")


def _sequence(casting: Casting, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The rule of ``cat`` and ``stack``: it casts a mixture of fp32 and one lower dtype; torch handles all others."""
    given = args[0] if args else kwargs.get("tensors")
    if not isinstance(given, (list, tuple)):
        return args, kwargs
    if {getattr(item, "dtype", None) for item in given} not in ({HALF, FLOAT}, {BFLOAT16, FLOAT}):
        return args, kwargs
    made = [casting.cast(item, FLOAT, LOWER, name, False) for item in given]
    return ([made, *args[1:]], kwargs) if args else (args, {**kwargs, "tensors": made})


def _match(casting: Casting, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The rule of functions that write into their first argument: cast the other arguments to its dtype."""
    own = getattr(args[0], "dtype", None) if args else None
    if own is not FLOAT and own is not casting.lower:
        return args, kwargs
    given = ALL if casting.wide else frozenset({FLOAT, casting.lower})
    rest, kwargs = _change(casting, name, args[1:], kwargs, own, given, keep=False)
    return [args[0], *rest], kwargs


def _refused(casting: Casting) -> frozenset[torch.dtype]:
    """The dtypes that in-place fp32 functions refuse: fp16, and bf16 too if that is the lower one, as in ROCm's."""
    return frozenset({HALF}) if casting.lower is HALF else LOWER


def _refuse_method(casting: Casting, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    if args and getattr(args[0], "dtype", None) in _refused(casting):
        kinds = "on fp16 Tensors." if casting.lower is HALF else "with fp16 or bfloat16 args."
        raise NotImplementedError(f"Cannot call in-place method {name} {kinds}")
    rest, kwargs = _change(casting, name, args[1:], kwargs, FLOAT, LOWER, keep=False)
    return [*args[:1], *rest], kwargs


def _refuse_function(casting: Casting, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    if _dtypes_in((*args, *kwargs.values())) & _refused(casting):
        kinds = "with fp16 arguments." if casting.lower is HALF else "with fp16 or bfloat16 args."
        raise NotImplementedError(f"Cannot call in-place function {name} {kinds}")
    return args, kwargs


def banned(message: str) -> Change:
    """The rule of a banned function."""

    def change(casting: Casting, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if casting.allow_banned:
            return _float(casting, name, args, kwargs) if casting.active else (args, kwargs)
        if _dtypes_in((*args, *kwargs.values())) & _refused(casting):
            raise NotImplementedError(message)
        return args, kwargs

    return change


CHANGES: dict[str, Change] = {
    "lower": _lower,
    "lower_fp16": _lower_fp16,
    "lower_bf16": _lower_bf16,
    "half": _chosen(HALF),
    "bfloat16": _chosen(BFLOAT16),
    "float": _float,
    "promote": _promote,
    "sequence": _sequence,
    "match": _match,
    "refuse_method": _refuse_method,
    "refuse_function": _refuse_function,
}
