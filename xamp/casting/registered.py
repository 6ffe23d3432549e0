"""Functions, torch's own among them, that are replaced by a wrapper which chooses their dtype in xamp's regions.

The wrapper hands a call through unless :func:`xamp.casting.active.current` says that it comes from a region, or from
what backward recomputes of one; so nothing changes for whoever else calls the function, in this thread or another.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

from xamp.casting import active, recompute
from xamp.casting.functions import FLOAT, HALF, PROMOTE, call, is_torchs
from xamp.casting.needs import needs
from xamp.casting.script import forget_script, tell_script
from xamp.errors import PolicyError

__all__ = ["register_float_function", "register_half_function", "register_promote_function"]


def register_half_function(module: Any, name: str) -> None:
    """Run ``module.name`` in the lower dtype wherever it is called in a region of xamp's that casts.

    It is replaced in ``module`` at once, and acts from now on in models that are given to ``initialize`` at O1 or O4,
    in ``session.autocast()`` and in ``xamp.autocast``, and in what activation checkpointing recomputes of them. It is
    what it was anywhere else, in a ``torch.autocast`` of the user's own too. Registering it again replaces the kind.

    Not reached are: who imported the function by name before; a model at O1 or O4 whose own ``forward`` is registered
    after ``initialize``; methods of ``torch.Tensor`` in a region that ``torch.compile`` traces.

    Args:
        module: a module, a class (``name`` is a method then), or anything else that holds the function.
        name: of the function, which may be torch's own. :func:`xamp.half_function` says what is cast.

    Raises:
        PolicyError: there is no such function, or it cannot be replaced.
    """
    _register(HALF, module, name)


def register_float_function(module: Any, name: str) -> None:
    """As :func:`register_half_function`, with all of ``module.name`` in fp32."""
    _register(FLOAT, module, name)


def register_promote_function(module: Any, name: str) -> None:
    """As :func:`register_half_function`, with the arguments of ``module.name`` in the widest of their dtypes."""
    _register(PROMOTE, module, name)


_RECORD = "_xamp_registered"
_ABSENT = object()


class _Registered:
    """One function that was replaced.

    Attributes:
        kind: as what it is called in regions; may change.
        function: what is called.
        plain: see :func:`xamp.casting.functions.call`.
        made: what stands in its place.
        instead: the record of the wrapper that stood there already: put there before, or imported by name since.
    """

    def __init__(self, kind: str, holder: Any, name: str) -> None:
        raw, self._holder, self._name = getattr(holder, name), holder, name
        self._dress: Callable[[Any], Any] = lambda made: made
        if isinstance(holder, type):
            raw = inspect.getattr_static(holder, name)
            if isinstance(raw, (staticmethod, classmethod)):
                raw, self._dress = raw.__func__, type(raw)
            elif isinstance(raw, types.ClassMethodDescriptorType):
                raw, self._dress = getattr(holder, name), staticmethod
        self.instead = _record_of(raw)
        self.kind = kind
        self.function: Any = raw if self.instead is None else self.instead.function
        self.plain = is_torchs(self.function, holder)
        self.made: Any = None
        # What stands in the holder itself, not what a class inherits.
        self._before = getattr(holder, "__dict__", {}).get(name, _ABSENT)

    def install(self) -> None:
        """Put the wrapper in the function's place."""
        self.made = _wrapper(self) if inspect.isroutine(self.function) else _Callable(self)
        module = getattr(self._holder, "__module__" if isinstance(self._holder, type) else "__name__", None)
        if isinstance(self.made, types.FunctionType) and isinstance(module, str):
            # A pickle names it by where it stands, and finds there what its reader has.
            self.made.__module__ = module
            prefix = f"{self._holder.__qualname__}." if isinstance(self._holder, type) else ""
            self.made.__qualname__ = prefix + self._name
        tell_script(self.function, self.made)  # before torch's own table of functions can find the wrapper
        setattr(self._holder, self._name, self._dress(self.made))

    def remove(self) -> None:
        """Put back what was there."""
        if self._before is _ABSENT:
            delattr(self._holder, self._name)
        else:
            setattr(self._holder, self._name, self._before)
        forget_script(self.made)


_registered: dict[tuple[int, str], _Registered] = {}
_lock = threading.Lock()


def _record_of(function: object) -> _Registered | None:
    """The record of a wrapper; a wrapper that somebody put around it, with its attributes, has none."""
    record = getattr(function, _RECORD, None)
    return record if isinstance(record, _Registered) and record.made is function else None


def _register(kind: str, module: Any, name: str) -> None:
    asked = f"register_{kind}_function({getattr(module, '__name__', module)}, {name!r})"
    if not hasattr(module, name):
        close = difflib.get_close_matches(str(name), dir(module), n=1)
        guess = f" Did you mean {close[0]!r}?" if close else ""
        raise PolicyError(f"No function named {name} in module {module}.{guess}")
    with _lock:
        before = _registered.get((id(module), name))
        made = _Registered(kind, module, name)
        if before is not None and made.instead is before:
            before.kind = kind
            return
        _refuse(asked, name, made)
        _correct_compiler()
        try:
            made.install()
        except (AttributeError, TypeError) as error:
            raise PolicyError(
                f"{asked}: it cannot be replaced there: {error}. Register it where you call it."
            ) from error
        _registered[id(module), name] = made
        needs.set_registered(True)
        recompute.watch()


def _refuse(asked: str, name: str, made: _Registered) -> None:
    """Refuse what is no function, and what would be done to a copy of its argument."""
    if not callable(made.function):
        raise PolicyError(f"{asked}: this is no function but {type(made.function).__name__}.")
    if isinstance(made.function, type):
        raise PolicyError(
            f"{asked}: this is a class. Register its method: {asked.partition('(')[0]}({name}, 'forward')."
        )
    if made.plain and name.endswith("_") and not name.endswith("__"):
        raise PolicyError(
            f"{asked}: it writes into its argument, and would write into a cast copy of that. Register and call "
            f"{name.rstrip('_')!r}."
        )


def _unregister_all() -> None:
    """Put every function back, last registered first."""
    with _lock:
        _correct_compiler()
        while _registered:
            _, made = _registered.popitem()
            made.remove()
        needs.set_registered(False)


# ---------------------------------------------------------------- what stands in the function's place


def _wrapper(record: _Registered) -> Callable[..., Any]:
    """A function for a function: it binds as a method where that did."""
    function, plain = record.function, record.plain

    @functools.wraps(function)
    def registered(*args: Any, **kwargs: Any) -> Any:
        if active.current() is None:
            return function(*args, **kwargs)
        return call(record.kind, plain, function, args, kwargs)

    setattr(registered, _RECORD, record)
    return registered


class _Callable:
    """For any other callable: an operator of a library with its overloads, a partial object, a compiled function."""

    def __init__(self, record: _Registered) -> None:
        self._xamp_registered = record
        self._function = record.function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        record = self._xamp_registered
        if active.current() is None:
            return self._function(*args, **kwargs)
        return call(record.kind, record.plain, self._function, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in ("_function", "_xamp_registered"):  # while a copy is being made
            raise AttributeError(name)
        return getattr(self._function, name)

    def __reduce__(self) -> Any:
        return _identity, (self._function,)  # the reader of a pickle may have registered nothing

    def __deepcopy__(self, memo: dict[int, Any]) -> _Callable:
        return self


def _identity(function: Any) -> Any:
    return function


def _correct_compiler() -> None:
    """Have the compiler trace wrappers that it took for torch's functions, since they stood in their place.

    It looks its table of torch's functions up by name, when it is first used. What it finds there it does not look
    into: such a wrapper would run when the graph runs, where no mark says that it is in a region.
    """
    rules = sys.modules.get("torch._dynamo.trace_rules")
    if rules is None:
        return
    table = rules.get_torch_obj_rule_map()
    for record in list(_registered.values()):
        rule = table.pop(record.made, None)
        if rule is not None:
            table.setdefault(record.function, rule)


needs.call_when_tracing(_correct_compiler)
