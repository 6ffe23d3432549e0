"""Writes into the caller's own objects what a forward wrote into the copies of its arguments.

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
import functools
import logging
from collections.abc import Callable
from operator import is_
from typing import Any

import torch

from xamp.torch_compat.compiler import keep_eager
from xamp.values.log import Once, say
from xamp.values.walk import CASTS, COPIES, INSIDE, Copied, TracedWalk, Walk
from xamp.values.ways import Raw, Traced, values_in_dict

__all__ = ["Lent", "prepare_traced", "take_back", "take_back_traced"]


Lent = dict[int, Any]
"""What was made of the arguments of one call: :attr:`xamp.values.walk.Walk.made`, with its records."""


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
    walk: Walk | None = None
    for each in lent[COPIES]:
        if _is_as_it_was(each):
            continue
        if walk is None:
            homes = {id(new): old for old, new in lent[CASTS]}
            walk = Walk(_stay, {**homes, **{id(copied.new): copied.old for copied in lent[COPIES]}})
        _guarded(name, said, each.old, _write_back, each, Raw, functools.partial(_home, walk))


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


def _home(walk: Walk, value: Any) -> Any:
    """Return the original of what was cast or copied."""
    return walk.of(value)[0]


def _stay(value: Any) -> Any:
    return value if isinstance(value, torch.Tensor) else INSIDE


def _is_as_it_was(each: Copied) -> bool:
    """Return whether nothing was written into a copy."""
    new, form, before = each.new, each.form, each.items
    if form.items_only:
        return _holds_the_same(new, before)
    if form.in_dict is not None:
        return _holds_the_same(values_in_dict(new), each.attributes)
    if before is not None and not _holds_the_same(Raw.items_of(new, form), before):
        return False
    return _holds_the_same(Raw.attributes_of(new, form, stored=True), each.attributes)


def _holds_the_same(one: Any, other: Any) -> bool:
    """Return whether two lists or dicts have the same objects in them."""
    if len(one) != len(other) or not all(map(is_, one, other)):
        return False
    return isinstance(one, list) or all(map(is_, one.values(), other.values()))


def _write_back(each: Copied, ways: type[Raw], home: Callable[[Any], Any]) -> None:
    """Do to a container what was done to its copy.

    Args:
        each: both.
        ways: how they are read and written.
        home: gives the original of what was cast or copied.
    """
    old, new, form = each.old, each.new, each.form
    if form.name == "list":
        _write_list(old, ways.items_of(new, form), each.items, ways, home)
    elif form.name == "dict":
        _write_dict(each, ways.items_of(new, form), ways, home)
    before, after = each.attributes, ways.attributes_of(new, form, stored=True)
    for name in before:
        if name not in after:
            ways.drop_attribute(old, form, name)
    for name, item in after.items():
        if name not in before or not ways.same(before[name], item):
            ways.set_attribute(old, form, name, home(item))


def _write_list(
    old: list[Any], after: list[Any], before: list[Any], ways: type[Raw], home: Callable[[Any], Any]
) -> None:
    size = len(before)
    stays = len(after) >= size
    for at, item in enumerate(before):
        stays = stays and ways.same(item, after[at])
    if not stays:
        ways.put_list(old, [home(item) for item in after])
    elif len(after) > size:  # appended only: what others appended meanwhile stays
        ways.put_list(old, [home(item) for item in after[size:]], after=True)


def _write_dict(each: Copied, after: dict[Any, Any], ways: type[Raw], home: Callable[[Any], Any]) -> None:
    old, form, before = each.old, each.form, each.items
    held = ways.items_of(old, form)
    for key in before:
        if key not in after and key in held:
            ways.drop_item(old, form, key)
    changed = {k: home(item) for k, item in after.items() if k not in before or not ways.same(before[k], item)}
    ways.put_items(old, form, changed)
    held = ways.items_of(old, form)
    order = [key for key in held if key in after]
    if len(order) == len(held) == len(after) and not all(map(is_, order, after)):  # it was put in another order
        for key in after:
            ways.drop_item(old, form, key)
            ways.put_items(old, form, {key: held[key]})


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

    def leaf(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            for old, new, _ in walk.casts:
                if new is item:
                    return old
            return item
        if not isinstance(item, tuple):
            for each in walk.copies:
                if each.new is item:
                    return each.old
        return INSIDE

    def home(value: Any) -> Any:
        return TracedWalk(leaf).run(value)

    for old, new, argument in walk.casts:
        _write_in_graph(old, new, argument)
    for each in walk.copies:
        _write_back(each, Traced, home)
