"""Finds the optimizers that an optimizer holds and steps, and refuses what would not train with it.

Loaded for optimizers that are not torch's own.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from xamp.errors import UnsupportedPolicy
from xamp.policy import Policy, levels_where

__all__ = ["check", "held"]

_MOST = 20_000  # values that are looked at: an attribute may lead to a whole trainer with its data
_NOTHING_IN = (torch.Tensor, nn.Module, torch.device, torch.dtype, type, ModuleType, str, bytes, int, float, complex)
_OF_TORCH = ("param_groups", "state", "defaults")


def held(optimizer: Optimizer, given: Iterable[Optimizer] = ()) -> dict[str, Optimizer]:
    """Return the optimizers that ``optimizer`` holds, by how one gets there from it, in attributes and containers.

    ``.optimizers[0]`` is one in a list. Those in closures of functions are not found, and those ``given`` are no finds:
    a trainer leads from each of its optimizers to the others.
    """
    found: dict[str, Optimizer] = {}
    seen = {id(optimizer), *map(id, given)}
    queue = collections.deque(_parts_of(optimizer))
    while queue and len(seen) < _MOST:
        path, value = queue.popleft()
        with contextlib.suppress(ReferenceError):  # of a weak proxy whose object is gone
            if id(value) in seen or value is None or isinstance(value, _NOTHING_IN):
                continue
            seen.add(id(value))
            if isinstance(value, Optimizer):
                found[path] = value
            queue.extend((path + step, part) for step, part in _parts_of(value))
    return found


def _parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what ``value`` leads to, each with how one gets there."""
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in list(value.items()))
    elif isinstance(value, list | tuple | set | frozenset | collections.deque):
        yield from ((f"[{index}]", part) for index, part in enumerate(list(value)))
    elif isinstance(value, functools.partial):
        yield from (("", part) for part in (value.func, *value.args, *value.keywords.values()))
    elif isinstance(value, MethodType | BuiltinFunctionType):
        yield ".__self__", value.__self__
    elif isinstance(value, weakref.ref):
        yield "()", value()
    if isinstance(value, FunctionType):
        return
    skipped = _OF_TORCH if isinstance(value, Optimizer) else ()
    yield from ((f".{name}", part) for name, part in _attributes_of(value) if name not in skipped)


def _attributes_of(value: Any) -> Iterable[tuple[str, Any]]:
    own = getattr(value, "__dict__", None)
    slots = [name for cls in type(value).__mro__ for name in _names(vars(cls).get("__slots__", ()))]
    return [*(own.items() if isinstance(own, dict) else ()), *((n, getattr(value, n, None)) for n in slots)]


def _names(slots: Any) -> Iterable[str]:
    return [slots] if isinstance(slots, str) else [name for name in slots if name not in ("__dict__", "__weakref__")]


def check(
    optimizer: Optimizer, policy: Policy, known: Collection[int], given: Iterable[Optimizer] = ()
) -> list[Optimizer]:
    """Return the optimizers that ``optimizer`` holds, but those ``given``. ``known``: ids of the models' parameters.

    One over other tensors, as some keep for a scheduler, is nobody's business.

    Raises:
        UnsupportedPolicy: one has groups of its own, and masters cannot take the parameters' places in them; or it has
            parameters that ``optimizer`` does not hold, whose gradients would stay scaled.
    """
    found = held(optimizer, given)
    groups = {id(group["params"]) for group in optimizer.param_groups}
    held_by_outer = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for path, inner in found.items():
        at = f"initialize(level={policy.level!r}): {type(optimizer).__name__}{path} is another optimizer with "
        own = [group["params"] for group in inner.param_groups if id(group["params"]) not in groups]
        ids = {id(param) for params in own for param in params}
        if policy.master_weights and not ids.isdisjoint({*held_by_outer, *known}):
            raise UnsupportedPolicy(
                f"{at}parameter groups of its own, in which masters cannot take the parameters' places. Give "
                "xamp.initialize the optimizers within, as a list, and step each; or use a level without masters "
                f"({', '.join(levels_where(lambda row: not row.master_weights))})."
            )
        if policy.manages_gradients and ids.intersection(known) - held_by_outer:
            raise UnsupportedPolicy(
                f"{at}parameters that the outer one does not hold, so that their gradients would stay scaled. Let the "
                "outer one hold all of them, or give xamp.initialize the optimizers within, as a list, and step each."
            )
    return list(found.values())
