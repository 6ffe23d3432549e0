"""The casts of :func:`xamp.ground.containers.cast_floats` for one dtype, with one function made for each type it meets.

``cast_floats`` asks what a value is each time. Here the question is asked once for each type, which saves 1 to 10 us
for each forward that returns a container. The compiler cannot trace this; it traces ``cast_floats``.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from xamp.ground.containers import ATOMS, CASTABLE, cast_floats

__all__ = ["TO", "caster"]

_Cast = Callable[[Any], Any]

_MOST_TYPES = 128
"""A forward may make a class at each call, so no more types than these are remembered."""

TO: dict[torch.dtype, _Cast] = {
    torch.float32: torch.Tensor.float,
    torch.float16: torch.Tensor.half,
    torch.bfloat16: torch.Tensor.bfloat16,
}
"""The method that casts to each dtype; each is 0.4 us faster than ``Tensor.to``."""

_OF_COPIES = ("__copy__", "__setstate__", "__reduce__", "__reduce_ex__", "__getstate__", "__new__", "__slots__")


def caster(dtype: torch.dtype) -> _Cast:
    """Return a function of one value that does what ``cast_floats(value, dtype)`` does."""
    tensor, first, second, to = _of_tensors(dtype)
    by_type: dict[type, _Cast] = {}

    def cast(value: Any) -> Any:
        kind = type(value)
        if kind is tensor:
            given = value.dtype
            return to(value) if given is first or given is second else value
        found = by_type.get(kind)
        if found is None:
            if len(by_type) >= _MOST_TYPES:
                by_type.clear()
            found = by_type[kind] = _cast_of(kind, dtype, cast)
        return found(value)

    return cast


def _of_tensors(dtype: torch.dtype) -> tuple[type[torch.Tensor], torch.dtype, torch.dtype, _Cast]:
    """Return the type of a plain tensor, the two dtypes that are cast to ``dtype``, and what casts.

    Each caster of a container compares these with its items itself: a call of ``cast`` for each takes 0.2 us.
    """
    first, second = CASTABLE - {dtype}
    return torch.Tensor, first, second, TO[dtype]


def _cast_of(kind: type, dtype: torch.dtype, cast: _Cast) -> _Cast:
    """Return the function that casts values of exactly the type ``kind``; ``cast`` casts what is in them."""
    if issubclass(kind, ATOMS):
        return _same
    if kind is list or kind is tuple or (issubclass(kind, tuple) and hasattr(kind, "_make")):
        return _of_sequence(getattr(kind, "_make", kind), dtype, cast)
    if kind is dict:
        return _of_dict(dtype, cast)
    if not issubclass(kind, (torch.Tensor, tuple, list, dict, collections.UserDict)) and _is_plain_dataclass(kind):
        return _of_dataclass(kind, dtype, cast)
    return lambda value: cast_floats(value, dtype)


def _same(value: Any) -> Any:
    return value


def _of_sequence(make: Callable[[list[Any]], Any], dtype: torch.dtype, cast: _Cast) -> _Cast:
    tensor, first, second, to = _of_tensors(dtype)

    def cast_sequence(value: Any) -> Any:
        items, same = [], True
        for item in value:
            if type(item) is tensor:
                given = item.dtype
                if given is first or given is second:
                    item, same = to(item), False
            elif (new := cast(item)) is not item:
                item, same = new, False
            items.append(item)
        return value if same else make(items)

    return cast_sequence


def _of_dict(dtype: torch.dtype, cast: _Cast) -> _Cast:
    tensor, first, second, to = _of_tensors(dtype)

    def cast_dict(value: dict[Any, Any]) -> dict[Any, Any]:
        made, same = {}, True
        for key, item in value.items():
            if type(item) is tensor:
                given = item.dtype
                if given is first or given is second:
                    item, same = to(item), False
            elif (new := cast(item)) is not item:
                item, same = new, False
            made[key] = item
        return value if same else made

    return cast_dict


def _is_plain_dataclass(kind: type) -> bool:
    """Whether objects of ``kind`` keep all their values in ``__dict__``, and copies are made as Python makes them."""
    if not dataclasses.is_dataclass(kind):
        return False
    own = [each for each in kind.__mro__ if each is not object]
    if any(name in vars(each) for each in own for name in _OF_COPIES):
        return False
    found = [vars(each).get(field.name) for each in own for field in dataclasses.fields(kind)]
    return not any(hasattr(value, "__set__") for value in found)


_FIELD = """
    if type(old_{name}) is tensor:
        given = old_{name}.dtype
        new_{name} = to(old_{name}) if given is first or given is second else old_{name}
    else:
        new_{name} = cast(old_{name})"""


def _of_dataclass(kind: type, dtype: torch.dtype, cast: _Cast) -> _Cast:
    """Return a function that is written for the fields of ``kind``, as ``dataclasses`` writes an ``__init__``.

    It takes 1 to 2 us less than a loop over their names. The copy is made without ``__init__`` and
    ``__post_init__``: their checks ran when the value was made.
    """
    names = [field.name for field in dataclasses.fields(kind)]
    if not names:
        return _same
    setter: Any = kind.__setattr__
    # Python makes no dict for an object whose values are assigned so. A frozen one refuses that.
    put = "made.{0} = new_{0}" if setter is object.__setattr__ else "set_attribute(made, {0!r}, new_{0})"
    source = f"""
def cast_dataclass(value):
    fields = value.__dict__
    if len(fields) != {len(names)}:  # it has other values too, or a field is only in the class
        return in_general(value)
    try:
        {"; ".join(f"old_{name} = fields[{name!r}]" for name in names)}
    except KeyError:
        return in_general(value)
    {"".join(_FIELD.format(name=name) for name in names)}
    if {" and ".join(f"new_{name} is old_{name}" for name in names)}:
        return value
    made = new_object(kind)
    {"; ".join(put.format(name) for name in names)}
    return made
"""
    tensor, first, second, to = _of_tensors(dtype)
    known: dict[str, Any] = {"tensor": tensor, "first": first, "second": second, "to": to, "cast": cast, "kind": kind}
    known.update(new_object=object.__new__, set_attribute=object.__setattr__)
    known.update(in_general=lambda value: cast_floats(value, dtype))
    exec(compile(source, f"<casts of {kind.__qualname__}>", "exec"), known)
    made: _Cast = known["cast_dataclass"]
    return made
