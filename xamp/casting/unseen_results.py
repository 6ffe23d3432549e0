"""Says, once for each type, that an object in a result is not looked into, so that its tensors are not cast.

``deque``, ``SimpleNamespace``, sets and objects of classes that are no dataclasses pass through a forward as they are.
Whether one has tensors in it is looked up the first time, the second, the fourth and so on, until it was said.
"""

from __future__ import annotations

import collections
import gc
import logging
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from xamp.values.containers import CASTABLE
from xamp.values.forms import ATOMS, known_form
from xamp.values.log import Once, say
from xamp.values.ways import values_in_dict

__all__ = ["Unseen", "say_uncopied"]

_ITERABLE: tuple[type, ...] = (
    collections.deque,
    set,
    frozenset,
    collections.ChainMap,
    types.MappingProxyType,
    type({}.values()),
    type({}.items()),
)
"""Types of Python's own that are not rebuilt."""

_CODE: tuple[type, ...] = (
    *(types.FunctionType, types.ModuleType, types.GeneratorType, types.CoroutineType),
    *(types.TracebackType, types.FrameType, types.CellType, type({}.keys())),
)
"""Types whose objects refer to what a result does not hold."""

_MOST_VALUES, _MOST_TYPES = 1000, 128


class Unseen:
    """Says of objects in a result that they are not looked into, where they hold tensors.

    Args:
        method: the name of the method whose result it is.
        dtype: the dtype to which results are cast; None if they are not.

    Attributes:
        of_type: what is called with its type in code that the compiler traces: what is in it is not known there.
    """

    __slots__ = ("_counts", "_dtype", "_method", "_said", "of_type")

    def __init__(self, method: str, dtype: torch.dtype | None) -> None:
        self._method, self._dtype = method, dtype
        self._counts: dict[type, int] = {}
        self._said = Once()

        def of_type(kind: type) -> None:
            self._see_type(kind)

        of_type._dynamo_marked_constant = True  # type: ignore[attr-defined]  # the compiler runs it while it traces
        self.of_type: Callable[[type], None] = of_type

    def __call__(self, value: Any) -> None:
        """Find out whether ``value`` has tensors that should have been cast, and say so."""
        kind = type(value)
        if len(self._counts) >= _MOST_TYPES or self._said.begin_anew():
            self._counts.clear()
        count = self._counts[kind] = self._counts.get(kind, 0) + 1
        if count & (count - 1) or self._said.has(self._name(kind)):
            return
        if isinstance(value, Iterator):
            self._say(kind, "if it gives tensors, they stay as they are")
        elif (found := _tensor_in(value, CASTABLE - {self._dtype})) is not None:
            self._say(kind, f"its tensors stay {found.dtype}")

    def _see_type(self, kind: type) -> None:
        """Say that an object is not looked into, by its type: the compiler knows no more."""
        if kind in _ITERABLE or kind is types.SimpleNamespace or _is_somebodys(kind):
            self._say(kind, "if it has tensors, they stay as they are")

    def _name(self, kind: type) -> str:
        return f"{kind.__module__}.{kind.__qualname__}"

    def _say(self, kind: type, what: str) -> None:
        if not self._said.first(self._name(kind)):
            return
        say(
            "%s returns a %s, which xamp does not look into: %s, though results are cast to %s. Return tensors in "
            "tuples, lists, dicts or dataclasses, or cast these yourself.",
            self._method,
            kind.__qualname__,
            what,
            self._dtype,
            level=logging.WARNING,
        )


def _is_somebodys(kind: type) -> bool:
    """Tell whether ``kind`` is a class whose objects may hold tensors that a forward returns."""
    outer = kind.__module__.partition(".")[0]
    return outer not in ("torch", "builtins", "numpy", "typing", "types", "enum") and not issubclass(
        kind, (torch.nn.Module, type)
    )


def _tensor_in(value: Any, dtypes: Iterable[torch.dtype]) -> torch.Tensor | None:
    """Return a tensor of one of ``dtypes`` that is in ``value``, at any depth; None if there is none."""
    left, seen = collections.deque([value]), set[int]()
    while left and len(seen) < _MOST_VALUES:
        each = left.popleft()
        if isinstance(each, (*ATOMS, torch.nn.Module, type)) or id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            if each.dtype in dtypes:
                return each
            continue
        if not isinstance(each, _CODE):
            left.extend(_held_by(each) if isinstance(each, dict) else gc.get_referents(each))
    return None


def _held_by(value: dict[Any, Any]) -> list[Any]:
    """Return the items and attributes of a dict, whatever its class says."""
    own = values_in_dict(value) if type(value) is not dict else {}
    return [*dict.values(value), *dict.values(own)]


_uncopied = Once()


def say_uncopied(value: Any, method: str) -> None:
    """Say once that a container among the arguments of ``method`` could not be copied, and is passed as it is."""
    kind = type(value)
    if not known_form(kind).name or not _uncopied.first(f"{method} {kind.__module__}.{kind.__qualname__}"):
        return
    say(
        "%s gets a %s as it is, with its tensors in their own dtype: its class cannot be copied. Cast them before the "
        "call.",
        method,
        kind.__qualname__,
        level=logging.WARNING,
    )
