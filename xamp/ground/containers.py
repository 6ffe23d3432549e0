"""Casts the floating tensors in the arguments and results of ``forward``, and keeps the type of every container.

If nothing in a container changes, the same object is returned. If something changes, the container is copied and never
written to, so that the caller's batch does not change.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from xamp.errors import StateError
from xamp.ground.pickle_names import pickled_as

__all__ = ["ATOMS", "CASTABLE", "cast_any", "cast_floats", "cast_floats_except", "tensors_in"]

CASTABLE = frozenset({torch.float16, torch.bfloat16, torch.float32})
"""The dtypes that xamp casts from and to. It never casts float64, complex, integer and 8-bit tensors."""

ATOMS = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)
"""Types of values that hold no tensor."""


@pickled_as("cast_floats")
def cast_floats(value: Any, dtype: torch.dtype, device_type: str | None = None) -> Any:
    """Return ``value`` with every fp16, bf16 and fp32 tensor in it cast to ``dtype``.

    Args:
        value: a tensor or any nesting of tuples, lists, dicts, their subclasses, named tuples and dataclasses.
            Anything else in it (integers, strings, numpy arrays, objects) stays as it is.
        dtype: ``torch.float16``, ``torch.bfloat16`` or ``torch.float32``.
        device_type: cast only the tensors on a device of this type; None casts all.

    Raises:
        StateError: ``value`` is a ``torch.fx`` proxy: the traced graph would not contain the policy.
    """
    if isinstance(value, torch.Tensor):
        if value.dtype not in CASTABLE or value.dtype == dtype or device_type not in (None, value.device.type):
            return value
        return value.to(dtype)
    return _cast_container(value, dtype, device_type)


@pickled_as("cast_any")
def cast_any(value: Any, dtype: torch.dtype, device_type: str | None = None) -> Any:
    """Cast as :func:`cast_floats` does, but also float64 tensors, and objects with a method ``to`` by calling it."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.dtype.is_floating_point else value
    if callable(getattr(value, "to", None)) and not isinstance(value, (torch.fx.Proxy, type)):
        return value.to(dtype)
    return _cast_container(value, dtype, device_type, cast_any)


def cast_floats_except(types: tuple[type, ...]) -> Callable[[Any, torch.dtype], Any]:
    """Return a function that casts as :func:`cast_floats` does, but no object of ``types``, wherever it is nested."""

    def cast(value: Any, dtype: torch.dtype, device_type: str | None = None) -> Any:
        if isinstance(value, types):
            return value
        if isinstance(value, torch.Tensor):
            return cast_floats(value, dtype, device_type)
        return _cast_container(value, dtype, device_type, cast)

    return cast


_CastItem = Callable[[Any, torch.dtype, "str | None"], Any]


def _cast_container(value: Any, dtype: torch.dtype, device_type: str | None, cast_item: _CastItem = cast_floats) -> Any:
    """Cast a value that is not a tensor; ``cast_item`` casts each value in it."""
    if isinstance(value, ATOMS):
        return value
    if isinstance(value, (tuple, list)):
        return _cast_sequence(value, dtype, device_type, cast_item)
    if isinstance(value, (dict, collections.UserDict)):
        return _cast_mapping(value, dtype, device_type, cast_item)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _cast_dataclass(value, dtype, device_type, cast_item)
    if isinstance(value, torch.fx.Proxy):
        raise StateError(
            "torch.fx.symbolic_trace on a model that xamp.initialize manages would leave its policy out of the graph. "
            "Trace the plain model and initialize the GraphModule, or use torch.export.export."
        )
    return value


def _is_same(new: Any, old: Any) -> bool:
    """Return whether the cast of ``old`` gave ``old`` back. The compiler cannot tell containers apart by identity."""
    if torch.compiler.is_compiling():
        if isinstance(old, (tuple, list)):
            return all(map(_is_same, new, old))
        if isinstance(old, dict):
            return all(_is_same(new[key], item) for key, item in old.items())
    return new is old


def _cast_sequence(value: Any, dtype: torch.dtype, device_type: str | None, cast_item: _CastItem) -> Any:
    items = [cast_item(item, dtype, device_type) for item in value]
    if all(map(_is_same, items, value)):
        return value
    kind = type(value)
    if kind is list:
        return items
    if kind is tuple:
        return tuple(items)
    if isinstance(value, list):
        filled = copy.copy(value)
        filled[:] = items
        return filled
    if hasattr(value, "_make"):
        return kind._make(items)  # a named tuple, whatever its __new__ takes
    if hasattr(value, "n_sequence_fields"):
        return kind(items)  # the return types of torch.max(x, dim) and others
    made = tuple.__new__(kind, items)
    made.__dict__.update(getattr(value, "__dict__", {}))
    return made


def _cast_mapping(value: Any, dtype: torch.dtype, device_type: str | None, cast_item: _CastItem) -> Any:
    changed = {}
    for key, item in value.items():
        new = cast_item(item, dtype, device_type)
        if not _is_same(new, item):
            changed[key] = new
    if not changed:
        return value
    if type(value) is dict:
        return {**value, **changed}
    # The compiler cannot trace a copy of these; that of torch 2.11 traces none, and that of 2.15 wants their names.
    if type(value) is collections.defaultdict:
        return collections.defaultdict(value.default_factory, {**value, **changed})
    if torch.compiler.is_compiling():
        if type(value) is collections.OrderedDict:
            return collections.OrderedDict({**value, **changed})
        if type(value) is collections.UserDict:
            return collections.UserDict({**value, **changed})
    filled = copy.copy(value)
    for key, item in changed.items():
        filled[key] = item  # for a Hugging Face ModelOutput this sets the attribute of that name too
    return filled


def _cast_dataclass(value: Any, dtype: torch.dtype, device_type: str | None, cast_item: _CastItem) -> Any:
    changed = {}
    for field in dataclasses.fields(value):
        if not hasattr(value, field.name):
            continue
        item = getattr(value, field.name)
        new = cast_item(item, dtype, device_type)
        if not _is_same(new, item):
            changed[field.name] = new
    if not changed:
        return value
    if torch.compiler.is_compiling():
        return dataclasses.replace(value, **changed)  # the compiler can trace this form only
    filled = copy.copy(value)  # no __post_init__: its checks ran when the value was made
    for name, item in changed.items():
        object.__setattr__(filled, name, item)  # frozen ones too
    return filled


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
