"""Runs a module's methods under a policy by giving the module a subclass of its own class.

Data flow: xamp compiles the policy once into a :class:`~xamp.casting.region.Region` (device type, dtypes).
:func:`enter_policy` makes or finds the subclass of ``type(module)`` whose methods run in that region, and assigns it to
``module.__class__``.

The module itself stores nothing. So its copies, replicas and slices carry the policy with their own weights, its
pickles are plain, and ``isinstance``, ``repr`` and the signature of ``forward`` do not change. The alternatives fail:
hooks cannot be traced with ``fullgraph=True``, and an instance attribute ``forward`` makes a deepcopy run with the
original's weights.
"""

from __future__ import annotations

import copy
import copyreg
import dataclasses
import functools
import inspect
import operator
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from xamp.casting import ops
from xamp.casting.entry_points import entry_points, with_explanation
from xamp.casting.export import writers_of
from xamp.casting.region import Region, before_forward, explain, in_framed_region, in_region, is_framed
from xamp.errors import PolicyError
from xamp.torch_compat.compiler import eager_by_rule, keep_eager, own_code
from xamp.values import followers
from xamp.values.class_swap import make_subclass, set_class
from xamp.values.log import say_again
from xamp.values.lowered import note_copies

__all__ = [
    "InstanceMethod",
    "enter_policy",
    "forget_policy",
    "is_under_policy",
    "region_of",
]


class _UnderPolicy:
    """The base of the subclasses made here. It keeps ``__init_subclass__`` of the user's classes from being called."""

    _xamp_region: Region
    _xamp_base: type

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass

    @eager_by_rule
    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Call ``zero_grad`` of the base class, and say so: masters have gradients to clear too."""
        base: Any = super()
        base.zero_grad(*args, **kwargs)
        self._xamp_region.around.cleared(self)  # type: ignore[arg-type]

    @eager_by_rule
    def train(self, mode: bool = True) -> Any:
        """Call ``train`` of the base class, as ``eval`` does; where the mode changes, the model follows its masters."""
        base: Any = super()
        own: Any = self
        before = own.training
        base.train(mode)
        if own.training is not before and self._xamp_region.follows:
            followers.begin_mode(own)
        return self

    def __prepare_scriptable__(self) -> Any:
        """Called by ``torch.jit.script``, which would compile the base class's methods without the policy."""
        _refuse_script()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a module of the base class, which loads where xamp is not installed."""
        reduced: Any = super().__reduce_ex__(protocol)
        make, args, *rest = reduced
        # Replace this class by the user's: pickle finds only that one under the name.
        make, *args = [self._xamp_base if part is type(self) else part for part in (make, *args)]
        if make in (copyreg.__newobj__, copyreg.__newobj_ex__):  # type: ignore[attr-defined]
            make = functools.partial(make)  # by its name pickle knows it, and asks for the class that the module has
        return (make, tuple(args), *rest)

    def __copy__(self) -> Any:
        return _copied(self, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _copied(self, memo)


def _copied(module: Any, memo: dict[int, Any] | None) -> Any:
    """Copy a module of a class that has no ``__copy__``, or no ``__deepcopy__``, of its own; the latter with ``memo``.

    Called by :mod:`copy`, whose own way goes through ``__reduce_ex__``, and that is what a pickle gets.
    """
    region: Region = module._xamp_region
    if region.follows:
        followers.catch_up(module)
    made: Any = copy._reconstruct(module, memo, *module.__reduce_ex__(4))  # type: ignore[attr-defined]
    return _put_under_policy(made, region, is_deep=memo is not None)


def _put_under_policy(made: Any, region: Region, *, is_deep: bool) -> Any:
    """Put a copy of a managed module under the policy of ``region``, and return it."""
    if not isinstance(made, _UnderPolicy):
        set_class(made, _subclass(type(made), region))
    ops.hold(region.op_policy, made)  # the copy may outlive the session of its original
    if region.lowers and is_deep:
        note_copies(made)
    return made


def is_under_policy(module: nn.Module) -> bool:
    """Tell whether ``module``, or the module it was copied from, is under a policy."""
    return isinstance(module, _UnderPolicy) or any(isinstance(v, InstanceMethod) for v in module.__dict__.values())


def region_of(module: nn.Module) -> Region | None:
    """Return the region in which ``module`` runs; None if it is under no policy."""
    return getattr(type(module), "_xamp_region", None)


def _refuse_script() -> NoReturn:
    from xamp.casting.script import refuse_script  # what is not scripted need not load it

    refuse_script()


def enter_policy(module: nn.Module, region: Region) -> Callable[[], None]:
    """Make the methods of ``module`` run in ``region``.

    Returns:
        A function that undoes this.

    Raises:
        PolicyError: the module lacks one of the methods, or its class cannot be subclassed.
    """
    for name in region.methods:
        if not callable(getattr(module, name, None)):
            raise PolicyError(
                f"initialize(methods={region.methods!r}): {type(module).__name__} has no method {name!r}."
            )
        if inspect.isgeneratorfunction(getattr(module, name)) or inspect.iscoroutinefunction(getattr(module, name)):
            raise PolicyError(
                f"initialize(methods={region.methods!r}): {type(module).__name__}.{name} is a generator or coroutine, "
                "and would run after its region was left. Name the plain methods that it calls."
            )
    say_again()
    # An instance attribute hides the class's method: that of a ScriptModule, or one that somebody assigned.
    scripted = isinstance(module, torch.jit.ScriptModule)
    hidden = [name for name in region.methods if scripted or name in module.__dict__]
    before = type(module)
    module_ref = weakref.ref(module)  # the function that undoes this must not keep the model alive

    def leave() -> None:
        found = module_ref()
        if found is None:
            return
        if scripted:
            found.__dict__.pop("__deepcopy__", None)
            found.__dict__.pop("__prepare_scriptable__", None)
        else:
            set_class(found, before)
        for name in region.methods:
            method = found.__dict__.get(name)
            if isinstance(method, InstanceMethod):
                found.__dict__[name] = method.function

    try:
        if not scripted:
            set_class(module, _subclass(before, region, _explained(module, region)))
        for name in hidden:
            module.__dict__[name] = InstanceMethod(getattr(module, name), region, module)
        if scripted:
            module.__dict__["__deepcopy__"] = _ScriptCopy(module, region)
            module.__dict__["__prepare_scriptable__"] = _refuse_script  # called where it is a part of what is compiled
        return leave
    except BaseException as error:
        leave()
        if isinstance(error, TypeError):
            raise PolicyError(f"initialize: {before.__name__} cannot be put under a policy: {error}.") from error
        raise


def _explained(module: nn.Module, region: Region) -> tuple[str, ...]:
    """Return the names of methods that need casts and do not run in ``region``: their errors say so."""
    found = entry_points(module, region.methods) if region.lowers and region.methods else ()
    return tuple(name for name in found if name not in module.__dict__)


def forget_policy(copied: nn.Module) -> None:
    """Make ``copied``, a copy of a managed model, a module of its own class. Its tensors stay as they are."""
    for module in copied.modules():
        if isinstance(module, _UnderPolicy):
            set_class(module, module._xamp_base)
        for name, method in list(module.__dict__.items()):
            if isinstance(method, InstanceMethod):
                module.__dict__[name] = method.function


class _Kept(list[type]):
    """The subclasses that a class keeps. A class that is pickled by value takes none of them along."""

    def __reduce__(self) -> Any:
        return list, ()


_KEPT = "_xamp_subclasses"
_Key = tuple[int, Region, tuple[str, ...], bool]
_subclasses: weakref.WeakValueDictionary[_Key, type] = weakref.WeakValueDictionary()


def _subclass(base: type, region: Region, explained: tuple[str, ...] = ()) -> type:
    """Return the subclass of ``base`` whose methods run in ``region``: the same class each time.

    The subclass keeps ``base`` alive, so that the id of ``base`` stays valid as a key. ``base`` keeps the subclass
    alive: the compiler drops the graphs of a class that is gone, and the next model of this one would compile anew.
    """
    key = id(base), region, explained, is_framed(region)
    found = _subclasses.get(key)
    if found is not None:
        return found
    namespace: dict[str, Any] = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "_xamp_region": region,
        "_xamp_base": base,
    }
    for name in region.methods:
        if callable(getattr(base, name, None)):
            namespace[name] = in_region(getattr(base, name), region)
    for name in explained:
        namespace[name] = with_explanation(name, getattr(base, name))
    if region.lowers:
        namespace.update(writers_of(base))
    if hasattr(base, "__deepcopy__"):
        namespace["__deepcopy__"] = _copy(base, region, "__deepcopy__")
    if hasattr(base, "__copy__"):
        namespace["__copy__"] = _copy(base, region, "__copy__")
    if issubclass(base, torch.fx.GraphModule):
        namespace["recompile"] = _recompile(base, region)
    made = make_subclass(base, _UnderPolicy, namespace)
    _subclasses[key] = made
    if not isinstance(base.__dict__.get(_KEPT), _Kept):  # it may come from a pickle
        type.__setattr__(base, _KEPT, _Kept())  # not setattr: a metaclass may refuse it
    base.__dict__[_KEPT].append(made)
    return made


def _copy(base: Any, region: Region, name: str) -> Callable[..., Any]:
    """Return ``__copy__`` or ``__deepcopy__`` for a class that has its own, whose copy is without policy.

    A ``GraphModule`` has: it makes its copy of the classes that it finds.
    """

    def copied(self: Any, *memo: Any) -> Any:
        own = type(self)
        if region.follows:
            followers.catch_up(self)
        set_class(self, base)
        try:
            made = getattr(base, name)(self, *memo)
        finally:
            set_class(self, own)
        return _put_under_policy(made, region, is_deep=name == "__deepcopy__")

    copied.__name__ = name
    return copied


def _recompile(base: Any, region: Region) -> Callable[[Any], Any]:
    """Return ``recompile`` for a ``GraphModule``: it must write the new forward into ``base``, not the subclass."""

    def recompile(self: Any) -> Any:
        set_class(self, base)
        try:
            return base.recompile(self)
        finally:
            _subclasses.pop((id(base), region, (), is_framed(region)), None)
            base.__dict__.get(_KEPT, []).clear()  # each GraphModule has a class of its own
            set_class(self, _subclass(base, region))

    return recompile


class InstanceMethod:
    """An instance attribute that hides a method and runs in a region.

    It is copied with its module. In a pickle the attribute is what it was before.
    """

    def __init__(self, function: Callable[..., Any], region: Region, module: nn.Module | None = None) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self._region = region
        self._module = None if module is None else weakref.ref(module)
        self._run = in_framed_region(
            own_code(_call),
            dataclasses.replace(region, explains=False, around=region.around._replace(watch=None)),
            function,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the attribute in its region. The compiler skips this frame, and begins with that of :attr:`_run`."""
        module = None if self._module is None else self._module()
        around = self._region.around
        before_forward(module if self._region.follows else None, around)
        try:
            if module is not None and around.watch is not None:
                return around.watch(module, self._run, (self.function, *args), kwargs)
            return self._run(self.function, *args, **kwargs)
        except Exception as error:
            if module is not None:
                explain(error, module, self._region)
            raise

    keep_eager(__call__, inner=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> InstanceMethod:
        return InstanceMethod(copy.deepcopy(self.function, memo), self._region)

    def __reduce__(self) -> Any:
        return operator.getitem, ((self.function,), 0)


class _ScriptCopy:
    """``__deepcopy__`` for a ScriptModule, whose own drops all attributes that Python set on the instance."""

    def __init__(self, module: nn.Module, region: Region) -> None:
        self._module = weakref.ref(module)
        self._region = region

    def __call__(self, memo: dict[int, Any]) -> nn.Module:
        module = self._module()
        assert module is not None, "it is being copied"
        del module.__dict__["__deepcopy__"]
        try:
            made = copy.deepcopy(module, memo)
        finally:
            module.__dict__["__deepcopy__"] = self
        enter_policy(made, self._region)
        return made


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)
