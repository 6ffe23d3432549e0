"""One pass over a value, in which some of what is in it is put in the place of other: tensors by their casts.

What changes in nothing stays the same object. A container in which something changes is copied
(:mod:`xamp.ground.forms`) and never written to. What is one object in the value is one object in the copy, and a
container may hold itself. The compiler cannot trace this; :mod:`xamp.ground.traced_walk` is what it traces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from xamp.errors import StateError
from xamp.ground.compiler import keep_eager
from xamp.ground.forms import (
    ATOMS,
    Form,
    attributes_of,
    fill,
    items_of,
    known_form,
    make_shell,
    make_tuple,
    set_attribute,
)

__all__ = ["ATOM_KINDS", "CASTS", "COPIES", "INSIDE", "Copied", "Leaf", "Walk", "note_copy", "refuse_proxy"]

INSIDE = "look inside"
"""What a :data:`Leaf` returns for a value that it has no answer for: what is in it is looked at."""

Leaf = Callable[[Any], Any]
"""Gives what is to stand in the place of a value, which may be the value itself, or :data:`INSIDE`."""

ATOM_KINDS = frozenset(ATOMS)

_MISSING, _OPEN = object(), object()  # the latter is what is made of a container that is being looked into

CASTS, COPIES = 0, 1
"""The keys of :attr:`Walk.made`, which are no ids, under which a walk that notes has lists of what it cast, with the
casts, and of the mutable containers that it copied, as :class:`Copied`."""


class Copied(NamedTuple):
    """A container that was copied, and what was in the copy at first.

    Attributes:
        old: the container.
        new: its copy.
        form: of both.
        items: of the copy, a list or dict; None for an object.
        attributes: of the copy, as it stores them.
    """

    old: Any
    new: Any
    form: Form
    items: Any
    attributes: dict[str, Any]


class Walk:
    """A pass over one value, or over several that may share parts.

    Args:
        leaf: what is to be put in the place of which value.
        made: what earlier passes came to, by the ids of the values, which must live.
        notes: tensors that are replaced and containers that are copied are noted in ``made``; see :data:`CASTS`.

    Attributes:
        changed: something was put in the place of something else.
        made: what is put in the place of each value, by its id; a container that stays is its own.
        seen: the values that ``made`` has, so that their ids stay theirs.
        left: objects of types that are not looked into, and containers that cannot be copied.
    """

    __slots__ = ("_leaf", "_notes", "changed", "left", "made", "seen")

    def __init__(self, leaf: Leaf, made: dict[int, Any] | None = None, *, notes: bool = False) -> None:
        self._leaf, self._notes = leaf, notes
        self.changed = False
        self.made: dict[int, Any] = ({CASTS: [], COPIES: []} if notes else {}) if made is None else made
        self.seen: list[Any] = []
        self.left: list[Any] = []

    def run(self, value: Any) -> Any:
        """Return ``value`` with what the leaves say in the places of what is in it.

        Raises:
            StateError: ``value`` holds a ``torch.fx`` proxy: the traced graph would not contain the policy.
        """
        found = self.of(value)
        return found if self.changed else value

    keep_eager(run)

    def of(self, value: Any) -> Any:
        """Return what is put in the place of ``value``, as :meth:`run` does, for a part of a value."""
        kind = type(value)
        if kind in ATOM_KINDS:
            return value
        key = id(value)
        found = self.made.get(key, _MISSING)
        if found is _OPEN:
            found = self._within_itself(value)
        if found is not _MISSING:
            return found
        new = self._leaf(value)
        if new is INSIDE:
            form = known_form(kind)
            new = self._look_inside(value, form) if form.name else self._leave(value)
        elif new is value:
            return value
        else:
            self.changed = True
            if self._notes and isinstance(value, torch.Tensor):
                self.made[CASTS].append((value, new))
        self.made[key] = new
        self.seen.append(value)
        return new

    def _leave(self, value: Any) -> Any:
        refuse_proxy(value)
        if not isinstance(value, ATOMS):
            self.left.append(value)
        return value

    def _within_itself(self, value: Any) -> Any:
        """Return what is put in the place of a container that is found in itself; it is filled later."""
        form = known_form(type(value))
        if form.name in ("tuple", "struct"):
            self.left.append(value)
            return value
        shell = self.made[id(value)] = make_shell(value, form)
        return shell

    def _look_inside(self, value: Any, form: Form) -> Any:
        key, of = id(value), self.of
        self.made[key] = _OPEN
        before = items_of(value, form)
        items: Any = None
        same = True
        if before is not None:
            items = (
                {k: of(item) for k, item in before.items()} if form.name == "dict" else [of(item) for item in before]
            )
            same = all(new is old for new, old in zip(_values(items), _values(before), strict=True))
        attributes = {}
        if not form.plain:
            for name, item in attributes_of(value, form).items():
                if (new := of(item)) is not item:
                    attributes[name] = new
        shell = self.made[key]
        if same and not attributes and shell is _OPEN:
            return value
        try:
            return self._copy(value, form, items, attributes, None if shell is _OPEN else shell)
        except Exception:  # it is a class of somebody's that refuses
            self.left.append(value)
            return value

    def _copy(self, value: Any, form: Form, items: Any, attributes: dict[str, Any], made: Any) -> Any:
        """Return a copy of ``value``, or ``made`` if it was begun, with these items, and these attributes changed."""
        if form.name in ("tuple", "struct"):
            made = make_tuple(value, form, items)
        elif form.plain and made is None and not self._notes:
            return items
        else:
            made = make_shell(value, form) if made is None else made
            fill(made, form, items)
        for name, item in attributes.items():
            set_attribute(made, form, name, item)
        if self._notes:
            note_copy(self.made, value, made, form)
        return made


def note_copy(made: dict[int, Any], old: Any, new: Any, form: Form) -> None:
    """Note in ``made``, the dict of a walk that notes, that the container ``old`` was copied; see :data:`COPIES`."""
    if form.base is tuple and form.plain:  # nobody writes into it
        return
    items = None if form.base is tuple else items_of(new, form)
    made[COPIES].append(Copied(old, new, form, items, attributes_of(new, form, stored=True)))


def _values(items: Any) -> Any:
    return items.values() if isinstance(items, dict) else items


def refuse_proxy(value: Any) -> None:
    """Refuse a ``torch.fx`` proxy.

    Raises:
        StateError: ``value`` is one.
    """
    if isinstance(value, torch.fx.Proxy):
        raise StateError(
            "torch.fx.symbolic_trace on a model that xamp.initialize manages would leave its policy out of the graph. "
            "Trace the plain model and initialize the GraphModule, or use torch.export.export."
        )
