"""The casts of :func:`xamp.ground.containers.cast_floats` to one dtype, with a function made for each type it meets.

``cast_floats`` asks what a value is each time. Here the question is asked once for each type, which saves 1 to 10 us
for each forward that returns a container. What is rare (subclasses, attributes, a container in itself) goes the way of
:mod:`xamp.ground.walk`. The compiler cannot trace this; it traces ``cast_floats``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from xamp.ground.containers import ATOMS, CASTABLE, cast_floats, leaf_of
from xamp.ground.forms import form_of, known_form
from xamp.ground.walk import ATOM_KINDS, CASTS, COPIES, OPEN, Walk, WithinItself

__all__ = ["TO", "Caster"]

_Cast = Callable[[Any], Any]
_CastItem = Callable[[Any, dict[int, Any]], Any]
"""Casts an item of a container; the dict has what earlier items came to, by their ids, as :class:`Walk` has it."""

_MOST_TYPES = 128
"""A forward may make a class at each call, so no more types than these are remembered."""

TO: dict[torch.dtype, _Cast] = {
    torch.float32: torch.Tensor.float,
    torch.float16: torch.Tensor.half,
    torch.bfloat16: torch.Tensor.bfloat16,
}
"""The method that casts to each dtype; each is 0.4 us faster than ``Tensor.to``."""

_OF_COPIES = ("__copy__", "__new__", "__slots__")

NO_ATTRIBUTES: dict[str, Any] = {}


class Caster:
    """Casts values to one dtype.

    Args:
        dtype: the dtype; None leaves values as they are.
        cast: what to do, for a value and the dtype. Only ``cast_floats`` is made anew for each type.
        left: called with an object that is not looked into, or cannot be copied.
        lends: what is cast and copied is noted in the dict that :meth:`cast_item` gets; see :mod:`xamp.casting.loans`.

    Attributes:
        cast: does it for one value. It is the function for the type of the value that came last: a forward mostly
            returns one type. It gives a value of another type to the function for that, which then takes its place.
    """

    __slots__ = ("_by_type", "_dtype", "_leaf", "_left", "_lends", "cast")

    def __init__(
        self,
        dtype: torch.dtype | None,
        cast: Callable[[Any, torch.dtype], Any] = cast_floats,
        left: Callable[[Any], object] = lambda _: None,
        *,
        lends: bool = False,
    ) -> None:
        self._dtype, self._lends = dtype, lends
        self._left = left
        self._by_type: dict[type, Callable[..., Any]] = {}
        self.cast: _Cast = self._cast_other
        self._leaf = None if dtype is None else leaf_of(cast, dtype)
        if dtype is None:
            self.cast = lambda value: value
        elif self._leaf is None:
            self.cast = lambda value: cast(value, dtype)
        elif cast is not cast_floats:
            self.cast = self._cast_any

    def _cast_other(self, value: Any) -> Any:
        """Cast a value of another type than the one that came last."""
        self.cast = found = self._of(type(value))
        return found(value)

    def cast_item(self, value: Any, seen: dict[int, Any]) -> Any:
        """Cast an item of a container that is neither a plain tensor nor of a type that holds none."""
        key = id(value)
        found = seen.get(key)
        if found is None:
            seen[key] = OPEN
            found = seen[key] = self._of(type(value))(value, seen)
        elif found is OPEN:
            raise WithinItself
        return found

    def _cast_any(self, value: Any, seen: dict[int, Any] | None = None) -> Any:
        """Cast a value of any type."""
        assert self._leaf is not None, "else values are left as they are"
        walk = Walk(self._leaf, seen, notes=self._lends)
        found = walk.run(value)
        if seen is not None:
            seen[id(walk.seen)] = walk.seen  # the ids in it stay theirs
        for each in walk.left:
            self._left(each)
        return found

    def _of(self, kind: type) -> Callable[..., Any]:
        """Return the function that casts values of exactly the type ``kind``."""
        found = self._by_type.get(kind)
        if found is None:
            if len(self._by_type) >= _MOST_TYPES:
                self._by_type.clear()
            found = self._by_type[kind] = self._make(kind)
        return found

    def _make(self, kind: type) -> Callable[..., Any]:
        """Return a function that casts values of exactly the type ``kind``, and gives all others to ``_cast_other``."""
        assert self._dtype is not None, "else values are left as they are"
        made = _Maker(self._dtype, self.cast_item, self._cast_other, self._cast_any, self._lends)
        if kind is torch.Tensor:
            return made.of_tensor()
        if issubclass(kind, ATOMS):
            return made.of_kind(kind, lambda value, _: value)
        if kind is list or kind is tuple or _is_named_tuple(kind):
            return made.of_sequence(kind)
        if kind is dict:
            return made.of_dict()
        if _is_plain_dataclass(kind):
            return made.of_dataclass(kind)
        if form_of(kind) or issubclass(kind, (torch.Tensor, torch.fx.Proxy)):
            return made.of_kind(kind, self._cast_any)
        return made.of_kind(kind, self._leave)

    def _leave(self, value: Any, _: Any = None) -> Any:
        """Return an object that is not looked into."""
        self._left(value)
        return value


def _is_named_tuple(kind: type) -> bool:
    """Whether ``kind`` is a named tuple whose values have nothing but their fields, and give them in their order."""
    if not issubclass(kind, tuple) or not hasattr(kind, "_make"):
        return False
    return kind.__iter__ is tuple.__iter__ and not kind.__dictoffset__


def _is_plain_dataclass(kind: type) -> bool:
    """Whether ``kind`` is a dataclass whose values are in ``__dict__``, and copies are made as Python makes them."""
    if form_of(kind) != "object" or not dataclasses.is_dataclass(kind) or not dataclasses.fields(kind):
        return False
    own = [each for each in kind.__mro__ if each is not object]
    if any(name in vars(each) for each in own for name in _OF_COPIES):
        return False
    found = [vars(each).get(field.name) for each in own for field in dataclasses.fields(kind)]
    return not any(hasattr(value, "__set__") for value in found)


_FIELD = """
        if type(old_{name}) is tensor:
            given = old_{name}.dtype
            if given is first or given is second:
                key = id(old_{name})
                if key in seen:
                    new_{name} = seen[key]
                else:
                    seen[key] = new_{name} = to(old_{name})
                    if lends:
                        seen[CASTS].append((old_{name}, new_{name}))
            else:
                new_{name} = old_{name}
        else:
            new_{name} = old_{name} if type(old_{name}) in atoms else cast(old_{name}, seen)"""


class _Maker:
    """Makes the functions of a :class:`Caster`.

    Each casts values of one type, and gives all others to ``other``. The function of a container looks itself whether
    an item is a plain tensor or of a type that holds none: a call for each takes 0.2 us. ``cast`` casts all other
    items, and ``in_general`` containers that are more than their items.
    """

    def __init__(
        self, dtype: torch.dtype, cast: _CastItem, other: _Cast, in_general: Callable[..., Any], lends: bool
    ) -> None:
        self.first, self.second = CASTABLE - {dtype}
        self.to, self.cast, self.other, self.in_general, self.lends = TO[dtype], cast, other, in_general, lends

    def of_kind(self, kind: type, cast: Callable[..., Any]) -> Callable[..., Any]:
        other = self.other

        def cast_kind(value: Any, seen: dict[int, Any] | None = None) -> Any:
            return cast(value, seen) if type(value) is kind else other(value)

        return cast_kind

    def of_tensor(self) -> Callable[..., Any]:
        tensor, first, second, to, other = torch.Tensor, self.first, self.second, self.to, self.other

        def cast_tensor(value: Any, _: dict[int, Any] | None = None) -> Any:
            if type(value) is not tensor:
                return other(value)
            given = value.dtype
            return to(value) if given is first or given is second else value

        return cast_tensor

    def of_sequence(self, kind: Any) -> Callable[..., Any]:
        tensor, first, second, to, atoms = torch.Tensor, self.first, self.second, self.to, ATOM_KINDS
        cast, other, in_general, lends = self.cast, self.other, self.in_general, self.lends
        make: Callable[[list[Any]], Any] = getattr(kind, "_make", kind)
        form = known_form(list) if lends and kind is list else None

        def cast_sequence(value: Any, seen: dict[int, Any] | None = None) -> Any:
            outermost = seen is None
            if seen is None:
                if type(value) is not kind:
                    return other(value)
                seen = {id(value): OPEN}
            items, same = [], True
            try:
                for item in value:
                    if type(item) is tensor:
                        given = item.dtype
                        if given is first or given is second:
                            key, same = id(item), False
                            if key in seen:
                                item = seen[key]
                            else:
                                seen[key] = new = to(item)
                                if lends:
                                    seen[CASTS].append((item, new))
                                item = new
                    elif type(item) not in atoms and (new := cast(item, seen)) is not item:
                        item, same = new, False
                    items.append(item)
            except WithinItself:
                if outermost:
                    return in_general(value)
                raise
            if same:
                return value
            made = make(items)
            if form is not None:
                seen[COPIES].append((value, made, form, items, NO_ATTRIBUTES))
            return made

        return cast_sequence

    def of_dict(self) -> Callable[..., Any]:
        tensor, first, second, to, atoms = torch.Tensor, self.first, self.second, self.to, ATOM_KINDS
        cast, other, in_general, lends = self.cast, self.other, self.in_general, self.lends
        form = known_form(dict)

        def cast_dict(value: Any, seen: dict[int, Any] | None = None) -> Any:
            outermost = seen is None
            if seen is None:
                if type(value) is not dict:
                    return other(value)
                seen = {id(value): OPEN}
            made, same = {}, True
            try:
                for key in value:  # 0.8 us less than over items(), which makes a tuple for each
                    item = value[key]
                    if type(item) is tensor:
                        given = item.dtype
                        if given is first or given is second:
                            at, same = id(item), False
                            if at in seen:
                                item = seen[at]
                            else:
                                seen[at] = new = to(item)
                                if lends:
                                    seen[CASTS].append((item, new))
                                item = new
                    elif type(item) not in atoms and (new := cast(item, seen)) is not item:
                        item, same = new, False
                    made[key] = item
            except WithinItself:
                if outermost:
                    return in_general(value)
                raise
            if same:
                return value
            if lends:
                seen[COPIES].append((value, made, form, made.copy(), NO_ATTRIBUTES))
            return made

        return cast_dict

    def of_dataclass(self, kind: type) -> Callable[..., Any]:
        """Return a function that is written for the fields of ``kind``, as ``dataclasses`` writes an ``__init__``.

        It takes 1 to 2 us less than a loop over their names. The copy is made without ``__init__`` and
        ``__post_init__``: their checks ran when the value was made.
        """
        names = [field.name for field in dataclasses.fields(kind)]
        setter: Any = kind.__setattr__
        # Python makes no dict for an object whose values are assigned so. A frozen one refuses that.
        put = "made.{0} = new_{0}" if setter is object.__setattr__ else "set_attribute(made, {0!r}, new_{0})"
        source = f"""
def cast_dataclass(value, seen=None):
    outermost = seen is None
    if outermost:
        if type(value) is not kind:
            return other(value)
        seen = {{id(value): OPEN}}
    fields = value.__dict__
    if len(fields) != {len(names)}:  # it has other values too, or a field is only in the class
        return in_general(value, None if outermost else seen)
    try:
        {"; ".join(f"old_{name} = fields[{name!r}]" for name in names)}
    except KeyError:
        return in_general(value, None if outermost else seen)
    try:{"".join(_FIELD.format(name=name) for name in names)}
    except WithinItself:
        if outermost:
            return in_general(value)
        raise
    if {" and ".join(f"new_{name} is old_{name}" for name in names)}:
        return value
    made = new_object(kind)
    {"; ".join(put.format(name) for name in names)}
    if lends:
        seen[COPIES].append((value, made, form, None, dict(made.__dict__)))
    return made
"""
        known: dict[str, Any] = {
            name: getattr(self, name) for name in ("first", "second", "to", "cast", "other", "lends")
        }
        known.update(tensor=torch.Tensor, atoms=ATOM_KINDS, in_general=self.in_general, OPEN=OPEN)
        known.update(kind=kind, new_object=object.__new__, set_attribute=object.__setattr__)
        known.update(
            WithinItself=WithinItself, CASTS=CASTS, COPIES=COPIES, form=known_form(kind) if self.lends else None
        )
        exec(compile(source, f"<casts of {kind.__qualname__}>", "exec"), known)
        made: Callable[..., Any] = known["cast_dataclass"]
        return made
