"""The casting: the object that tells every replaced function how to cast; and which casting is in force for a call.

A :class:`Casting` belongs to a handle of ``init`` (the newest handle decides), or to the regions of sessions of backend
``"apex"``. :func:`here` returns the one in force. The rules of the lists (:mod:`xamp.apex._rules`) call its methods.

fp32 tensors are cast to the lower dtype, fp16 and bf16 tensors to fp32, on every device. float64 and complex tensors
are the user's choice and are never cast. (Apex decided by the last word of ``tensor.type()`` and cast all other types
too. So a float64 product came out in fp16. ``Casting.wide`` does the same.)
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from xamp.casting import active
from xamp.casting.region_mark import APART, REPLACED
from xamp.torch_compat.torch_private import autocast, dynamo
from xamp.torch_compat.torch_private.dispatch import len_torch_dispatch_stack
from xamp.values.log import say

__all__ = [
    "ALL",
    "BFLOAT16",
    "DOUBLE",
    "FLOAT",
    "HALF",
    "LOWER",
    "NAMES",
    "Casting",
    "all_floating",
    "here",
    "may_keep",
    "process",
    "region_casting",
]

HALF, BFLOAT16, FLOAT, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64

LOWER = frozenset({HALF, BFLOAT16})
ALL = frozenset({HALF, BFLOAT16, FLOAT, DOUBLE})
_TO = {HALF: torch.Tensor.half, BFLOAT16: torch.Tensor.bfloat16, FLOAT: torch.Tensor.float}  # twice as fast as to()
NAMES = {HALF: "Half", BFLOAT16: "BFloat16", FLOAT: "Float", DOUBLE: "Double"}

_lock = threading.Lock()
_is_compiling = torch.compiler.is_compiling
_tracing_state = dynamo.get_tracing_state
_dispatch_modes = len_torch_dispatch_stack
_transform = dynamo.peek_interpreter_stack


class _Open:
    """Counts the open blocks without casts that one thread began. The blocks may end in any order, on any thread."""

    def __init__(self) -> None:
        self.blocks = 0


class _Thread(threading.local):
    def __init__(self) -> None:
        self.open = _Open()


_thread = _Thread()


class Casting:
    """How listed functions cast.

    Args:
        lower: ``torch.float16`` or ``torch.bfloat16``.
        caching: keep the casts of Parameters until :meth:`clear`.
        allow_banned: run banned functions in fp32.
        verbose: log each cast.
        wide: treat other dtypes as Apex does: also cast float64, and bf16 where fp16 is the lower dtype; refuse to
            promote them.

    Attributes:
        active: False while casts are switched off.
        cache: maps a Parameter to its cast; None without caching.
    """

    def __init__(
        self,
        lower: torch.dtype,
        *,
        caching: bool = True,
        allow_banned: bool = False,
        verbose: bool = False,
        wide: bool = False,
    ) -> None:
        self.lower = lower
        self.active = True
        self._on, self._pauses = True, 0
        self.cache: dict[torch.Tensor, torch.Tensor] | None = {} if caching else None
        self.allow_banned = allow_banned
        self.verbose = verbose
        self.wide = wide
        self._versions: dict[int, int] = {}

    def switch(self, on: bool) -> None:
        """Switch casts on or off, until the next call."""
        with _lock:
            self._on = on
            self._set_active()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Switch casts off in a block, for all threads. Blocks may overlap."""
        if _is_compiling():
            dynamo.graph_break()  # methods in a graph ask when the graph is lowered, not when they are called
        self._pause(1)
        mine: _Open = _thread.open
        mine.blocks += 1
        if active.get_slot() is None:
            active.set_slot(APART)  # in this block, the thread must not use code that was compiled with casts
        try:
            yield
        finally:
            mine.blocks -= 1
            if not mine.blocks and mine is _thread.open and active.get_slot() is APART:
                active.set_slot(None)
            self._pause(-1)

    def _pause(self, more: int) -> None:
        with _lock:
            self._pauses += more
            self._set_active()

    def _set_active(self) -> None:
        before, self.active = self.active, self._on and not self._pauses
        if self.active is not before:
            process.tell_switched()

    def clear(self) -> None:
        """Clear the cache: forget the casts of Parameters."""
        if self.cache is not None:
            self.cache.clear()
            self._versions.clear()

    def remove(self, parameter: torch.Tensor) -> None:
        """Remove the cast of ``parameter`` from the cache."""
        if self.cache is not None:
            self.cache.pop(parameter, None)
            self._versions.pop(id(parameter), None)

    def cached(self, parameter: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
        """``parameter`` in ``dtype``. The cast is kept until ``parameter`` is written to or the cache is cleared.

        Raises:
            RuntimeError: the tensor in the cache is no cast of ``parameter``.
        """
        cache = self.cache
        assert cache is not None
        try:
            version = parameter._version
        except RuntimeError:  # made under inference_mode
            version = 0
        found = cache.get(parameter)
        if found is not None and found.dtype is dtype and self._versions.get(id(parameter), version) == version:
            if parameter.requires_grad and found.requires_grad:
                _check_parent(parameter, found)
                return found
            if found.requires_grad is parameter.requires_grad or not torch.is_grad_enabled():
                return found  # a cast made under no_grad would pass no gradient to the parameter
        made = cache[parameter] = self._cast(parameter, dtype, name)
        self._versions[id(parameter)] = version
        return made

    def cast(self, value: Any, dtype: torch.dtype, given: frozenset[torch.dtype], name: str, keep: bool) -> Any:
        """Return ``value`` with its tensors of the dtypes ``given`` cast to ``dtype``.

        Args:
            value: an argument. A list or tuple is cast if it contains only floating tensors, as in Apex.
            dtype: the dtype to cast to.
            given: the dtypes to cast; tensors of other dtypes stay.
            name: the name of the function, for the log.
            keep: cache the casts of fp32 Parameters.
        """
        if isinstance(value, torch.Tensor):
            found = value.dtype
            if found is dtype or found not in given:
                return value
            if keep and found is FLOAT and type(value) is not torch.Tensor and isinstance(value, nn.Parameter):
                return self.cached(value, dtype, name)
            return self._cast(value, dtype, name)
        if isinstance(value, (list, tuple)) and value and all_floating(value):
            items = [self.cast(item, dtype, given, name, keep) for item in value]
            return value._make(items) if hasattr(value, "_make") else type(value)(items)
        return value

    def _cast(self, tensor: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
        if self.verbose and not _is_compiling():
            say("%s->%s (%s)", NAMES[tensor.dtype], NAMES[dtype], name)
        return _TO[dtype](tensor)


def _check_parent(parameter: torch.Tensor, found: torch.Tensor) -> None:
    """Refuse a cached tensor whose gradient would go to another parameter: other code put it into the cache."""
    node: Any = found.grad_fn
    parents = node.next_functions if node is not None else ()
    parent = getattr(parents[0][0], "variable", parameter) if parents else None
    if parent is not parameter:
        raise RuntimeError(
            "x and cache[x] both require grad, but x is not cache[x]'s parent.  This is likely an error."
        )


def all_floating(values: Iterable[Any]) -> bool:
    """Whether ``values``, and the lists and tuples in it, contain only floating tensors."""
    for value in values:
        if isinstance(value, (list, tuple)):
            if not all_floating(value):
                return False
        elif not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return False
    return True


def may_keep(casting: Casting) -> bool:
    """Whether casts may be cached now.

    A cast made under a tracer or a transformation must not be used outside of it. A cast made without gradients is not
    kept either: evaluation code often writes weights through ``.data``, which does not change their version.
    """
    return (
        casting.cache is not None
        and torch.is_grad_enabled()
        and not _is_compiling()
        and _tracing_state() is None
        and _dispatch_modes() == 0
        and _transform() is None
    )


class _Process:
    """The casting outside of xamp's regions, in every thread.

    Attributes:
        casting: the casting of the newest handle; None where there is no handle.
        tell_switched: is called when casts were switched on or off.
    """

    def __init__(self) -> None:
        self.casting: Casting | None = None
        self.tell_switched: Callable[[], None] = lambda: None

    @property
    def is_paused(self) -> bool:
        """Whether there is a handle, and its casts are off."""
        return self.casting is not None and not self.casting.active


process = _Process()
regions: dict[tuple[str, torch.dtype], Casting] = {}
"""See :func:`region_casting`."""


def here() -> Casting | None:
    """The casting for the caller: that of xamp's region around it, which may be None, or the newest handle's."""
    mark = active.innermost()
    if mark is not None:
        casting: Casting | None = mark.casting
        return casting
    if active.get_slot() is not REPLACED:
        return process.casting
    # A compiled graph: find its region by the autocast state that the graph sets.
    for (device_type, lower), casting in regions.items():
        if autocast.get_autocast_dtype(device_type) is lower and not autocast.is_autocast_enabled(device_type):
            return None if autocast.is_autocast_cache_enabled() else casting
    return None


def region_casting(device_type: str, lower: torch.dtype) -> Casting:
    """The casting for regions on ``device_type`` with lower dtype ``lower``; the same object at each call."""
    found = regions.get((device_type, lower))
    return regions.setdefault((device_type, lower), Casting(lower)) if found is None else found
