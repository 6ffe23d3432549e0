"""Casts the floating tensors in the arguments and results of ``forward``, and keeps the type of every container.

If nothing in a container changes, the same object is returned. If something changes, the container is copied and never
written to, so that the caller's batch does not change. :mod:`xamp.ground.walk` says how, for code that runs, and
:mod:`xamp.ground.traced_walk` for code that the compiler traces.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from xamp.ground.forms import ATOMS
from xamp.ground.pickle_names import pickled_as
from xamp.ground.traced_walk import TracedWalk
from xamp.ground.walk import INSIDE, Leaf, Walk

__all__ = ["ATOMS", "CASTABLE", "cast_any", "cast_floats", "leaf_of", "sparing", "tensors_in"]

CASTABLE = frozenset({torch.float16, torch.bfloat16, torch.float32})
"""The dtypes that xamp casts from and to. It never casts float64, complex, integer and 8-bit tensors."""

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
    """Return what ``cast``, :func:`cast_floats` or :func:`cast_any`, does to one value; None for another function."""
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


@pickled_as("cast_floats")
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


@pickled_as("cast_any")
def cast_any(value: Any, dtype: torch.dtype, device_type: str | None = None) -> Any:  # noqa: ARG001
    """Cast as :func:`cast_floats` does, but also float64 tensors, and objects with a method ``to`` by calling it."""
    return _run(_leaf_of_any(dtype), value)


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
