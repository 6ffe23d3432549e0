"""``custom_fwd`` and ``custom_bwd`` of ``torch.cuda.amp``, for the device that holds the arguments."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch
from torch.autograd.function import FunctionCtx

from xamp.errors import StateError
from xamp.registry import device_in_use
from xamp.registry.registry import HOST
from xamp.torch_compat.compiler import own_code
from xamp.torch_compat.torch_private.autocast import get_autocast_dtype, is_autocast_enabled
from xamp.values.containers import cast_floats

__all__ = ["custom_bwd", "custom_fwd"]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_DEVICE_TYPE = "_xamp_device_type"
_WRAPPED = "_xamp_watched"
_HOOK = "_xamp_hook"


_State = tuple[str, bool, "torch.dtype"]  # of a forward: device type, whether autocast was on inside, autocast dtype


class _LastForward(threading.local):
    """The forward that ran last on a thread.

    Attributes:
        state: its state, until its own context has taken it.
        taken: what that context took; ``torch.func`` has more contexts for the same forward.
    """

    state: _State | None = None
    taken: _State | None = None


_last = _LastForward()


@overload
def custom_fwd(
    fwd: _Function, *, device_type: str | None = None, cast_inputs: torch.dtype | None = None
) -> _Function: ...
@overload
def custom_fwd(
    fwd: None = None, *, device_type: str | None = None, cast_inputs: torch.dtype | None = None
) -> Callable[[_Function], _Function]: ...
def custom_fwd(fwd: Any = None, *, device_type: str | None = None, cast_inputs: torch.dtype | None = None) -> Any:
    """Decorate ``forward`` of a ``torch.autograd.Function``, as ``torch.cuda.amp.custom_fwd`` does.

    The device is the one of the first argument tensor on an accelerator, else of the first tensor, else the device in
    use. Both styles of forward work: with a context as the first argument, and without one beside a ``setup_context``.
    The latter gets the inputs as they were before ``cast_inputs``. Under ``@classmethod`` the class comes first.

    Args:
        fwd: the function; None returns the decorator.
        device_type: the type of the device whose autocast counts, as in ``torch.amp``; None finds it as above.
        cast_inputs: where autocast is on, argument tensors that are floating (on that device, not float64) are cast to
            this dtype, and autocast is off inside. None leaves both as they are.
    """
    if fwd is None:
        return functools.partial(custom_fwd, device_type=device_type, cast_inputs=cast_inputs)
    around = sys._getframe(1).f_locals
    if "__qualname__" in around and "__module__" in around:  # the body of a class
        around.setdefault(_HOOK, _SetupHook())

    run = own_code(_run)

    @functools.wraps(fwd)
    def forward(*args: Any, **kwargs: Any) -> Any:
        kind = device_type or _device_type((*args, *kwargs.values()))
        on, dtype = is_autocast_enabled(kind), get_autocast_dtype(kind)
        state = kind, on and cast_inputs is None, dtype
        dtype_inside = cast_inputs if on else None
        at = _context_at(args)
        if at is not None:
            _store_state(args[at], state)
            return run(functools.partial(fwd, *args[: at + 1]), kind, dtype_inside, args[at + 1 :], kwargs)
        if not torch.compiler.is_compiling():
            _wrap_setup_context(sys._getframe(1).f_locals.get("cls"))
        result = run(fwd, kind, dtype_inside, args, kwargs)
        _last.state = state  # only now: the forward may have run another forward
        return result

    return own_code(forward)


def _run(fwd: Callable[..., Any], kind: str, dtype: torch.dtype | None, args: Any, kwargs: Any) -> Any:
    if dtype is None:
        return fwd(*args, **kwargs)
    args, kwargs = cast_floats(args, dtype, kind), cast_floats(kwargs, dtype, kind)
    with torch.autocast(kind, enabled=False):
        return fwd(*args, **kwargs)


@overload
def custom_bwd(bwd: _Function, *, device_type: str | None = None) -> _Function: ...
@overload
def custom_bwd(bwd: None = None, *, device_type: str | None = None) -> Callable[[_Function], _Function]: ...
def custom_bwd(bwd: Any = None, *, device_type: str | None = None) -> Any:
    """Decorate ``backward`` of a ``torch.autograd.Function``: it runs under the autocast state of its forward.

    It works as ``torch.cuda.amp.custom_bwd``. The forward must be decorated with :func:`custom_fwd` or torch's own.

    Args:
        bwd: the method; the first of its arguments is ``ctx``. None returns the decorator.
        device_type: the type of the device whose autocast is set, as in ``torch.amp``; None takes the forward's.

    Raises:
        StateError: in backward, where the forward's state is not known.
    """
    if bwd is None:
        return functools.partial(custom_bwd, device_type=device_type)

    @functools.wraps(bwd)
    def backward(*args: Any, **kwargs: Any) -> Any:
        first = args[
            : (_context_at(args) or 0) + 1
        ]  # under @classmethod torch's custom_fwd stores the state in the class
        ctx: Any = next((each for each in reversed(first) if hasattr(each, "_fwd_used_autocast")), None)
        if ctx is None:
            raise StateError(
                f"custom_bwd({bwd.__qualname__}): the autocast state of its forward is not known. Decorate the forward "
                "with @xamp.custom_fwd, and give it ctx as its first argument."
            )
        kind = device_type or getattr(ctx, _DEVICE_TYPE, None) or _device_type(args)
        with torch.autocast(kind, enabled=ctx._fwd_used_autocast, dtype=ctx._dtype):
            return bwd(*args, **kwargs)

    return own_code(backward)


def _context_at(args: tuple[Any, ...]) -> int | None:
    """Return the place of the context: the first, or the second after the class; None where there is none."""
    if args and isinstance(args[0], FunctionCtx):
        return 0
    return 1 if len(args) > 1 and isinstance(args[0], type) and isinstance(args[1], FunctionCtx) else None


def _device_type(values: tuple[Any, ...]) -> str:
    kinds = [value.device.type for value in values if isinstance(value, torch.Tensor)]
    return next((kind for kind in kinds if kind != HOST), HOST) if kinds else device_in_use.device_type()


class _SetupHook:
    """Stands in the body of a class until the class is made, and wraps ``setup_context`` then, and in each subclass.

    The compiler takes ``setup_context`` before it has traced the forward, which is too late for the forward to wrap it.
    Subclasses of a class with an ``__init_subclass__`` of its own need one eager run first.
    """

    def __set_name__(self, owner: Any, name: str) -> None:
        delattr(owner, name)
        _wrap_setup_context(owner)
        if "__init_subclass__" in vars(owner):
            return

        def init_subclass(cls: Any, /, **kwargs: Any) -> None:
            super(owner, cls).__init_subclass__(**kwargs)
            _wrap_setup_context(cls)

        owner.__init_subclass__ = classmethod(init_subclass)


def _wrap_setup_context(cls: Any) -> None:
    """Wrap ``setup_context`` of ``cls`` to store the state of the forward that ran just before, on the same thread.

    torch passes only inputs and outputs from the forward to ``setup_context``, and the forward cannot see the context.
    """
    setup = getattr(cls, "setup_context", None)
    if setup is None or not issubclass(cls, torch.autograd.Function) or hasattr(setup, _WRAPPED):
        return
    if setup is torch.autograd.Function.setup_context:  # it has none of its own
        return

    @functools.wraps(setup)
    def setup_context(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not _is_of_torch_func(ctx):
            _last.taken, _last.state = _last.state, None
        if _last.taken is not None:
            _store_state(ctx, _last.taken)
        return setup(ctx, *args, **kwargs)

    setattr(setup_context, _WRAPPED, True)
    cls.setup_context = staticmethod(own_code(setup_context))


def _is_of_torch_func(ctx: Any) -> bool:
    """Return whether ``torch.func`` made the class of a context, one for each of its levels.

    Its forward runs that of the user's class, whose own context comes first.
    """
    cls = getattr(type(ctx), "_forward_cls", None)
    return cls is not None and cls.__module__.startswith("torch.")


def _store_state(ctx: Any, state: _State) -> None:
    """Store ``state`` in ``ctx`` under torch's names, so that torch's decorators and these can be mixed."""
    kind, ctx._fwd_used_autocast, ctx._dtype = state
    setattr(ctx, _DEVICE_TYPE, kind)
