"""``xamp.autocast``: ``torch.cuda.amp.autocast`` on the device in use, and the context managers that work like it."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from xamp.casting import active, ops
from xamp.casting.compiler import keep_eager
from xamp.casting.mark import Mark, mark_of
from xamp.casting.needs import needs
from xamp.contract import Backend
from xamp.errors import PolicyError, StateError, UnsupportedPolicy
from xamp.ground.arguments import boolean
from xamp.registry import device_in_use

__all__ = ["Casts", "Reentrant", "autocast"]

_DTYPES = (torch.float16, torch.bfloat16)
_is_traced = torch.compiler.is_dynamo_compiling

_Function = TypeVar("_Function", bound=Callable[..., Any])


class _Opened(threading.local):
    """How to leave what this thread entered. With the thread, not the object: one object may be entered by many.

    The last entered is left first, whoever asks: so that regions which a generator leaves out of order still end with
    the state that was there before.
    """

    def __init__(self) -> None:
        self.regions: list[Callable[[], None]] = []


_opened = _Opened()


class Reentrant:
    """A region as a context manager: one object may be entered again while it is open, and from several threads.

    Attributes:
        _cached: whether casts of weights are cached inside; None: as around it.
    """

    _cached: bool | None = True

    def __init__(self) -> None:
        self._traced: list[Any] = []  # a compiled function makes an object of its own

    def _mark(self) -> Mark:
        """The region to enter, found on entry."""
        raise NotImplementedError

    @keep_eager
    def __enter__(self) -> Any:
        mark = self._mark()
        if _is_traced():
            region = active.traced_region(mark, self._cached)
            region.__enter__()
            self._traced.append(region)
        else:
            _opened.regions.append(active.open_region(mark, self._cached))
        return self

    @keep_eager
    def __exit__(self, *_: object) -> None:
        if _is_traced():
            self._traced.pop().__exit__(None, None, None)
        else:
            if not _opened.regions:
                raise StateError(f"{type(self).__name__}.__exit__(): this thread is in no region to leave.")
            _opened.regions.pop()()


class Casts(Reentrant, torch.autocast):
    """A region with a mark that is known, also as a decorator.

    It is a ``torch.autocast``, so that code that asks for one finds it. One that was made outside of the function that
    the compiler traces is a torch.autocast to it too: it reads the four properties and runs nothing of what is here.
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
        if torch._guards.TracingContext.try_get() is not None and (
            needs.registered or (mark.portable and mark.device_type in needs.extended)
        ):
            # The compiler ends its graph here and has the block run as it is; with fullgraph=True it shows this.
            raise torch._dynamo.exc.Unsupported(
                "autocast(): made outside of the function that torch.compile traces, which would leave out what xamp "
                "adds to the device's own autocast. Make it inside: with xamp.autocast(): ..."
            )
        return mark.device_type

    @property
    def fast_dtype(self) -> torch.dtype | None:  # type: ignore[override]
        """What operators are cast to."""
        return self._mark().dtype or torch._C.get_autocast_dtype(self._mark().device_type or "")

    @property
    def _enabled(self) -> bool:  # type: ignore[override]
        return self._mark().dtype is not None

    @property
    def _cache_enabled(self) -> bool:  # type: ignore[override]
        return torch._C.is_autocast_cache_enabled() if self._cached is None else self._cached

    def _arguments(self) -> tuple[Any, ...]:
        """What another of this class is made with."""
        return self._given, self._cached

    def __call__(self, func: _Function) -> _Function:
        """Decorate ``func`` to run in this region."""
        name = getattr(func, "__qualname__", repr(func))
        if not callable(func):
            raise PolicyError(f"autocast()({func!r}): decorates functions. To run a block: with xamp.autocast(): ...")
        if any(test(func) for test in _RUN_LATER):
            raise PolicyError(
                f"autocast()({name}): a generator or coroutine would run after the region was left. Write the region "
                "inside it: with xamp.autocast(): ..."
            )

        made, arguments = type(self), self._arguments()

        @functools.wraps(func)
        def in_region(*args: Any, **kwargs: Any) -> Any:
            with made(*arguments):  # a new one, which the compiler traces
                return func(*args, **kwargs)

        in_region.__script_unsupported = "@autocast() is not supported in script mode"  # type: ignore[attr-defined]
        return in_region  # type: ignore[return-value]


_RUN_LATER = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)


class autocast(Casts):
    """``torch.cuda.amp.autocast`` on the device in use: a context manager, a decorator, or a value to keep.

    Operators are cast by the portable policy: the same result dtypes on every device.

    Making one asks no device; that happens on each entry. One object may be entered again while it is open, and by
    several threads.

    Args:
        enabled: False switches casts off inside.
        dtype: ``torch.float16`` or ``torch.bfloat16``; None is float16, on every device.
        cache_enabled: whether casts of weights are cached inside; None leaves that as it is.

    Raises:
        PolicyError: an argument that cannot be right anywhere.
        UnsupportedPolicy: on entry, where the device in use cannot compute in ``dtype``.
        BackendUnavailable: on entry, as :func:`xamp.device`.
    """

    def __init__(
        self, enabled: bool = True, dtype: torch.dtype | None = None, cache_enabled: bool | None = True
    ) -> None:
        Reentrant.__init__(self)
        self._on = _switch("enabled", enabled)
        if self._on and dtype is not None and dtype not in _DTYPES:
            raise PolicyError(
                f"autocast(dtype={dtype!r}): autocast casts to torch.float16 or torch.bfloat16; None is torch.float16. "
                "For float32: autocast(enabled=False)."
            )
        self._dtype = dtype
        self._cached = None if cache_enabled is None else _switch("cache_enabled", cache_enabled)

    def _mark(self) -> Mark:
        return _in_use(self._on, self._dtype)

    def _arguments(self) -> tuple[Any, ...]:
        return self._on, self._dtype, self._cached


def _switch(name: str, value: object) -> bool:
    """``value`` as torch.autocast reads it; a string spells a boolean, as everywhere in xamp."""
    if value is True or value is False:
        return value
    if callable(value) or (isinstance(value, str) and value.strip().lower() not in ("true", "false")):
        raise PolicyError(
            f"autocast({name}={value!r}): must be True or False. torch.autocast's device_type is left out: xamp finds "
            "the device. As a decorator it is spelt with parentheses: @xamp.autocast()."
        )
    return bool(boolean(name, value if isinstance(value, str) else bool(value), call="autocast"))


_found: dict[tuple[bool, torch.dtype | None], tuple[device_in_use.InUse, Mark]] = {}


def _in_use(on: bool, dtype: torch.dtype | None) -> Mark:
    """The region of the device in use; what was found before, while that is the device in use."""
    used, known = device_in_use.in_use(), _found.get((on, dtype))
    if known is not None and known[0] is used:
        return known[1]
    mark = _find(on, dtype, used)
    _found[on, dtype] = used, mark
    return mark


_in_use._dynamo_marked_constant = True  # type: ignore[attr-defined]  # see xamp.casting.mark


def _find(on: bool, dtype: torch.dtype | None, used: device_in_use.InUse) -> Mark:
    chosen, backend = used
    if not torch.amp.is_autocast_available(chosen.type):
        raise UnsupportedPolicy(f"autocast(): torch has no autocast for {chosen.type!r}, the device in use.")
    if not on:
        return mark_of(chosen.type, None)
    _check_dtype(dtype, chosen, backend)
    ops.named("portable").install(chosen.type, backend)
    return mark_of(chosen.type, dtype or torch.float16, portable=True)


def _check_dtype(dtype: torch.dtype | None, chosen: torch.device, backend: Backend) -> None:
    can = backend.capabilities(chosen).dtypes
    name = str(dtype or torch.float16).removeprefix("torch.")
    if name not in can:
        call = "autocast(), whose dtype is float16" if dtype is None else f"autocast(dtype={dtype})"
        fix = f"Pass dtype=torch.{can[0]}, or enabled=False." if can else "Pass enabled=False."
        raise UnsupportedPolicy(
            f"{call}: backend {backend.name!r} cannot compute in it on {chosen}. Lower dtypes there: "
            f"{', '.join(can) or 'none'}. {fix}"
        )
