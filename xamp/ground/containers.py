"""Casts the floating tensors in whatever goes into and comes out of ``forward``, and keeps every container's type.

A container in which nothing changes is handed on as it is, the same object. One that changes is copied and never
written to: the caller's batch stays as it was.
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

__all__ = ["cast_any", "cast_floats", "tensors_in"]

CASTABLE = frozenset({torch.float16, torch.bfloat16, torch.float32})
"""What xamp moves between: float64, complex, integer and 8-bit tensors are never cast."""

_ATOMS = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)


@pickled_as("cast_floats")
def cast_floats(value: Any, dtype: torch.dtype, device_type: str | None = None) -> Any:
    """``value`` with every fp16, bf16 and fp32 tensor in it cast to ``dtype``.

    Args:
        value: a tensor or any nesting of tuples, lists, dicts, their subclasses, named tuples and dataclasses.
            Anything else in it (integers, strings, numpy arrays, objects) passes untouched.
        dtype: ``torch.float16``, ``torch.bfloat16`` or ``torch.float32``.
        device_type: cast only the tensors on such a device; None casts all.

    Raises:
        StateError: ``value`` is a ``torch.fx`` proxy: the policy would not be in the traced graph.
    """
    if isinstance(value, torch.Tensor):
        if value.dtype not in CASTABLE or value.dtype == dtype or device_type not in (None, value.device.type):
            return value
        return value.to(dtype)
    return _cast_container(value, dtype, device_type)


@pickled_as("cast_any")
def cast_any(value: Any, dtype: torch.dtype, device_type: str | None = None) -> Any:
    """As :func:`cast_floats`, float64 too, and what has a method ``to`` of its own by ``value.to(dtype)``."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.dtype.is_floating_point else value
    if callable(getattr(value, "to", None)) and not isinstance(value, (torch.fx.Proxy, type)):
        return value.to(dtype)
    return _cast_container(value, dtype, device_type, cast_any)


_Again = Callable[[Any, torch.dtype, "str | None"], Any]


def _cast_container(value: Any, dtype: torch.dtype, device_type: str | None, again: _Again = cast_floats) -> Any:
    """What is no tensor; ``again`` casts what is in it."""
    if isinstance(value, _ATOMS):
        return value
    if isinstance(value, (tuple, list)):
        return _cast_sequence(value, dtype, device_type, again)
    if isinstance(value, (dict, collections.UserDict)):
        return _cast_mapping(value, dtype, device_type, again)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _cast_dataclass(value, dtype, device_type, again)
    if isinstance(value, torch.fx.Proxy):
        raise StateError(
            "torch.fx.symbolic_trace on a model that xamp.initialize manages would leave its policy out of the graph. "
            "Trace the plain model and initialize the GraphModule, or use torch.export.export."
        )
    return value


def _cast_sequence(value: Any, dtype: torch.dtype, device_type: str | None, again: _Again) -> Any:
    items = [again(item, dtype, device_type) for item in value]
    if all(new is old for new, old in zip(items, value, strict=True)):
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
    if hasattr(kind, "_make"):
        return kind._make(items)  # a named tuple, whatever its __new__ takes
    if hasattr(kind, "n_sequence_fields"):
        return kind(items)  # what torch.max(x, dim) and others return
    made = tuple.__new__(kind, items)
    made.__dict__.update(getattr(value, "__dict__", {}))
    return made


def _cast_mapping(value: Any, dtype: torch.dtype, device_type: str | None, again: _Again) -> Any:
    changed = {}
    for key, item in value.items():
        new = again(item, dtype, device_type)
        if new is not item:
            changed[key] = new
    if not changed:
        return value
    if type(value) is dict:
        return {**value, **changed}
    filled = copy.copy(value)
    for key, item in changed.items():
        filled[key] = item  # for a Hugging Face ModelOutput this sets the attribute of that name too
    return filled


def _cast_dataclass(value: Any, dtype: torch.dtype, device_type: str | None, again: _Again) -> Any:
    changed = {}
    for field in dataclasses.fields(value):
        if not hasattr(value, field.name):
            continue
        item = getattr(value, field.name)
        new = again(item, dtype, device_type)
        if new is not item:
            changed[field.name] = new
    if not changed:
        return value
    if torch.compiler.is_compiling():
        return dataclasses.replace(value, **changed)  # the form that the compiler can trace
    filled = copy.copy(value)  # no __post_init__: its checks ran when the value was made
    for name, item in changed.items():
        object.__setattr__(filled, name, item)  # frozen ones too
    return filled


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor in ``value``, a nesting as :func:`cast_floats` takes it, in order."""
    found: list[torch.Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, _ATOMS):
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
