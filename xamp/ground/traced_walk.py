"""The pass of :mod:`xamp.ground.walk` in a form that the compiler traces in every release of torch that xamp takes.

The compiler knows no ids of containers, so what was copied is looked up in a list, and no tuple, which it cannot tell
from another one. It writes into lists by their own methods, makes an ``OrderedDict`` by its constructor, and, before
torch 2.13, lists no attributes: there, attributes of a dataclass that are no fields are not in the copy.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import torch

from xamp.ground.forms import (
    ATOMS,
    fields_of,
    form_of,
    has_dict,
    is_made_of_fields,
    makes_itself_its_dict,
    slots_of,
)
from xamp.ground.torch_features import compares_containers, traces_attributes
from xamp.ground.walk import INSIDE, Leaf, refuse_proxy

__all__ = ["TracedCopy", "TracedWalk", "put_items", "same", "stored_in", "write_attribute"]


class TracedCopy:
    """A container that a walk copied, and what was in the copy at first; see :class:`xamp.ground.walk.Copied`."""

    def __init__(self, old: Any, new: Any, form: str, items: Any, attributes: dict[str, Any]) -> None:
        self.old = old
        self.new = new
        self.form = form
        self.items = items
        self.attributes = attributes


class TracedWalk:
    """A pass over one value, or over several that may share containers.

    Args:
        leaf: what is to be put in the place of which value.
        left: called with the type of an object that is not looked into.
        is_result: nothing is written back into what is copied, so a container that stands twice may be copied twice
            where the compiler cannot tell.

    Attributes:
        copied: the mutable containers that were copied.
        tensors: the tensors that were cast, each with its cast and with ``argument``.
        argument: the name of the argument that is cast now.
    """

    def __init__(self, leaf: Leaf, left: Callable[[type], object] | None = None, *, is_result: bool = False) -> None:
        self._leaf = leaf
        self._left = left
        self._finds_again = not is_result or compares_containers()
        self.copied: list[TracedCopy] = []
        self.tensors: list[tuple[Any, Any, str]] = []
        self.argument = ""

    def run(self, value: Any, argument: str = "") -> Any:
        """Return ``value``, an argument of this name, with what the leaves say in the places of what is in it."""
        self.argument = argument
        return self.of(value)[0]

    def of(self, value: Any) -> tuple[Any, bool]:
        """Return what is put in the place of ``value``, and whether that is something else."""
        if isinstance(value, torch.Tensor):
            for old, new, _ in self.tensors:
                if old is value:
                    return new, True
            new = self._leaf(value)
            if new is value:
                return value, False
            self.tensors.append((value, new, self.argument))
            return new, True
        if isinstance(value, ATOMS):
            return value, False
        new = self._leaf(value)
        if new is not INSIDE:
            return new, new is not value
        form = form_of(type(value))
        if form == "":
            refuse_proxy(value)
            if self._left is not None:
                self._left(type(value))
            return value, False
        if self._finds_again and form not in ("tuple", "struct"):
            for each in self.copied:
                if each.old is value:
                    return each.new, True
        return self._look_inside(value, form)

    def _look_inside(self, value: Any, form: str) -> tuple[Any, bool]:
        changed = False
        items: Any = None
        if form == "dict":
            items = {}
            for key, item in dict.items(value):
                items[key], other = self.of(item)
                changed = changed or other
        elif form != "object":
            items = []
            for at in range(len(value)):  # not over the value: its class may give other items
                new, other = self.of(value[at])
                items.append(new)
                changed = changed or other
        attributes = {}
        stored = stored_in(value, form)
        for name, item in stored.items():
            new, other = self.of(item)
            if other:
                attributes[name] = new
        if not changed and not attributes:
            return value, False
        made = _made(value, form, items, stored)
        for name, item in attributes.items():
            write_attribute(made, name, item)
        if form not in ("tuple", "struct"):
            self.copied.append(TracedCopy(value, made, form, items, {**stored, **attributes}))
        return made, True


def same(one: Any, other: Any) -> bool:
    """Return whether two values are one object, as far as the compiler can tell: it cannot of tuples and numbers."""
    if isinstance(one, ATOMS):
        return type(one) is type(other) and bool(one == other)
    if isinstance(one, tuple) and isinstance(other, tuple):
        if len(one) != len(other):
            return False
        equal = True
        for at, item in enumerate(one):
            equal = equal and same(item, other[at])
        return equal
    return one is other


def stored_in(value: Any, form: str) -> dict[str, Any]:
    """Return the attributes of ``value`` as far as the compiler lists them."""
    kind = type(value)
    found: dict[str, Any] = {}
    if kind in (tuple, list, dict, collections.OrderedDict, collections.defaultdict) or form == "struct":
        return found
    for name in fields_of(kind):
        if hasattr(value, name):
            found[name] = getattr(value, name)
    for name in slots_of(kind):
        if hasattr(value, name):
            found[name] = getattr(value, name)
    if kind is collections.UserDict or kind is collections.UserList:
        found["data"] = value.data
    elif traces_attributes() and has_dict(kind) and value.__dict__ is not value:
        for name, item in value.__dict__.items():
            found[name] = item
    return found


def write_attribute(value: Any, name: str, item: Any) -> None:
    """Set an attribute, of a frozen dataclass too."""
    object.__setattr__(value, name, item)


def put_items(value: Any, items: dict[Any, Any]) -> None:
    """Put ``items`` into a dict, whatever its class does on ``[]``."""
    if type(value) is collections.OrderedDict:
        value.update(items)
        return
    put = collections.OrderedDict.__setitem__ if isinstance(value, collections.OrderedDict) else dict.__setitem__
    for key, item in items.items():
        put(value, key, item)


def _made(value: Any, form: str, items: Any, stored: dict[str, Any]) -> Any:
    """Return a container of the type of ``value``, with these items and attributes."""
    kind = type(value)
    if kind is list or kind is dict:
        return kind(items)
    if kind is tuple:
        return tuple(items)
    if form == "struct":
        return kind(items)
    if kind is collections.OrderedDict:
        return collections.OrderedDict(items)
    if kind is collections.defaultdict:
        return collections.defaultdict(value.default_factory, items)
    if kind is collections.UserDict:
        return collections.UserDict(items)
    if form == "tuple":
        made = _make_tuple(kind, items)
    elif form == "list":
        made = list.__new__(kind)
        made[:] = items
    elif form == "dict":
        if isinstance(value, collections.OrderedDict):
            made = collections.OrderedDict.__new__(kind)
        elif isinstance(value, collections.defaultdict):
            made = collections.defaultdict.__new__(kind)
        else:
            made = dict.__new__(kind)
        put_items(made, items)
    else:
        made = object.__new__(kind)
    if makes_itself_its_dict(kind):
        made.__dict__ = made
    for name, item in stored.items():
        write_attribute(made, name, item)
    return made


def _make_tuple(kind: Any, items: list[Any]) -> Any:
    # Before torch 2.13 the compiler makes a named tuple of one that it has made in no other way.
    if is_made_of_fields(kind):
        return kind(*items)
    return tuple.__new__(kind, items)
