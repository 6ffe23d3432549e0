"""What kinds of containers there are: what is in one, how a copy of it is made, and how it is written to.

All of it is raw: what a class defines for access (``__init__``, ``__setitem__``, ``__setattr__``, ``__reduce__``) is
not called, so a copy is what the original is, also where that refuses to be written to. Only ``__copy__`` is asked, and
a field of a dataclass that is a descriptor.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import dis
import types
from collections.abc import Callable
from typing import Any

import torch

__all__ = [
    "ATOMS",
    "Form",
    "attributes_of",
    "drop_attribute",
    "fields_of",
    "fill",
    "form_of",
    "has_dict",
    "holds_itself",
    "is_made_of_fields",
    "items_of",
    "known_form",
    "make_shell",
    "make_tuple",
    "makes_itself_its_dict",
    "set_attribute",
    "slots_of",
    "values_in_dict",
]

ATOMS = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)
"""Types of values that hold no tensor."""

_WRAPPERS = (collections.UserDict, collections.UserList)
"""Objects that keep their items in an attribute."""


def form_of(kind: type) -> str:
    """Return how values of the type ``kind`` hold others.

    Returns:
        ``"list"``, ``"dict"`` or ``"tuple"`` for these types and their subclasses, ``"struct"`` for what
        ``torch.max(x, dim)`` returns and its like, ``"object"`` for dataclasses, ``UserDict`` and ``UserList``, whose
        values are attributes; ``""`` for a type that is not looked into.
    """
    if issubclass(kind, tuple):
        return "struct" if hasattr(kind, "n_sequence_fields") else "tuple"
    for base in (list, dict):
        if issubclass(kind, base):
            return base.__name__
    if issubclass(kind, (torch.Tensor, torch.nn.Module, type)):
        return ""
    return "object" if issubclass(kind, _WRAPPERS) or dataclasses.is_dataclass(kind) else ""


def fields_of(kind: type) -> tuple[str, ...]:
    """Return the names of the fields of a dataclass; of another type none."""
    return tuple(field.name for field in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else ()


def slots_of(kind: type) -> tuple[str, ...]:
    """Return the names of attributes that are in no ``__dict__``, the ``default_factory`` of a ``defaultdict`` too."""
    slots = {
        name: None
        for each in kind.__mro__
        for name, member in vars(each).items()
        if isinstance(member, types.MemberDescriptorType)
    }
    return tuple(slots)


def has_dict(kind: type) -> bool:
    """Return whether values of the type ``kind`` have a ``__dict__``."""
    return kind.__dictoffset__ != 0


def makes_itself_its_dict(kind: type) -> bool:
    """Return whether ``kind`` is a dict that says ``self.__dict__ = self`` as it is made; the compiler does not."""
    made = (vars(each).get(name) for each in kind.__mro__ for name in ("__init__", "__new__"))
    codes = [each.__code__ for each in made if isinstance(each, types.FunctionType)]
    stores = (each for code in codes for each in dis.get_instructions(code) if each.opname == "STORE_ATTR")
    return issubclass(kind, dict) and any(each.argval == "__dict__" for each in stores)


def is_made_of_fields(kind: type) -> bool:
    """Return whether ``kind`` is a named tuple whose constructor takes its fields."""
    maker = next(each for each in kind.__mro__ if "__new__" in vars(each))
    return issubclass(kind, tuple) and "_fields" in vars(maker)


_run_while_traced: tuple[Any, ...] = (
    form_of,
    fields_of,
    slots_of,
    has_dict,
    makes_itself_its_dict,
    is_made_of_fields,
)
for _constant in _run_while_traced:  # by the compiler
    _constant._dynamo_marked_constant = True


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """How values of one type are copied.

    Attributes:
        name: as :func:`form_of` says.
        kind: the type.
        base: the type of Python's that has the items; ``object`` for ``"object"``.
        fields: the names of a dataclass's fields.
        slots: as :func:`slots_of` says.
        plain: there are items only.
        copied_by: the class's own ``__copy__``; None if it has none.
        make: of a list or tuple whose values are nothing but their items: makes one of its items; else None.
        is_dict: it is ``dict`` itself.
        in_dict: the names of the fields, of a dataclass whose values are in ``__dict__`` and whose copies are made as
            Python makes them; else None.
    """

    name: str
    kind: type
    base: Any
    fields: tuple[str, ...]
    slots: tuple[str, ...]
    plain: bool
    copied_by: Callable[[Any], Any] | None
    make: Callable[[list[Any]], Any] | None
    is_dict: bool
    in_dict: frozenset[str] | None


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


def _form(kind: type) -> Form:
    bases: tuple[type, ...] = (collections.defaultdict, collections.OrderedDict, dict, list, tuple, object)
    base = next(base for base in bases if issubclass(kind, base))
    own = getattr(kind, "__copy__", None)
    is_own = isinstance(own, types.FunctionType) and own.__module__ != "collections"
    name, fields = form_of(kind), fields_of(kind)
    plain = kind in (list, tuple, dict) or name == "struct"
    make: Any = kind if kind in (list, tuple) else getattr(kind, "_make", None) if _is_named_tuple(kind) else None
    in_dict = frozenset(fields) if name == "object" and fields and _is_plain_dataclass(kind, fields) else None
    own = own if is_own else None
    return Form(name, kind, base, fields, slots_of(kind), plain, own, make, kind is dict, in_dict)


def _is_named_tuple(kind: type) -> bool:
    """Whether ``kind`` is a named tuple whose values have nothing but their fields, and give them in their order."""
    return issubclass(kind, tuple) and not kind.__dictoffset__ and kind.__iter__ is tuple.__iter__


def _is_plain_dataclass(kind: type, fields: tuple[str, ...]) -> bool:
    own = [vars(each) for each in kind.__mro__ if each is not object]
    if any(name in each for each in own for name in ("__copy__", "__new__", "__slots__")):
        return False
    return not any(hasattr(each.get(name), "__set__") for each in own for name in fields)


def values_in_dict(value: Any) -> dict[str, Any]:
    """Return the ``__dict__`` of ``value``, whatever its class does on access; an empty one where it has none."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else {}


def holds_itself(value: Any) -> bool:
    """Tell whether ``value`` is a dict whose items are its attributes (``self.__dict__ = self``)."""
    return values_in_dict(value) is value


def attributes_of(value: Any, form: Form, *, stored: bool = False) -> dict[str, Any]:
    """Return all attributes of ``value``: the fields of a dataclass, what is in ``__dict__``, and slots.

    Args:
        value: what has them.
        form: of its type.
        stored: only what ``value`` itself stores: no field that is a descriptor, or that only the class has.
    """
    if form.plain:
        return {}
    found = {}
    for name in () if stored else form.fields:
        if hasattr(value, name):
            found[name] = getattr(value, name)
    own = values_in_dict(value)
    if own is not value:
        for name, item in own.items():
            found.setdefault(name, item)
    for name in form.slots:
        if name not in found:
            try:
                found[name] = object.__getattribute__(value, name)
            except AttributeError:
                continue
    return found


def set_attribute(value: Any, form: Form, name: str, item: Any) -> None:
    """Set an attribute that :func:`attributes_of` names, of a frozen dataclass too."""
    if name in form.fields or name in form.slots:
        object.__setattr__(value, name, item)
    else:
        values_in_dict(value)[name] = item


def drop_attribute(value: Any, form: Form, name: str) -> None:
    """Delete an attribute; see :func:`set_attribute`."""
    if name in form.slots:
        object.__delattr__(value, name)
    else:
        values_in_dict(value).pop(name, None)


def items_of(value: Any, form: Form) -> Any:
    """Return the items of ``value``: a new list or dict; None for ``"object"``."""
    if form.name == "object":
        return None
    return dict(form.base.items(value)) if form.name == "dict" else list(form.base.__iter__(value))


def make_shell(value: Any, form: Form) -> Any:
    """Return a copy of ``value``, which is no tuple, with its attributes; items may be missing.

    Raises:
        Exception: values of this type cannot be copied.
    """
    if form.copied_by is not None:
        return copy.copy(value)
    try:
        made = form.base.__new__(form.kind)
    except TypeError:  # a class written in C stands between
        return copy.copy(value)
    copy_attributes(value, made, form)
    return made


def copy_attributes(value: Any, made: Any, form: Form) -> None:
    """Give ``made`` what ``value`` has in ``__dict__`` and in slots."""
    own = values_in_dict(value)
    if own is value:
        object.__setattr__(made, "__dict__", made)
    elif own:
        values_in_dict(made).update(own)
    for name in form.slots:
        try:
            object.__setattr__(made, name, object.__getattribute__(value, name))
        except AttributeError:  # it is not set, or read only
            continue


def fill(made: Any, form: Form, items: Any) -> None:
    """Give ``made`` the items of a list or dict."""
    if form.name == "list":
        list.__setitem__(made, slice(None), items)
    elif form.name == "dict":
        put = form.base.__setitem__
        for key, item in items.items():
            put(made, key, item)


def make_tuple(value: Any, form: Form, items: list[Any]) -> Any:
    """Return a tuple of the type of ``value``, with its attributes, that has ``items``."""
    if form.name == "struct":
        return form.kind(items)
    made: Any = tuple.__new__(form.kind, items)
    if not form.plain:
        copy_attributes(value, made, form)
    return made
