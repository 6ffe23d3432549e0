"""One pass over a nested value, which replaces some of its parts: tensors by their casts.

What changes in nothing stays the same object. A container in which something changes is copied
(:mod:`xamp.values.ways`) and never written to. What is one object in the value is one object in the copy, and a
container may hold itself. The compiler traces :class:`TracedWalk`, which differs in how it finds again what was copied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from xamp.errors import StateError
from xamp.torch_compat.compiler import keep_eager
from xamp.torch_compat.torch_features import compares_containers
from xamp.values.forms import ATOMS, Form, known_form
from xamp.values.ways import Raw, Traced, make_shell

__all__ = ["CASTS", "COPIES", "INSIDE", "Copied", "Leaf", "TracedWalk", "Walk"]

INSIDE = "look inside"
"""What a :data:`Leaf` returns for a value that it has no answer for: the walk goes on with what is in it."""

Leaf = Callable[[Any], Any]
"""Gives what is to stand in the place of a value, which may be the value itself, or :data:`INSIDE`."""

_MISSING, _OPEN = object(), object()  # the latter is what is made of a container that is being looked into

CASTS, COPIES = 0, 1
"""The keys of :attr:`Walk.made`, which are no ids, under which a walk that records has lists of what it cast, with the
casts, and of the mutable containers that it copied, as :class:`Copied`."""


class Copied:
    """A container that was copied, and what was in the copy at first.

    Attributes:
        old: the container.
        new: its copy.
        form: of both.
        items: of the copy, a list or dict; None for a tuple or an object.
        attributes: of the copy, as it stores them.
    """

    def __init__(self, old: Any, new: Any, form: Form, items: Any, attributes: dict[str, Any]) -> None:
        self.old = old
        self.new = new
        self.form = form
        self.items = items
        self.attributes = attributes


def record_of_copy(old: Any, new: Any, form: Form, ways: type[Raw] = Raw) -> Copied:
    """Return the record of ``new``, the copy of ``old``, with what is in it now."""
    items = None if form.name == "tuple" else ways.items_of(new, form)
    return Copied(old, new, form, items, ways.attributes_of(new, form, stored=True))


class Walk:
    """A pass over one value, or over several that may share parts.

    Args:
        leaf: what is to be put in the place of which value.
        made: what earlier passes came to, by the ids of the values, which must live.
        records: tensors that are replaced and containers that are copied are recorded in ``made``; see :data:`CASTS`.

    Attributes:
        changed: something was put in the place of something else.
        made: what is put in the place of each value, by its id; a container that stays is its own.
        left: objects of types that are not looked into, and containers that cannot be copied.
        ways: how containers are read and made.
    """

    ways: type[Raw] = Raw

    def __init__(self, leaf: Leaf, made: dict[int, Any] | None = None, *, records: bool = False) -> None:
        self._leaf, self._records = leaf, records
        self.changed = False
        self.made: dict[int, Any] = ({CASTS: [], COPIES: []} if records else {}) if made is None else made
        self._seen: list[Any] = []  # what ``made`` has, so that the ids stay theirs
        self.left: list[Any] = []

    def run(self, value: Any) -> Any:
        """Return ``value`` with its parts replaced, as the leaves say.

        Raises:
            StateError: ``value`` holds a ``torch.fx`` proxy: the traced graph would not contain the policy.
        """
        found, _ = self.of(value)
        return found if self.changed else value

    keep_eager(run)

    def of(self, value: Any) -> tuple[Any, bool]:
        """Return the replacement of ``value``, a part of a value, and whether it is another object."""
        if isinstance(value, ATOMS):
            return value, False
        found = self._found(value)
        if found is not None:
            return found
        new = self._leaf(value)
        if new is INSIDE:
            form = known_form(type(value))
            if form.name:
                return self._look_inside(value, form)
            _refuse_proxy(value)
            self._leave(value)
            self._remember(value, value)  # once, however often it stands there
            return value, False
        if new is value:
            return value, False
        self.changed = True
        self._remember(value, new)
        if isinstance(value, torch.Tensor):
            self._record_cast(value, new)
        return new, True

    def _found(self, value: Any) -> tuple[Any, bool] | None:
        """Return the replacement of ``value`` that was found before, if one was."""
        new = self.made.get(id(value), _MISSING)
        if new is _MISSING:
            return None
        if new is _OPEN:  # it is in itself: it is filled later
            form = known_form(type(value))
            if form.base is tuple:
                self._leave(value)
                return value, False
            new = self.made[id(value)] = make_shell(value, form)
        return new, new is not value

    def _remember(self, value: Any, new: Any) -> None:
        self.made[id(value)] = new
        self._seen.append(value)

    def _leave(self, value: Any) -> None:
        self.left.append(value)

    def _record_cast(self, value: Any, new: Any) -> None:
        if self._records:
            self.made[CASTS].append((value, new))

    def _look_inside(self, value: Any, form: Form) -> tuple[Any, bool]:
        self._remember(value, _OPEN)
        items, attributes, changed = self._parts(value, form)
        begun = self.made[id(value)]
        new = value
        if changed or begun is not _OPEN:
            try:
                new = self.ways.copy_of(value, form, items, attributes, None if begun is _OPEN else begun)
                if self._records and (form.base is not tuple or not form.items_only):  # else nobody writes into it
                    self.made[COPIES].append(record_of_copy(value, new, form))
            except Exception:  # it is a class of somebody's that refuses
                self._leave(value)
        self.made[id(value)] = new
        return new, new is not value

    def _parts(self, value: Any, form: Form) -> tuple[Any, dict[str, Any], bool]:
        """Return the items and the attributes for a copy, of the latter those that change, and whether any does."""
        before, changed = self.ways.items_of(value, form), False
        items: Any = before
        if form.name == "dict":
            items = {}
            for key, item in before.items():
                items[key], other = self.of(item)
                changed = changed or other
        elif before is not None:
            items = []
            for item in before:
                new, other = self.of(item)
                items.append(new)
                changed = changed or other
        attributes = {}
        for name, item in self.ways.attributes_of(value, form).items():
            new, other = self.of(item)
            if other:
                attributes[name] = new
                changed = True
        return items, attributes, changed


class TracedWalk(Walk):
    """A pass in code that the compiler traces.

    The compiler knows no ids of containers, so what was copied is looked up in a list, and no tuple, which it cannot
    tell from another one.

    Args:
        leaf: what is to be put in the place of which value.
        left: called with the type of an object that is not looked into.
        is_result: nothing is written back into what is copied, so a container that stands twice may be copied twice
            where the compiler cannot tell.

    Attributes:
        casts: the tensors that were cast, each with its cast and with the name of the argument that holds it.
        copies: the mutable containers that were copied.
    """

    ways = Traced

    def __init__(self, leaf: Leaf, left: Callable[[type], object] | None = None, *, is_result: bool = False) -> None:
        self._leaf = leaf
        self._left = left
        self._finds_again = not is_result or compares_containers()
        self.changed = False
        self.copies: list[Copied] = []
        self.casts: list[tuple[Any, Any, str]] = []
        self._argument = ""

    def run(self, value: Any, argument: str = "") -> Any:
        """Return ``value``, an argument of this name, with its parts replaced, as the leaves say."""
        self._argument = argument
        return self.of(value)[0]

    def _found(self, value: Any) -> tuple[Any, bool] | None:
        if isinstance(value, torch.Tensor):
            for old, new, _ in self.casts:
                if old is value:
                    return new, True
        return None

    def _remember(self, value: Any, new: Any) -> None:
        pass

    def _leave(self, value: Any) -> None:
        if self._left is not None:
            self._left(type(value))

    def _record_cast(self, value: Any, new: Any) -> None:
        self.casts.append((value, new, self._argument))

    def _look_inside(self, value: Any, form: Form) -> tuple[Any, bool]:
        mutable = form.name not in ("tuple", "struct")
        if mutable and self._finds_again:
            for each in self.copies:
                if each.old is value:
                    return each.new, True
        items, attributes, changed = self._parts(value, form)
        if not changed:
            return value, False
        new = self.ways.copy_of(value, form, items, attributes)
        if mutable:
            self.copies.append(record_of_copy(value, new, form, self.ways))
        return new, True


def _refuse_proxy(value: Any) -> None:
    """Refuse a ``torch.fx`` proxy.

    Raises:
        StateError: ``value`` is one.
    """
    if isinstance(value, torch.fx.Proxy):
        raise StateError(
            "torch.fx.symbolic_trace on a model that xamp.initialize manages would leave its policy out of the graph. "
            "Trace the plain model and initialize the GraphModule, or use torch.export.export."
        )
