"""Replaces functions, torch's own too, by wrappers that choose the dtype of a call in xamp's regions.

The wrapper casts only if :func:`xamp.casting.active.current` finds that the call comes from a region, or from the
recomputation of one. It passes all other calls on unchanged, so that nothing changes for other callers of the function,
in this thread or another.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import threading
import types
from collections.abc import Callable
from typing import Any

from xamp.casting import active, recompute
from xamp.casting.features_in_use import needs
from xamp.casting.functions import FLOAT, HALF, PROMOTE, call, is_torchs
from xamp.casting.script import forget_script, tell_script
from xamp.errors import PolicyError
from xamp.torch_compat.compiler import own_code
from xamp.torch_compat.torch_private import dynamo

__all__ = ["register_float_function", "register_half_function", "register_promote_function"]


def register_half_function(module: Any, name: str) -> None:
    """Run ``module.name`` in the lower dtype when it is called in a region of xamp that casts.

    This call replaces the function in ``module`` at once. The replaced function casts in models that ``initialize``
    manages at O1 or O4, in ``session.autocast()`` and ``xamp.autocast``, and where activation checkpointing recomputes
    these. Elsewhere it does what it did before, also in a ``torch.autocast`` block of the user's own. Registering the
    function again replaces the kind.

    The replacement does not reach: code that imported the function by name before; a model at O1 or O4 whose own
    ``forward`` is registered after ``initialize``; methods of ``torch.Tensor`` in a region that ``torch.compile``
    traces.

    Args:
        module: a module, a class (``name`` is a method then), or any other object that holds the function.
        name: the name of the function, which may be torch's own. :func:`xamp.half_function` says what is cast.

    Raises:
        PolicyError: there is no such function, or it cannot be replaced.
    """
    _register(HALF, module, name)


def register_float_function(module: Any, name: str) -> None:
    """Run ``module.name`` in fp32; otherwise as :func:`register_half_function`."""
    _register(FLOAT, module, name)


def register_promote_function(module: Any, name: str) -> None:
    """Cast the arguments of ``module.name`` to the widest of their dtypes; else as :func:`register_half_function`."""
    _register(PROMOTE, module, name)


_RECORD = "_xamp_registered"
_ABSENT = object()


class _Replacement:
    """The record of one replaced function.

    Attributes:
        kind: how it is cast in regions (half, float or promote); registering it again may change this.
        function: the original function.
        autocast_off: see :func:`xamp.casting.functions.call`.
        wrapper: the wrapper that replaces it.
        earlier: the record of the wrapper that was in this place already, because the function was registered before,
            or because this holder imported the wrapper by name; None if there was none.
    """

    def __init__(self, kind: str, holder: Any, name: str) -> None:
        raw, self._holder, self._name = getattr(holder, name), holder, name
        self._descriptor: Callable[[Any], Any] = lambda wrapper: wrapper
        if isinstance(holder, type):
            raw = inspect.getattr_static(holder, name)
            if isinstance(raw, (staticmethod, classmethod)):
                raw, self._descriptor = raw.__func__, type(raw)
            elif isinstance(raw, types.ClassMethodDescriptorType):
                raw, self._descriptor = getattr(holder, name), staticmethod
        self.earlier = _record_of(raw)
        self.kind = kind
        self.function: Any = raw if self.earlier is None else self.earlier.function
        self.autocast_off = is_torchs(self.function, holder)
        self.wrapper: Any = None
        # The entry of the holder itself; an inherited one does not count.
        self._before = getattr(holder, "__dict__", {}).get(name, _ABSENT)

    def install(self) -> None:
        """Replace the function by the wrapper."""
        self.wrapper = _function_wrapper(self) if inspect.isroutine(self.function) else _CallableWrapper(self)
        module = getattr(self._holder, "__module__" if isinstance(self._holder, type) else "__name__", None)
        if isinstance(self.wrapper, types.FunctionType) and isinstance(module, str):
            # A pickle stores this module and name; whoever loads it gets the function that is there then.
            self.wrapper.__module__ = module
            prefix = f"{self._holder.__qualname__}." if isinstance(self._holder, type) else ""
            self.wrapper.__qualname__ = prefix + self._name
        tell_script(self.function, self.wrapper)  # before torch's own table of functions can find the wrapper
        setattr(self._holder, self._name, self._descriptor(self.wrapper))

    def remove(self) -> None:
        """Restore the original."""
        if self._before is _ABSENT:
            delattr(self._holder, self._name)
        else:
            setattr(self._holder, self._name, self._before)
        forget_script(self.wrapper)


_registered: dict[tuple[int, str], _Replacement] = {}
_lock = threading.RLock()


def _record_of(function: object) -> _Replacement | None:
    """Return the record of a wrapper that this module made.

    A function that somebody wrapped around it has a copy of the attributes, but no record: the result is None.
    """
    record = getattr(function, _RECORD, None)
    return record if isinstance(record, _Replacement) and record.wrapper is function else None


def _register(kind: str, module: Any, name: str) -> None:
    request = f"register_{kind}_function({getattr(module, '__name__', module)}, {name!r})"
    if not hasattr(module, name):
        close = difflib.get_close_matches(str(name), dir(module), n=1)
        guess = f" Did you mean {close[0]!r}?" if close else ""
        raise PolicyError(f"No function named {name} in module {module}.{guess}")
    with _lock:
        before = _registered.get((id(module), name))
        record = _Replacement(kind, module, name)
        if before is not None and record.earlier is before:
            before.kind = kind
            return
        _check_replaceable(request, name, record)
        _correct_trace_rules()
        try:
            record.install()
        except (AttributeError, TypeError) as error:
            raise PolicyError(
                f"{request}: it cannot be replaced there: {error}. Register it where you call it."
            ) from error
        _registered[id(module), name] = record
        needs.registered = True
        recompute.watch()


def _check_replaceable(request: str, name: str, record: _Replacement) -> None:
    """Raise if this is not a function, or if it writes into its argument and so would write into a cast copy."""
    if not callable(record.function):
        raise PolicyError(f"{request}: this is no function but {type(record.function).__name__}.")
    if isinstance(record.function, type):
        raise PolicyError(
            f"{request}: this is a class. Register its method: {request.partition('(')[0]}({name}, 'forward')."
        )
    if record.autocast_off and name.endswith("_") and not name.endswith("__"):
        raise PolicyError(
            f"{request}: it writes into its argument, and would write into a cast copy of that. Register and call "
            f"{name.rstrip('_')!r}."
        )


def _unregister_all() -> None:
    """Restore all functions, the last registered first."""
    with _lock:
        _correct_trace_rules()
        while _registered:
            _, record = _registered.popitem()
            record.remove()
        needs.registered = False


# ---------------------------------------------------------------- wrappers


def _function_wrapper(record: _Replacement) -> Callable[..., Any]:
    """Return a wrapper that is a function, and so binds as a method as the original did."""
    function, autocast_off, cast_and_call = record.function, record.autocast_off, own_code(call)

    @functools.wraps(function)
    def registered(*args: Any, **kwargs: Any) -> Any:
        if active.current() is None:
            return function(*args, **kwargs)
        return cast_and_call(record.kind, autocast_off, function, args, kwargs)

    setattr(registered, _RECORD, record)
    return own_code(registered)


class _CallableWrapper:
    """The wrapper of any other callable: an operator with its overloads, a partial object, a compiled function."""

    def __init__(self, record: _Replacement) -> None:
        self._xamp_registered = record
        self._function = record.function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        record = self._xamp_registered
        if active.current() is None:
            return self._function(*args, **kwargs)
        return call(record.kind, record.autocast_off, self._function, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in ("_function", "_xamp_registered"):  # asked for while a copy is being made
            raise AttributeError(name)
        return getattr(self._function, name)

    def __reduce__(self) -> Any:
        return _identity, (self._function,)  # the process that loads it may have registered nothing

    def __deepcopy__(self, memo: dict[int, Any]) -> _CallableWrapper:
        return self


def _identity(function: Any) -> Any:
    return function


def _correct_trace_rules() -> None:
    """Make the compiler trace the wrappers, and not treat them as torch's functions, whose places they have taken.

    On first use, the compiler fills its table of torch's functions by looking up their names. It does not trace into
    what it finds there. A wrapper in that table would run when the graph runs, where no mark tells that it is in a
    region.
    """
    table = dynamo.rules_of_functions()
    if table is None:
        return
    for record in list(_registered.values()):
        rule = table.pop(record.wrapper, None)
        if rule is not None:
            table.setdefault(record.function, rule)


needs.when_tracing.append(_correct_trace_rules)
