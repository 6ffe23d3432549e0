"""The parts of a container: how they are read, copied and written.

In code that runs all of it is raw: what a class defines for access (``__init__``, ``__setitem__``, ``__setattr__``,
``__reduce__``) is not called, so a copy is what the original is, also where that refuses to be written to. Only
``__copy__`` is asked, and a field of a dataclass that is a descriptor. :class:`Traced` does the same as far as the
compiler traces it.
"""

from __future__ import annotations

import collections
import copy
from collections.abc import Sequence
from typing import Any

from xamp.torch_compat.torch_features import traces_attributes
from xamp.values.forms import ATOMS, Form

__all__ = ["Raw", "Traced", "make_shell"]


class Raw:
    """How containers are read, made and written to."""

    @staticmethod
    def items_of(value: Any, form: Form) -> Any:
        """Return the items of ``value``: a new list or dict; None for ``"object"``."""
        if form.name == "object":
            return None
        return dict(form.base.items(value)) if form.name == "dict" else list(form.base.__iter__(value))

    @staticmethod
    def attributes_of(value: Any, form: Form, *, stored: bool = False) -> dict[str, Any]:
        """Return all attributes of ``value``: the fields of a dataclass, what is in ``__dict__``, and slots.

        Args:
            value: what has them.
            form: of its type.
            stored: only what ``value`` itself stores: no field that is a descriptor, or that only the class has.
        """
        if form.items_only:
            return {}
        found: dict[str, Any] = {}
        if not stored:
            _read_attributes(value, form.fields, found)
        own = values_in_dict(value)
        if own is not value:
            for name, item in own.items():
                found.setdefault(name, item)
        _read_attributes(value, form.slots, found)
        return found

    @staticmethod
    def copy_of(value: Any, form: Form, items: Any, attributes: dict[str, Any], begun: Any = None) -> Any:
        """Return a copy of ``value`` that has ``items``, and ``attributes`` in place of those of these names.

        Args:
            value: a container.
            form: of its type.
            items: a new list or dict, which may become the copy; None for ``"object"``.
            attributes: those that change.
            begun: what :func:`make_shell` made of ``value``, to be filled; None: nothing yet.

        Raises:
            Exception: values of this type cannot be copied.
        """
        if form.name == "struct":
            return form.kind(items)
        if form.items_only and begun is None:
            return tuple(items) if form.base is tuple else items
        if form.base is tuple:
            made: Any = tuple.__new__(form.kind, items)
            _copy_attributes(value, made, form)
        else:
            made = make_shell(value, form) if begun is None else begun
            if form.name == "list":
                list.__setitem__(made, slice(None), items)
            elif form.name == "dict":
                Raw.put_items(made, form, items)
        for name, item in attributes.items():
            Raw.set_attribute(made, form, name, item)
        return made

    @staticmethod
    def same(one: Any, other: Any) -> bool:
        """Return whether two values are one object."""
        return one is other

    @staticmethod
    def put_list(value: Any, items: list[Any], *, after: bool = False) -> None:
        """Put ``items`` into a list, in place of what is in it or ``after`` that."""
        at = list.__len__(value) if after else 0  # its class may mean something else by len
        list.__setitem__(value, slice(at, None), items)

    @staticmethod
    def put_items(value: Any, form: Form, items: dict[Any, Any]) -> None:
        """Put ``items`` into a dict."""
        put = form.base.__setitem__
        for key, item in items.items():
            put(value, key, item)

    @staticmethod
    def drop_item(value: Any, form: Form, key: Any) -> None:
        """Delete an item of a dict, which has it."""
        form.base.__delitem__(value, key)

    @staticmethod
    def set_attribute(value: Any, form: Form, name: str, item: Any) -> None:
        """Set an attribute that :meth:`attributes_of` names, of a frozen dataclass too."""
        if name in form.fields or name in form.slots:
            object.__setattr__(value, name, item)
        else:
            values_in_dict(value)[name] = item

    @staticmethod
    def drop_attribute(value: Any, form: Form, name: str) -> None:
        """Delete an attribute; see :meth:`set_attribute`."""
        if name in form.slots:
            object.__delattr__(value, name)
        else:
            values_in_dict(value).pop(name, None)


class Traced(Raw):
    """The same in code that the compiler traces, in every release of torch that xamp takes.

    It writes into lists by their own methods, makes an ``OrderedDict`` by its constructor, and, before torch 2.13,
    lists no attributes: there, attributes of a dataclass that are no fields are not in the copy. Of a form it reads
    names and flags only: the compiler has no guard for a type of Python's own that a constant holds.
    """

    @staticmethod
    def items_of(value: Any, form: Form) -> Any:
        """See :meth:`Raw.items_of`."""
        if form.name == "object":
            return None
        if form.name == "dict":
            return {key: item for key, item in dict.items(value)}  # noqa: C416  # older releases trace no dict(view)
        return [value[at] for at in range(len(value))]  # not over the value: its class may give other items

    @staticmethod
    def attributes_of(value: Any, form: Form, *, stored: bool = False) -> dict[str, Any]:  # noqa: ARG004
        """Return the attributes of ``value`` as far as the compiler lists them."""
        kind = type(value)
        found: dict[str, Any] = {}
        if form.items_only or kind is collections.OrderedDict or kind is collections.defaultdict:
            return found
        for name in (*form.fields, *form.slots):
            if hasattr(value, name):
                found[name] = getattr(value, name)
        if kind is collections.UserDict or kind is collections.UserList:
            found["data"] = value.data
        elif traces_attributes() and form.has_dict and value.__dict__ is not value:
            for name, item in value.__dict__.items():
                found[name] = item
        return found

    @staticmethod
    def copy_of(value: Any, form: Form, items: Any, attributes: dict[str, Any], begun: Any = None) -> Any:  # noqa: ARG004
        """See :meth:`Raw.copy_of`."""
        kind = type(value)
        if kind is tuple:
            return tuple(items)
        if form.items_only:
            return items if form.name != "struct" else kind(items)
        if kind is collections.OrderedDict:
            return collections.OrderedDict(items)
        if kind is collections.defaultdict:
            return collections.defaultdict(value.default_factory, items)
        made = _traced_shell(value, form, items)
        for name, item in {**Traced.attributes_of(value, form), **attributes}.items():
            object.__setattr__(made, name, item)
        return made

    @staticmethod
    def same(one: Any, other: Any) -> bool:
        """Return whether two values are one, as far as the compiler can tell: it cannot of tuples and numbers."""
        if isinstance(one, ATOMS):
            return type(one) is type(other) and bool(one == other)
        if isinstance(one, tuple) and isinstance(other, tuple):
            if len(one) != len(other):
                return False
            equal = True
            for at, item in enumerate(one):
                equal = equal and Traced.same(item, other[at])
            return equal
        return one is other

    @staticmethod
    def put_list(value: Any, items: list[Any], *, after: bool = False) -> None:
        """See :meth:`Raw.put_list`."""
        value[len(value) if after else 0 :] = items

    @staticmethod
    def put_items(value: Any, form: Form, items: dict[Any, Any]) -> None:  # noqa: ARG004
        """See :meth:`Raw.put_items`."""
        if type(value) is collections.OrderedDict:
            value.update(items)
            return
        put = collections.OrderedDict.__setitem__ if isinstance(value, collections.OrderedDict) else dict.__setitem__
        for key, item in items.items():
            put(value, key, item)

    @staticmethod
    def drop_item(value: Any, form: Form, key: Any) -> None:  # noqa: ARG004
        """See :meth:`Raw.drop_item`."""
        value.pop(key)

    @staticmethod
    def set_attribute(value: Any, form: Form, name: str, item: Any) -> None:  # noqa: ARG004
        """See :meth:`Raw.set_attribute`."""
        object.__setattr__(value, name, item)

    @staticmethod
    def drop_attribute(value: Any, form: Form, name: str) -> None:  # noqa: ARG004
        """See :meth:`Raw.drop_attribute`."""
        delattr(value, name)


def _traced_shell(value: Any, form: Form, items: Any) -> Any:
    """Return a container of the type of ``value`` that has ``items``, and no attributes."""
    kind: Any = type(value)
    if kind is collections.UserDict:
        return collections.UserDict()
    if form.name == "tuple":
        # Before torch 2.13 the compiler makes a named tuple of one that it has made in no other way.
        return kind(*items) if form.takes_fields else tuple.__new__(kind, items)
    if form.name == "list":
        made = list.__new__(kind)
        made[:] = items
        return made
    if form.name != "dict":
        return object.__new__(kind)
    if isinstance(value, collections.OrderedDict):
        made = collections.OrderedDict.__new__(kind)
    elif isinstance(value, collections.defaultdict):
        made = collections.defaultdict.__new__(kind)
    else:
        made = dict.__new__(kind)
    Traced.put_items(made, form, items)
    if form.is_its_dict:
        made.__dict__ = made
    return made


def values_in_dict(value: Any) -> dict[str, Any]:
    """Return the ``__dict__`` of ``value``, whatever its class does on access; an empty one where it has none."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else {}


def _read_attributes(value: Any, names: Sequence[str], found: dict[str, Any]) -> None:
    """Put those attributes of ``value`` that it has, and ``found`` has not, into ``found``."""
    for name in names:
        if name not in found:
            try:
                found[name] = object.__getattribute__(value, name)
            except AttributeError:
                continue


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
    _copy_attributes(value, made, form)
    return made


def _copy_attributes(value: Any, made: Any, form: Form) -> None:
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
