"""What a forward wrote into copies of its arguments comes back to the caller's own objects.

A level that casts arguments gives the forward a copy of each container that holds a tensor to be cast, and the cast of
each such tensor. The caller owns the originals, and the forward the copies while it runs. When it ends, by an error
too, :func:`take_back` compares each copy with what was in it at first: what was added, replaced or removed is written
into the original as the forward gave it, in its dtype, and where the forward put a copy or a cast, its original is put.
What was not written to stays as it was. A tensor that was written in place shows it by its version: the elements that
differ are written into the original.

The compiler traces the same steps by :func:`take_back_traced`. Where it knows while it traces that an operator fails,
nothing is written, as without xamp.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from operator import is_
from typing import Any

import torch

from xamp.ground.compiler import keep_eager
from xamp.ground.forms import Form, attributes_of, drop_attribute, items_of, set_attribute
from xamp.ground.log import Once, say
from xamp.ground.traced_walk import TracedCopy, TracedWalk, put_items, same, stored_in, write_attribute
from xamp.ground.walk import CASTS, COPIES, INSIDE, Walk

__all__ = ["Lent", "prepare_traced", "take_back", "take_back_traced"]


Lent = dict[int, Any]
"""What was made of the arguments of one call: :attr:`xamp.ground.walk.Walk.made`, with its notes."""


def take_back(lent: Lent, name: Callable[[Any], str], said: Once) -> None:
    """Write into the caller's objects what the forward wrote into their casts and copies.

    Args:
        lent: what was made of the arguments.
        name: returns the name of the argument that holds an object.
        said: the names that a message has named.
    """
    for old, new in lent[CASTS]:
        if new._version:
            _guarded(name, said, old, _write_tensor, old, new)
    home: Walk | None = None
    for each in lent[COPIES]:
        if _is_as_it_was(*each[1:]):
            continue
        if home is None:
            homes = {id(new): old for old, new, *_ in (*lent[CASTS], *lent[COPIES])}
            home = Walk(_stay, homes)
        _guarded(name, said, each[0], _write_container, *each, home.of)


keep_eager(take_back)


def _guarded(name: Callable[[Any], str], said: Once, old: Any, write: Callable[..., None], *args: Any) -> None:
    """Call ``write``; where that fails, say once what the user can do."""
    try:
        write(*args)
    except Exception as error:
        argument = name(old)
        if said.first(argument):
            say(
                "the forward wrote into its argument %s, which was cast, and that cannot be written back into the "
                "caller's object (%s: %s). To give the forward that object itself, exempt it: "
                "initialize(..., cast_model_inputs=(%r,)).",
                argument,
                type(error).__name__,
                error,
                argument,
                level=logging.WARNING,
            )


def _write_tensor(old: torch.Tensor, new: torch.Tensor) -> None:
    """Write the elements of ``new``, a cast of ``old`` that was written to, into ``old`` where they differ.

    Raises:
        RuntimeError: torch does not write into ``old``, or ``new`` has another shape now.
    """
    with torch.no_grad() if old.is_leaf and old.requires_grad else contextlib.nullcontext():
        if new.shape != old.shape:
            raise RuntimeError(f"its shape was {tuple(old.shape)} and is {tuple(new.shape)}")
        differ = new != old.to(new.dtype)
        old.copy_(torch.where(differ, new.to(old.dtype), old))


def _stay(value: Any) -> Any:
    return value if isinstance(value, torch.Tensor) else INSIDE


def _same_dict(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    return len(one) == len(other) and all(map(is_, one, other)) and all(map(is_, one.values(), other.values()))


def _is_as_it_was(new: Any, form: Form, before: Any, attributes: dict[str, Any]) -> bool:
    """Return whether nothing was written into the copy ``new``."""
    if form.plain:  # its own class cannot have changed what it does
        if form.name == "dict":
            return _same_dict(new, before)
        return len(new) == len(before) and all(map(is_, new, before))
    if before is not None:
        items = items_of(new, form)
        if form.name == "dict":
            if not _same_dict(items, before):
                return False
        elif len(items) != len(before) or not all(map(is_, items, before)):
            return False
    return _same_dict(attributes_of(new, form, stored=True), attributes)


def _write_container(
    old: Any, new: Any, form: Form, before: Any, attributes: dict[str, Any], home: Callable[[Any], Any]
) -> None:
    """Do to ``old`` what was done to its copy; ``home`` gives the original of what was cast or copied.

    Args:
        old: the caller's container.
        new: its copy.
        form: of both.
        before: the items that the copy had at first.
        attributes: the attributes that it had.
        home: see above.
    """
    if form.name == "list":
        _write_list(old, items_of(new, form), before, home)
    elif before is not None:
        _write_dict(old, items_of(new, form), before, form, home)
    after = attributes_of(new, form, stored=True)
    for name in attributes.keys() - after.keys():
        drop_attribute(old, form, name)
    for name, item in after.items():
        if name not in attributes or attributes[name] is not item:
            set_attribute(old, form, name, home(item))


def _write_list(old: list[Any], after: list[Any], before: list[Any], home: Callable[[Any], Any]) -> None:
    size = len(before)
    if len(after) >= size and all(map(is_, after, before)):  # appended only: what others appended meanwhile stays
        list.extend(old, map(home, after[size:]))
    else:
        list.__setitem__(old, slice(None), map(home, after))


def _write_dict(old: Any, after: Any, before: Any, form: Form, home: Callable[[Any], Any]) -> None:
    put, drop = form.base.__setitem__, form.base.__delitem__
    held = items_of(old, form)
    for key in before:
        if key not in after and key in held:
            drop(old, key)
    for key, item in after.items():
        if key not in before or before[key] is not item:
            put(old, key, home(item))
    held = items_of(old, form)
    if held.keys() == after.keys() and not all(map(is_, held, after)):  # it was put in another order
        for key in after:
            drop(old, key)
            put(old, key, held[key])


# ---------------------------------------------------------------- in code that the compiler traces


_said_in_graphs = Once()


def _write_in_graph(old: torch.Tensor, new: torch.Tensor, argument: str) -> torch.Tensor:
    """Write into ``old`` what was written in place into ``new``, its cast, where versions of tensors are seen."""
    if new._version:
        _guarded(lambda _: argument, _said_in_graphs, old, _write_tensor, old, new)
    return old


keep_eager(_write_in_graph)


def prepare_traced() -> None:
    """Tell the compiler not to look into what needs the versions of tensors."""
    import torch.compiler

    torch.compiler.allow_in_graph(_write_in_graph)


prepare_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]  # the compiler runs it while it traces


def take_back_traced(walk: TracedWalk) -> None:
    """Do what :func:`take_back` does, in code that the compiler traces."""
    for old, new, argument in walk.tensors:
        _write_in_graph(old, new, argument)
    for each in walk.copied:
        _take_back_copy(each, walk)


def _home(value: Any, walk: TracedWalk) -> Any:
    """Return ``value`` with the originals of copies and casts in their places."""

    def leaf(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            for old, new, _ in walk.tensors:
                if new is item:
                    return old
            return item
        if not isinstance(item, tuple):
            for each in walk.copied:
                if each.new is item:
                    return each.old
        return INSIDE

    return TracedWalk(leaf).run(value)


def _take_back_copy(each: TracedCopy, walk: TracedWalk) -> None:
    old, new, before = each.old, each.new, each.items
    if each.form == "list":
        if not same(tuple(new), tuple(before)):
            old[:] = [_home(item, walk) for item in new]
    elif each.form == "dict":
        for key in before:
            if key not in new:
                old.pop(key)
        items = dict.items(new)  # its class may give other ones
        put_items(old, {k: _home(v, walk) for k, v in items if k not in before or not same(before[k], v)})
        order = [key for key, _ in dict.items(new)]
        if [key for key, _ in dict.items(old)] != order:
            for key in order:
                put_items(old, {key: old.pop(key)})
    after = stored_in(new, each.form)
    for name in each.attributes:
        if name not in after:
            delattr(old, name)
    for name, item in after.items():
        if name not in each.attributes or not same(each.attributes[name], item):
            write_attribute(old, name, _home(item, walk))
