"""The casts of :func:`xamp.ground.containers.cast_floats` to one dtype, with a function made for each type it meets.

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

__all__ = ["TO", "Caster"]

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


class Caster:
    """Casts values to one dtype.

    Args:
        dtype: the dtype; None leaves values as they are.
        cast: what to do, for a value and the dtype. Only ``cast_floats`` is made anew for each type.

    Attributes:
        cast: does it for one value. It is the function for the type of the value that came last: a forward mostly
            returns one type. It gives a value of another type to the function for that, which then takes its place.
    """

    __slots__ = ("_by_type", "_dtype", "cast")

    def __init__(self, dtype: torch.dtype | None, cast: Callable[[Any, torch.dtype], Any] = cast_floats) -> None:
        self._dtype = dtype
        self._by_type: dict[type, _Cast] = {}
        self.cast: _Cast = self._cast_other
        if dtype is None:
            self.cast = lambda value: value
        elif cast is not cast_floats:
            self.cast = lambda value: cast(value, dtype)

    def _cast_other(self, value: Any) -> Any:
        """Cast a value of another type than the one that came last."""
        self.cast = found = self._of(type(value))
        return found(value)

    def _cast_item(self, value: Any) -> Any:
        """Cast an item of a container."""
        return self._of(type(value))(value)

    def _of(self, kind: type) -> _Cast:
        """Return the function that casts values of exactly the type ``kind``."""
        found = self._by_type.get(kind)
        if found is None:
            if len(self._by_type) >= _MOST_TYPES:
                self._by_type.clear()
            assert self._dtype is not None, "else values are left as they are"
            found = self._by_type[kind] = _cast_of(kind, self._dtype, self._cast_item, self._cast_other)
        return found


def _of_tensors(dtype: torch.dtype) -> tuple[type[torch.Tensor], torch.dtype, torch.dtype, _Cast]:
    """Return the type of a plain tensor, the two dtypes that are cast to ``dtype``, and what casts.

    The function of each container compares these with its items itself: a call of ``cast`` for each takes 0.2 us.
    """
    first, second = CASTABLE - {dtype}
    return torch.Tensor, first, second, TO[dtype]


def _cast_of(kind: type, dtype: torch.dtype, cast: _Cast, other: _Cast) -> _Cast:
    """Return a function that casts values of exactly the type ``kind``, and gives all others to ``other``.

    ``cast`` casts what is in them.
    """
    if kind is torch.Tensor:
        return _of_tensor(dtype, other)
    if issubclass(kind, ATOMS):
        return lambda value: value if type(value) is kind else other(value)
    if kind is list or kind is tuple or (issubclass(kind, tuple) and hasattr(kind, "_make")):
        return _of_sequence(kind, dtype, cast, other)
    if kind is dict:
        return _of_dict(dtype, cast, other)
    if not issubclass(kind, (torch.Tensor, tuple, list, dict, collections.UserDict)) and _is_plain_dataclass(kind):
        return _of_dataclass(kind, dtype, cast, other)
    return lambda value: cast_floats(value, dtype) if type(value) is kind else other(value)


def _of_tensor(dtype: torch.dtype, other: _Cast) -> _Cast:
    tensor, first, second, to = _of_tensors(dtype)

    def cast_tensor(value: Any) -> Any:
        if type(value) is not tensor:
            return other(value)
        given = value.dtype
        return to(value) if given is first or given is second else value

    return cast_tensor


def _of_sequence(kind: Any, dtype: torch.dtype, cast: _Cast, other: _Cast) -> _Cast:
    tensor, first, second, to = _of_tensors(dtype)
    make: Callable[[list[Any]], Any] = getattr(kind, "_make", kind)

    def cast_sequence(value: Any) -> Any:
        if type(value) is not kind:
            return other(value)
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


def _of_dict(dtype: torch.dtype, cast: _Cast, other: _Cast) -> _Cast:
    tensor, first, second, to = _of_tensors(dtype)

    def cast_dict(value: Any) -> Any:
        if type(value) is not dict:
            return other(value)
        made, same = {}, True
        for key in value:  # 0.8 us less than over items(), which makes a tuple for each
            item = value[key]
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
    if not dataclasses.is_dataclass(kind) or not dataclasses.fields(kind):
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


def _of_dataclass(kind: type, dtype: torch.dtype, cast: _Cast, other: _Cast) -> _Cast:
    """Return a function that is written for the fields of ``kind``, as ``dataclasses`` writes an ``__init__``.

    It takes 1 to 2 us less than a loop over their names. The copy is made without ``__init__`` and
    ``__post_init__``: their checks ran when the value was made.
    """
    names = [field.name for field in dataclasses.fields(kind)]
    setter: Any = kind.__setattr__
    # Python makes no dict for an object whose values are assigned so. A frozen one refuses that.
    put = "made.{0} = new_{0}" if setter is object.__setattr__ else "set_attribute(made, {0!r}, new_{0})"
    source = f"""
def cast_dataclass(value):
    if type(value) is not kind:
        return other(value)
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
    known: dict[str, Any] = {"tensor": tensor, "first": first, "second": second, "to": to, "cast": cast, "other": other}
    known.update(kind=kind, new_object=object.__new__, set_attribute=object.__setattr__)
    known.update(in_general=lambda value: cast_floats(value, dtype))
    exec(compile(source, f"<casts of {kind.__qualname__}>", "exec"), known)
    made: _Cast = known["cast_dataclass"]
    return made
