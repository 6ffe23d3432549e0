"""What kinds of containers there are, as a table by types; :mod:`xamp.values.ways` reads, copies and writes them."""

from __future__ import annotations

import collections
import dataclasses
import dis
import types
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["ATOMS", "Form", "known_form"]

ATOMS = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)
"""Types of values that hold no tensor."""

_WRAPPERS = (collections.UserDict, collections.UserList)
"""Objects that keep their items in an attribute."""


@dataclasses.dataclass(eq=False)  # not frozen: the compiler of torch 2.7 would guard each attribute
class Form:
    """How values of one type hold others.

    Attributes:
        name: ``"list"``, ``"dict"`` or ``"tuple"`` for these types and their subclasses, ``"struct"`` for what
            ``torch.max(x, dim)`` returns and its like, ``"object"`` for dataclasses, ``UserDict`` and ``UserList``,
            whose values are attributes; ``""`` for a type that is not looked into.
        kind: the type.
        base: the type of Python's that has the items; ``object`` for ``"object"``.
        fields: the names of a dataclass's fields.
        slots: names of attributes that are in no ``__dict__``, the ``default_factory`` of a ``defaultdict`` too.
        items_only: there are items only.
        copied_by: the class's own ``__copy__``; None if it has none.
        make: of a list or tuple whose values are nothing but their items: makes one of its items; else None.
        in_dict: the names of the fields, of a dataclass whose values are in ``__dict__`` and whose copies are made as
            Python makes them; else None.
        is_its_dict: it is a dict that says ``self.__dict__ = self`` as it is made; the compiler does not show that.
        takes_fields: it is a named tuple whose constructor takes its fields.
        has_dict: values have a ``__dict__``.
    """

    name: str
    kind: type
    base: Any
    fields: tuple[str, ...]
    slots: tuple[str, ...]
    items_only: bool
    copied_by: Callable[[Any], Any] | None
    make: Callable[[list[Any]], Any] | None
    in_dict: frozenset[str] | None
    is_its_dict: bool
    takes_fields: bool
    has_dict: bool


_MOST_TYPES = 128
"""A forward may make a class at each call, so no more types than these are remembered."""

_known: dict[type, Form] = {}


def known_form(kind: type) -> Form:
    """Return the :class:`Form` of the type ``kind``, which is remembered."""
    found = _known.get(kind)
    if found is None:
        if len(_known) >= _MOST_TYPES:
            _known.clear()
        found = _known[kind] = _form(kind)
    return found


known_form._dynamo_marked_constant = True  # type: ignore[attr-defined]  # the compiler runs it while it traces


def _form(kind: type) -> Form:
    bases: tuple[type, ...] = (collections.defaultdict, collections.OrderedDict, dict, list, tuple, object)
    own = getattr(kind, "__copy__", None)
    is_own = isinstance(own, types.FunctionType) and own.__module__ != "collections"
    name = _name_of(kind)
    fields = tuple(field.name for field in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else ()
    named = issubclass(kind, tuple) and hasattr(kind, "_make")
    simple = named and not kind.__dictoffset__ and kind.__iter__ is tuple.__iter__  # type: ignore[attr-defined]
    maker = next(each for each in kind.__mro__ if "__new__" in vars(each))
    return Form(
        name,
        kind,
        base=next(base for base in bases if issubclass(kind, base)),
        fields=fields,
        slots=tuple(
            dict.fromkeys(
                name
                for each in kind.__mro__
                for name, member in vars(each).items()
                if isinstance(member, types.MemberDescriptorType)
            )
        ),
        items_only=kind in (list, tuple, dict) or name == "struct",
        copied_by=own if is_own else None,
        make=kind if kind in (list, tuple) else getattr(kind, "_make", None) if simple else None,
        in_dict=frozenset(fields) if name == "object" and fields and _is_ordinary_dataclass(kind, fields) else None,
        is_its_dict=issubclass(kind, dict) and _makes_itself_its_dict(kind),
        takes_fields=issubclass(kind, tuple) and "_fields" in vars(maker),
        has_dict=kind.__dictoffset__ != 0,
    )


def _name_of(kind: type) -> str:
    if issubclass(kind, tuple):
        return "struct" if hasattr(kind, "n_sequence_fields") else "tuple"
    for base in (list, dict):
        if issubclass(kind, base):
            return base.__name__
    if issubclass(kind, (torch.Tensor, torch.nn.Module, type)):
        return ""
    return "object" if issubclass(kind, _WRAPPERS) or dataclasses.is_dataclass(kind) else ""


def _is_ordinary_dataclass(kind: type, fields: tuple[str, ...]) -> bool:
    own = [vars(each) for each in kind.__mro__ if each is not object]
    if any(name in each for each in own for name in ("__copy__", "__new__", "__slots__")):
        return False
    return not any(hasattr(each.get(name), "__set__") for each in own for name in fields)


def _makes_itself_its_dict(kind: type) -> bool:
    made = (vars(each).get(name) for each in kind.__mro__ for name in ("__init__", "__new__"))
    codes = [each.__code__ for each in made if isinstance(each, types.FunctionType)]
    stores = (each for code in codes for each in dis.get_instructions(code) if each.opname == "STORE_ATTR")
    return any(each.argval == "__dict__" for each in stores)
