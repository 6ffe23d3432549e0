"""``xamp.autocast``: ``torch.cuda.amp.autocast`` on the device in use, and the context managers that work like it."""

from __future__ import annotations

import functools
import inspect
import threading
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from xamp.casting import active, ops
from xamp.casting.features_in_use import needs
from xamp.casting.region_mark import Mark, mark_of
from xamp.contract import Backend
from xamp.errors import PolicyError, StateError, UnsupportedPolicy
from xamp.registry import device_in_use
from xamp.torch_compat.compiler import keep_eager, own_code
from xamp.torch_compat.torch_private import dynamo
from xamp.torch_compat.torch_private.autocast import get_autocast_dtype, is_autocast_cache_enabled
from xamp.values.arguments import boolean

__all__ = ["Casts", "Reentrant", "autocast"]

_DTYPES = (torch.float16, torch.bfloat16)
_Dtype = torch.dtype | None
_is_tracing = torch.compiler.is_dynamo_compiling

_Function = TypeVar("_Function", bound=Callable[..., Any])


class _NotCallable(PolicyError, TypeError):
    """What is decorated is no function: torch raises a TypeError."""


class _NoAutocast(UnsupportedPolicy, RuntimeError):
    """A device type has no autocast: torch raises a RuntimeError."""


class _Opened(threading.local):
    """The functions that leave the regions which this thread has entered.

    The thread keeps them, and not the context manager, because several threads may enter one object. Any exit leaves
    the region that was entered last. So the state from before all of them is restored in the end, even if a generator
    leaves regions out of order.
    """

    def __init__(self) -> None:
        self.regions: list[Callable[[], None]] = []


_opened = _Opened()


class Reentrant:
    """A region as a context manager. One object may be entered again while it is open, and from several threads.

    Attributes:
        _cached: whether casts of weights are cached inside; None keeps the setting of the code around it.
    """

    _cached: bool | None = True

    def __init__(self) -> None:
        self._traced: list[Any] = []  # not per thread: a compiled function makes its own object

    def _mark(self) -> Mark:
        """Return the mark of the region to enter; called on each entry."""
        raise NotImplementedError

    @keep_eager
    def __enter__(self) -> Any:
        mark = self._mark()
        if _is_tracing():
            region = active.traced_region(mark, self._cached)
            region.__enter__()
            self._traced.append(region)
        else:
            _opened.regions.append(active.open_region(mark, self._cached))  # one line: both or none
        return self

    @keep_eager
    def __exit__(self, *_: object) -> None:
        if _is_tracing():
            self._traced.pop().__exit__(None, None, None)
        else:
            if not _opened.regions:
                raise StateError(f"{type(self).__name__}.__exit__(): this thread is in no region to leave.")
            try:
                _opened.regions[-1]()
            finally:
                _opened.regions.pop()


class Casts(Reentrant, torch.autocast):
    """A region whose mark is given; a context manager and a decorator.

    It is a ``torch.autocast``, so that code that tests for one accepts it. If the object was made outside of the
    function that the compiler traces, the compiler also treats it as a torch.autocast: it reads the four properties
    below and runs none of the methods.
    """

    def __init__(self, mark: Mark, cached: bool | None = True) -> None:
        Reentrant.__init__(self)
        self._given = mark
        self._cached = cached

    def _mark(self) -> Mark:
        return self._given

    @property
    def device(self) -> str | None:  # type: ignore[override]
        """The device type."""
        mark = self._mark()
        if dynamo.is_tracing() and _needs_mark(mark):
            # The compiler breaks the graph here and runs the block eagerly; with fullgraph=True it raises this error.
            raise dynamo.unsupported(
                "autocast(): made outside of the function that torch.compile traces, which would leave out what xamp "
                "adds to the device's own autocast. Make it inside: with xamp.autocast(): ..."
            )
        return mark.device_type

    @property
    def fast_dtype(self) -> torch.dtype | None:  # type: ignore[override]
        """The dtype to which operators are cast."""
        return self._mark().dtype or get_autocast_dtype(self._mark().device_type or "")

    @property
    def _enabled(self) -> bool:  # type: ignore[override]
        return self._mark().dtype is not None

    @property
    def _cache_enabled(self) -> bool:  # type: ignore[override]
        return self._mark().caches and (is_autocast_cache_enabled() if self._cached is None else self._cached)

    def _arguments(self) -> tuple[Any, ...]:
        """Return the arguments that make an equal object of this class."""
        return self._given, self._cached

    def __call__(self, func: _Function) -> _Function:
        """Decorate ``func`` to run in this region."""
        name = getattr(func, "__qualname__", repr(func))
        if not callable(func):
            raise _NotCallable(f"autocast()({func!r}): decorates functions. To run a block: with xamp.autocast(): ...")
        if any(test(func) for test in _RUN_LATER):
            raise PolicyError(
                f"autocast()({name}): a generator or coroutine would run after the region was left. Write the region "
                "inside it: with xamp.autocast(): ..."
            )

        made, arguments = type(self), self._arguments()

        @functools.wraps(func)
        def in_region(*args: Any, **kwargs: Any) -> Any:
            with made(*arguments):  # a new object, which the compiler can trace
                return func(*args, **kwargs)

        in_region.__script_unsupported = "@autocast() is not supported in script mode"  # type: ignore[attr-defined]
        return own_code(in_region)  # type: ignore[return-value]


_RUN_LATER = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)


def _also_as_in_torch_amp(init: Callable[..., None]) -> Callable[..., None]:
    """Let ``autocast.__init__`` take a device first, then ``dtype, enabled, cache_enabled``; or ``device_type=``."""

    @functools.wraps(init)
    def either(self: autocast, *args: Any, device_type: Any = None, **kwargs: Any) -> None:
        if args and not _is_boolean(args[0]) and device_in_use.names_device(args[0]):
            if device_type is not None:
                raise PolicyError(f"autocast({args[0]!r}, device_type={device_type!r}): names a device twice.")
            device_type, args, names = args[0], args[1:], ("dtype", "enabled", "cache_enabled", "fp8")
            known = min(len(names), len(args))  # the compiler of torch 2.8 zips equal lengths only
            kwargs = {**dict(zip(names[:known], args[:known], strict=True)), **kwargs}
            args = args[len(names) :]  # none, in a call that torch.amp takes
        init(self, *args, **kwargs)
        self._named = None if device_type is None else str(device_type)

    return either


def _is_boolean(value: object) -> bool:
    return isinstance(value, str) and value.strip().lower() in ("true", "false")


def _needs_mark(mark: Mark) -> bool:
    """Return whether code in a region reads its mark, which a block that is a ``torch.autocast`` does not leave."""
    device = mark.device_type or ""
    fixed = any(own is not mark.dtype for own in needs.own_dtypes.get(device, ()))
    return needs.registered or fixed or mark.fp8 is not None or (mark.portable and device in needs.extended)


class autocast(Casts):
    """``torch.cuda.amp.autocast`` on the device in use: a context manager, a decorator, or a value to keep.

    It may also be spelt as ``torch.amp.autocast(device_type, dtype, enabled, cache_enabled)``, with the type of the
    device in use. Without a dtype that spelling means torch's own for the device: bfloat16 on a CPU.

    Operators are cast by the portable policy: the same result dtypes on every device.

    Each entry looks up the device in use; making the object does not. One object may be entered again while it is open,
    and by several threads.

    Args:
        enabled: False switches casts off inside.
        dtype: ``torch.float16`` or ``torch.bfloat16``; None means float16 on every device. ``torch.float32`` warns and
            switches casts off, as torch's does on a CPU.
        cache_enabled: whether casts of weights are cached inside; None leaves that setting as it is.
        fp8: a recipe, see :func:`xamp.initialize`, for the linear layers inside; a dtype of None then means bfloat16.

    Raises:
        PolicyError: an argument that cannot be right anywhere; on entry, a device was named that is not in use.
        UnsupportedPolicy: on entry, where the device in use cannot compute in ``dtype``, or has no such recipe.
        BackendUnavailable: on entry, as :func:`xamp.device`.
    """

    _named: str | None

    @_also_as_in_torch_amp
    def __init__(
        self, enabled: bool = True, dtype: _Dtype = None, cache_enabled: bool | None = True, fp8: str | None = None
    ) -> None:
        Reentrant.__init__(self)
        self._on = _read_switch("enabled", enabled) and not _casts_nothing(dtype)
        if self._on and dtype is not None and dtype not in _DTYPES:
            raise PolicyError(
                f"autocast(dtype={dtype!r}): autocast casts to torch.float16 or torch.bfloat16; None is torch.float16. "
                "For float32: autocast(enabled=False)."
            )
        self._dtype = dtype
        if fp8 is not None:
            from xamp.values import recipes  # what runs no fp8 need not load it

            fp8 = recipes.for_autocast(fp8, dtype)  # the compiler would trace a function that names torch
        self._fp8 = fp8
        self._cached = None if cache_enabled is None else _read_switch("cache_enabled", cache_enabled)

    def _mark(self) -> Mark:
        return _in_use(self._on, self._dtype, self._named, self._fp8)

    def _arguments(self) -> tuple[Any, ...]:
        if self._named is None:
            return self._on, self._dtype, self._cached, self._fp8
        return self._named, self._dtype, self._on, self._cached, self._fp8


def _casts_nothing(dtype: object) -> bool:
    """Return whether ``dtype`` is fp32, and warn, as torch's does on a CPU: scripts take the dtype from a table."""
    if dtype is torch.float32:
        warnings.warn("autocast(dtype=torch.float32) casts nothing: it is autocast(enabled=False).", stacklevel=4)
    return dtype is torch.float32


def _read_switch(name: str, value: object) -> bool:
    """Return ``value`` as a boolean, as torch.autocast reads it; a string may spell one, as everywhere in xamp."""
    if value is True or value is False:
        return value
    if callable(value) or (isinstance(value, str) and value.strip().lower() not in ("true", "false")):
        raise PolicyError(
            f"autocast({name}={value!r}): must be True or False. A device stands first, as in torch.amp, or is left "
            "out: xamp finds it. As a decorator it is spelt with parentheses: @xamp.autocast()."
        )
    return bool(boolean(name, value if isinstance(value, str) else bool(value), call="autocast"))


_marks: dict[tuple[bool, torch.dtype | None, str | None, str | None], tuple[device_in_use.InUse, Mark]] = {}


def _in_use(on: bool, dtype: torch.dtype | None, named: str | None = None, fp8: str | None = None) -> Mark:
    """Return the mark for the device in use; it is found again only after the device in use has changed.

    Raises:
        PolicyError: ``named`` is a device of another type.
    """
    used, known = device_in_use.in_use(), _marks.get((on, dtype, named, fp8))
    if named is not None:
        kind = device_in_use.require_in_use("autocast", named)
        if dtype is None and on and fp8 is None:  # as torch.amp.autocast; the user may have set it since
            return _find_mark(on, torch.get_autocast_dtype(kind), used)
    if known is not None and known[0] is used:
        return known[1]
    mark = _find_mark(on, dtype, used, fp8)
    _marks[on, dtype, named, fp8] = used, mark
    return mark


_in_use._dynamo_marked_constant = True  # type: ignore[attr-defined]  # see xamp.casting.region_mark


def _find_mark(on: bool, dtype: torch.dtype | None, used: device_in_use.InUse, fp8: str | None = None) -> Mark:
    chosen, backend = used
    if not torch.amp.is_autocast_available(chosen.type):
        raise _NoAutocast(f"autocast(): torch has no autocast for {chosen.type!r}, the device in use.")
    if not on:
        return mark_of(chosen.type, None)
    dtype = torch.bfloat16 if fp8 is not None else dtype
    _check_dtype(dtype, chosen, backend)
    ops.named("portable").install(chosen.type, backend)
    if fp8 is not None:
        from xamp.casting import fp8_regions  # what runs no fp8 need not load it

        fp8 = fp8_regions.begin(fp8, backend, chosen)
    return mark_of(chosen.type, dtype or torch.float16, portable=True, fp8=fp8)


def _check_dtype(dtype: torch.dtype | None, chosen: torch.device, backend: Backend) -> None:
    declared = backend.capabilities(chosen)
    can = declared.dtypes
    name = str(dtype or torch.float16).removeprefix("torch.")
    if name not in can:
        call = "autocast(), whose dtype is float16" if dtype is None else f"autocast(dtype={dtype})"
        fix = f"Pass dtype=torch.{can[0]}, or enabled=False." if can else "Pass enabled=False."
        raise UnsupportedPolicy(
            f"{call}: backend {backend.name!r} cannot compute in it on {chosen}. Lower dtypes there: "
            f"{', '.join(can) or 'none'}.{declared.why_not(name)} {fix}"
        )
