"""The one object that every replaced function asks how to cast, and which it is where a call is made.

A :class:`Casting` belongs to a handle of ``init``, of which the newest decides, or to regions of sessions of backend
``"apex"``; :func:`here` tells which holds. The rules of the lists (:mod:`xamp.apex._rules`) are written against it.

Cast are fp32 tensors to the lower dtype, fp16 and bf16 ones to fp32, on every device. float64 and complex numbers are
the user's choice and stay. (Apex asked for the last word of ``tensor.type()`` and took all others for castable, so that
a float64 product came out in fp16; ``Casting.wide`` is that way.)
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from xamp.casting import active
from xamp.casting.mark import APART, REPLACED
from xamp.ground.log import say

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
_tracing_state = torch._C._get_tracing_state
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transform = torch._C._functorch.peek_interpreter_stack


class _Open:
    """How many blocks without casts are open that began on a thread. They end in any order, on any thread."""

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
        caching: casts of Parameters are kept until ``clear``.
        allow_banned: banned functions run in fp32.
        verbose: each cast is logged.
        wide: Apex's way with other dtypes: float64, and bf16 where fp16 is the lower one, are cast too, and promotion
            refuses them.

    Attributes:
        active: False while casts are switched off.
        cache: from Parameter to its cast; None without caching.
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
        """Switch casts on or off until told otherwise."""
        with _lock:
            self._on = on
            self.active = on and not self._pauses

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A block without casts, for all threads; blocks may overlap."""
        if _is_compiling():
            torch._dynamo.graph_break()  # methods in a graph ask when the graph is lowered, not where they stand
        self._pause(1)
        mine = _thread.open
        mine.blocks += 1
        if active.get_slot() is None:
            active.set_slot(APART)  # what this thread compiled with casts is not for this block
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
            self.active = self._on and not self._pauses

    def clear(self) -> None:
        """Forget the casts of Parameters."""
        if self.cache is not None:
            self.cache.clear()
            self._versions.clear()

    def remove(self, parameter: torch.Tensor) -> None:
        """Forget the cast of one."""
        if self.cache is not None:
            self.cache.pop(parameter, None)
            self._versions.pop(id(parameter), None)

    def cached(self, parameter: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
        """``parameter`` in ``dtype``, cast once until it is written to or the cache is cleared.

        Raises:
            RuntimeError: what was put into the cache is no cast of ``parameter``.
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
                return found  # else it was made under no_grad, and would keep gradients from the parameter
        made = cache[parameter] = self._cast(parameter, dtype, name)
        self._versions[id(parameter)] = version
        return made

    def cast(self, value: Any, dtype: torch.dtype, given: frozenset[torch.dtype], name: str, keep: bool) -> Any:
        """``value`` with its tensors of the dtypes ``given`` in ``dtype``.

        Args:
            value: an argument. A list or tuple is cast if all in it are floating tensors, as in Apex.
            dtype: what to cast to.
            given: what is cast; the rest stays.
            name: of the function.
            keep: casts of fp32 Parameters are cached.
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
    """Refuse a cast whose gradient would go elsewhere: somebody else put it into the cache."""
    node: Any = found.grad_fn
    parents = node.next_functions if node is not None else ()
    parent = getattr(parents[0][0], "variable", parameter) if parents else None
    if parent is not parameter:
        raise RuntimeError(
            "x and cache[x] both require grad, but x is not cache[x]'s parent.  This is likely an error."
        )


def all_floating(values: Iterable[Any]) -> bool:
    """Whether there is nothing but floating tensors in ``values`` and the lists and tuples in it."""
    for value in values:
        if isinstance(value, (list, tuple)):
            if not all_floating(value):
                return False
        elif not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return False
    return True


def may_keep(casting: Casting) -> bool:
    """Whether casts may be cached: what a tracer or a transformation sees must not be seen again outside of it.

    Nor are those made without gradients: evaluations often write weights through ``.data``, which no version tells.
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
    """What holds outside of xamp's regions, in every thread.

    Attributes:
        casting: of the newest handle; None where there is none.
    """

    def __init__(self) -> None:
        self.casting: Casting | None = None


process = _Process()
regions: dict[tuple[str, torch.dtype], Casting] = {}
"""See :func:`region_casting`."""


def here() -> Casting | None:
    """What casts where the caller runs: nothing in a region of xamp's, unless that brings its own."""
    mark = active.innermost()
    if mark is not None:
        casting: Casting | None = mark.casting
        return casting
    if active.get_slot() is not REPLACED:
        return process.casting
    # A region in a compiled graph, told by the autocast state that the graph sets.
    for (device_type, lower), casting in regions.items():
        if torch._C.get_autocast_dtype(device_type) is lower and not torch._C.is_autocast_enabled(device_type):
            return None if torch._C.is_autocast_cache_enabled() else casting
    return None


def region_casting(device_type: str, lower: torch.dtype) -> Casting:
    """What casts in regions on ``device_type`` that lower to ``lower``, the same object each time."""
    found = regions.get((device_type, lower))
    return regions.setdefault((device_type, lower), Casting(lower)) if found is None else found
