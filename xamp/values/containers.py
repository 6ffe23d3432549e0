"""Casts the floating tensors in the arguments and results of ``forward``, and keeps the type of every container.

If nothing in a container changes, the same object is returned. If something changes, the container is copied and never
written to, so that the caller's batch does not change. :mod:`xamp.values.walk` says how. In code that runs, what is
common goes through a loop here, which takes a third of the time.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from xamp.torch_compat.compiler import keep_eager
from xamp.values.forms import ATOMS, known_form
from xamp.values.walk import CASTS, COPIES, INSIDE, Copied, Leaf, TracedWalk, Walk

__all__ = [
    "ATOMS",
    "CASTABLE",
    "TO",
    "Uncommon",
    "cast_any",
    "cast_floats",
    "common_caster",
    "leaf_of",
    "result_caster",
    "sparing",
    "tensors_in",
]

CASTABLE = frozenset({torch.float16, torch.bfloat16, torch.float32})
"""The dtypes that xamp casts from and to. It never casts float64, complex, integer and 8-bit tensors."""

TO: dict[torch.dtype, Callable[[Any], Any]] = {
    torch.float32: torch.Tensor.float,
    torch.float16: torch.Tensor.half,
    torch.bfloat16: torch.Tensor.bfloat16,
}
"""The method that casts to each dtype; each is 0.4 us faster than ``Tensor.to``."""

Cast = Callable[[Any, torch.dtype], Any]


def _leaf_of_floats(dtype: torch.dtype, device_type: str | None = None) -> Leaf:
    def leaf(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return INSIDE
        if value.dtype not in CASTABLE or value.dtype == dtype or device_type not in (None, value.device.type):
            return value
        return value.to(dtype)

    return leaf


def _leaf_of_any(dtype: torch.dtype) -> Leaf:
    def leaf(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(dtype) if value.dtype.is_floating_point else value
        if callable(getattr(value, "to", None)) and not isinstance(value, (torch.fx.Proxy, type)):
            return value.to(dtype)
        return INSIDE

    return leaf


def leaf_of(cast: Cast, dtype: torch.dtype) -> Leaf | None:
    """Return the function by which ``cast``, :func:`cast_floats` or :func:`cast_any`, casts one value; else None."""
    if cast is cast_floats:
        return _leaf_of_floats(dtype)
    return _leaf_of_any(dtype) if cast is cast_any else None


def sparing(leaf: Leaf, types: tuple[type, ...]) -> Leaf:
    """Return a leaf that does as ``leaf`` does, but leaves all objects of ``types`` as they are."""

    def spare(value: Any) -> Any:
        return value if isinstance(value, types) else leaf(value)

    return spare if types else leaf


def _run(leaf: Leaf, value: Any) -> Any:
    if torch.compiler.is_compiling():
        return TracedWalk(leaf).run(value)
    return Walk(leaf).run(value)


def cast_floats(value: Any, dtype: torch.dtype, device_type: str | None = None) -> Any:
    """Return ``value`` with every fp16, bf16 and fp32 tensor in it cast to ``dtype``.

    Args:
        value: a tensor or any nesting of tuples, lists, dicts, their subclasses, named tuples, ``UserDict`` and
            dataclasses, with their attributes. Anything else in it (integers, strings, numpy arrays, objects) stays as
            it is.
        dtype: ``torch.float16``, ``torch.bfloat16`` or ``torch.float32``.
        device_type: cast only the tensors on a device of this type; None casts all.

    Raises:
        StateError: ``value`` is a ``torch.fx`` proxy: the traced graph would not contain the policy.
    """
    return _run(_leaf_of_floats(dtype, device_type), value)


def cast_any(value: Any, dtype: torch.dtype, device_type: str | None = None) -> Any:  # noqa: ARG001
    """Cast as :func:`cast_floats` does, but also float64 tensors, and objects with a method ``to`` by calling it."""
    return _run(_leaf_of_any(dtype), value)


class Uncommon(Exception):
    """A value holds something that only a walk casts."""


_OPEN = object()


def common_caster(
    dtype: torch.dtype, left: Callable[[Any], object] = lambda _: None, *, lends: bool = False
) -> Callable[[Any, dict[int, Any]], Any]:
    """Return a function that casts common containers as :func:`cast_floats` does.

    These are lists, tuples, dicts, named tuples and dataclasses. In one are ordinary tensors, values that are not
    looked into, and more of these; else the function raises :class:`Uncommon`. Its second argument has what was made of
    earlier items, by their ids, so that a walk can go on from there.

    Args:
        dtype: the dtype to which tensors are cast.
        left: called with an object that is not looked into.
        lends: what is cast and copied is recorded in the second argument, as a walk that records does.
    """
    tensor, atoms, to, known, new_object = torch.Tensor, frozenset(ATOMS), TO[dtype], known_form, object.__new__
    first, second = CASTABLE - {dtype}
    by_walk = (torch.Tensor, torch.fx.Proxy)  # of classes of their own
    no_attributes: dict[str, Any] = {}
    put: Callable[[Any, str, Any], None] = object.__setattr__  # Python makes no dict for an object that is filled so

    def cast(value: Any, seen: dict[int, Any]) -> Any:
        form = known(type(value))
        items = value
        if form.kind is dict:
            items = value.values()
        elif form.in_dict is not None:
            if value.__dict__.keys() != form.in_dict:  # it has other values too, or a field is only in the class
                raise Uncommon
            items = value.__dict__.values()
        elif form.make is None:
            if form.name or issubclass(form.kind, by_walk):
                raise Uncommon
            if not issubclass(form.kind, ATOMS):
                left(value)
            return value
        made, same = [], True
        for item in items:
            if type(item) is tensor:  # asked here, for a call takes 0.2 us
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
            elif type(item) not in atoms:
                key = id(item)
                if key not in seen:
                    seen[key] = _OPEN
                    seen[key] = cast(item, seen)
                if (new := seen[key]) is _OPEN:  # it is in itself
                    raise Uncommon
                if new is not item:
                    item, same = new, False
            made.append(item)
        if same:
            return value
        if form.make is not None:
            copied = form.make(made)
            if lends and form.base is not tuple:
                seen[COPIES].append(Copied(value, copied, form, made, no_attributes))
        elif form.kind is dict:
            copied = dict(zip(value, made, strict=True))
            if lends:
                seen[COPIES].append(Copied(value, copied, form, copied.copy(), no_attributes))
        else:
            copied, names = new_object(form.kind), value.__dict__
            for name, item in zip(names, made):  # noqa: B905  # `strict` takes 0.1 us
                put(copied, name, item)
            if lends:
                seen[COPIES].append(Copied(value, copied, form, None, dict(zip(names, made, strict=True))))
        return copied

    return keep_eager(cast)


def result_caster(
    dtype: torch.dtype | None, cast: Cast = cast_floats, left: Callable[[Any], object] = lambda _: None
) -> Callable[[Any], Any]:
    """Return a function that casts the results of a method; the compiler traces ``cast`` in its place.

    Args:
        dtype: the dtype to which they are cast; None leaves them as they are.
        cast: what to do, for a value and the dtype.
        left: called with an object that is not looked into, or cannot be copied.
    """
    if dtype is None:
        return lambda value: value
    leaf = leaf_of(cast, dtype)
    if leaf is None:
        return lambda value: cast(value, dtype)

    def cast_by_walk(value: Any, seen: Mapping[int, Any] | None = None) -> Any:
        walk = Walk(leaf)
        if seen is not None:  # no tensor is cast twice
            walk.made.update((key, made) for key, made in seen.items() if isinstance(made, torch.Tensor))
            walk.changed = bool(walk.made)
        found = walk.run(value)
        for each in walk.left:
            left(each)
        return found

    if cast is not cast_floats:
        return cast_by_walk
    tensor, to, common = torch.Tensor, TO[dtype], common_caster(dtype, left)
    atoms = frozenset(ATOMS)
    first, second = CASTABLE - {dtype}

    def cast_result(value: Any) -> Any:
        if type(value) is tensor:
            given = value.dtype
            return to(value) if given is first or given is second else value
        if type(value) in atoms:
            return value
        seen: dict[int, Any] = {id(value): _OPEN}
        try:
            return common(value, seen)
        except Uncommon:
            pass  # what the walk raises is not to be told as raised while this was handled
        return cast_by_walk(value, seen)

    return keep_eager(cast_result)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return every tensor in ``value``, in order; ``value`` is nested as for :func:`cast_floats`."""
    found: list[torch.Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, ATOMS):
        return
    elif isinstance(value, (tuple, list)):
        for item in value:
            _collect(item, found)
    elif isinstance(value, (dict, collections.UserDict)):
        for item in value.values():
            _collect(item, found)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _collect(getattr(value, field.name, None), found)
