"""Runs a module's methods under a policy by giving the module a subclass of its own class.

Data flow: xamp compiles the policy once into a :class:`Region` (device type, dtypes). :func:`enter_policy` makes or
finds the subclass of ``type(module)`` whose methods run in that region, and assigns it to ``module.__class__``.

The module itself stores nothing. So its copies, pickles, replicas and slices carry the policy with their own weights,
and ``isinstance``, ``repr`` and the signature of ``forward`` do not change. The alternatives fail: hooks cannot be
traced with ``fullgraph=True``, and an instance attribute ``forward`` makes a deepcopy run with the original's weights.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from xamp.casting import active, ops
from xamp.casting.autocast import Casts
from xamp.casting.explain import entry_points, explain_forward, with_explanation
from xamp.casting.inputs import cast_some
from xamp.casting.mark import Mark, mark_of
from xamp.casting.needs import needs
from xamp.casting.script import refuse_script
from xamp.casting.written import writers_of
from xamp.errors import BackendUnavailable, PolicyError
from xamp.ground.caster import caster
from xamp.ground.class_swap import make_subclass, set_class
from xamp.ground.containers import cast_floats
from xamp.ground.pickle_names import pickled_as
from xamp.registry import registry
from xamp.scaling import distributed, masters
from xamp.scaling.overflow_flag import run_watched, watched
from xamp.scaling.witness import clear_gradients

__all__ = [
    "Cast",
    "InstanceMethod",
    "Region",
    "enter_policy",
    "forget_policy",
    "is_under_policy",
    "make_instance_method",
    "make_region",
    "rebuild",
    "region_of",
]

Cast = Callable[[Any, torch.dtype], Any]
"""Casts the floating tensors in any value: :func:`xamp.ground.containers.cast_floats`, or another function."""


@dataclasses.dataclass(frozen=True)
class Region:
    """The dtypes and the autocast state with which a method runs.

    Attributes:
        device_type: the device type whose autocast state is set.
        autocast_dtype: the dtype to which operators are cast; None switches autocast off inside.
        input_dtype: the dtype to which floating arguments are cast; None leaves them as they are.
        output_dtype: the dtype to which floating results are cast; None leaves them as they are.
        methods: the names of the methods that run in the region.
        op_policy: the name of the policy by which operators are cast.
        watched: whether each forward asks the device for an overflow, because the device saturates and shows no inf.
        cast: the function that casts arguments and results.
        apart: True: casts of the surrounding code are off inside, and the region sets its own autocast state.
            False: the method runs in the autocast state of its caller; only arguments and results are cast.
        follows: the model has masters, and follows what else than a step changed in them, before each call.
        spared: names of arguments, and types, that are not cast.
        lowers: the parameters are cast, and the state dict is fp32: an error about dtypes says what to do, and a method
            that writes out the model notes the dtype.
    """

    device_type: str
    autocast_dtype: torch.dtype | None
    input_dtype: torch.dtype | None
    output_dtype: torch.dtype | None
    methods: tuple[str, ...] = ("forward",)
    op_policy: str = "native"
    watched: bool = False
    cast: Cast = cast_floats
    apart: bool = True
    follows: bool = False
    spared: tuple[type | str, ...] = ()
    lowers: bool = False

    def __reduce__(self) -> Any:
        """Pickle the fields by name."""
        return make_region, (vars(self),)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the fields and install the op policy, which this process may not have installed yet."""
        self.__dict__.update(state)
        with contextlib.suppress(BackendUnavailable):  # without a backend, nothing runs on that device
            ops.named(self.op_policy).install(self.device_type, registry.resolve("auto", self.device_type))

    def autocast(self) -> Casts:
        """Return the region as a context manager, for code that is not a method of a module."""
        return Casts(self.mark)

    @property
    def does_something(self) -> bool:
        """Whether the region changes how a method runs."""
        dtypes = (self.autocast_dtype, self.input_dtype, self.output_dtype)
        return self.watched or self.lowers or any(dtype is not None for dtype in dtypes)

    @property
    def mark(self) -> Mark:
        """The mark that the region leaves on its thread."""
        device, dtype = self.device_type, self.autocast_dtype
        return mark_of(device, dtype, self.op_policy == "portable", ops.casting(self.op_policy, device, dtype))


@pickled_as("region")
def make_region(fields: dict[str, Any]) -> Region:
    """Make the region with these fields, from a pickle."""
    made = Region.__new__(Region)
    made.__setstate__(fields)
    return made


class _UnderPolicy:
    """The base of the subclasses made here. It keeps ``__init_subclass__`` of the user's classes from being called."""

    _xamp_region: Region
    _xamp_base: type

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Call ``zero_grad`` of the base class, and clear the gradients of masters too."""
        base: Any = super()
        base.zero_grad(*args, **kwargs)
        clear_gradients(self)  # type: ignore[arg-type]

    def __prepare_scriptable__(self) -> Any:
        """Called by ``torch.jit.script``, which would compile the base class's methods without the policy."""
        refuse_script()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy as the base class does, and put the copy under the policy again."""
        reduced: Any = super().__reduce_ex__(protocol)
        make, args, *rest = reduced
        # Replace this class by the user's: pickle finds only that one under the name.
        make, *args = [self._xamp_base if part is type(self) else part for part in (make, *args)]
        return (rebuild, (self._xamp_region, make, tuple(args)), *rest)


@pickled_as("rebuild")
def rebuild(region: Region, make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Make a managed module, from a pickle or as a copy: ``make(*args)`` under the policy of ``region``."""
    made = make(*args)
    if not isinstance(made, _UnderPolicy):
        set_class(made, _subclass(type(made), region))
    ops.hold(region.op_policy, made)  # the copy may outlive the session of its original
    return made


def is_under_policy(module: nn.Module) -> bool:
    """Tell whether ``module``, or the module it was copied from, is under a policy."""
    return isinstance(module, _UnderPolicy) or any(isinstance(v, InstanceMethod) for v in module.__dict__.values())


def region_of(module: nn.Module) -> Region | None:
    """Return the region in which ``module`` runs; None if it is under no policy."""
    return getattr(type(module), "_xamp_region", None)


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
            module.__dict__["__prepare_scriptable__"] = refuse_script  # called where it is a part of what is compiled
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
    """Make ``copied``, a copy of a managed model, a plain module. Its tensors stay as they are."""
    for module in copied.modules():
        if isinstance(module, _UnderPolicy):
            set_class(module, module._xamp_base)
        for name, method in list(module.__dict__.items()):
            if isinstance(method, InstanceMethod):
                module.__dict__[name] = method.function


_Key = tuple[int, Region, tuple[str, ...]]
_subclasses: weakref.WeakValueDictionary[_Key, type] = weakref.WeakValueDictionary()


def _subclass(base: type, region: Region, explained: tuple[str, ...] = ()) -> type:
    """Return the subclass of ``base`` whose methods run in ``region``: the same class each time.

    The subclass keeps ``base`` alive, so that the id of ``base`` stays valid as a key.
    """
    found = _subclasses.get((id(base), region, explained))
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
            namespace[name] = _in_region(getattr(base, name), region)
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
    _subclasses[id(base), region, explained] = made
    return made


def _copy(base: Any, region: Region, name: str) -> Callable[..., Any]:
    """Return ``__copy__`` or ``__deepcopy__`` for a class that has its own, whose copy is without policy.

    A ``GraphModule`` has: it makes its copy of the classes that it finds.
    """

    def copied(self: Any, *memo: Any) -> Any:
        own = type(self)
        set_class(self, base)
        try:
            made = getattr(base, name)(self, *memo)
        finally:
            set_class(self, own)
        if not isinstance(made, _UnderPolicy):
            set_class(made, _subclass(type(made), region))
        ops.hold(region.op_policy, made)  # the copy may outlive the session of its original
        return made

    copied.__name__ = name
    return copied


def _recompile(base: Any, region: Region) -> Callable[[Any], Any]:
    """Return ``recompile`` for a ``GraphModule``: it must write the new forward into ``base``, not the subclass."""

    def recompile(self: Any) -> Any:
        set_class(self, base)
        try:
            return base.recompile(self)
        finally:
            _subclasses.pop((id(base), region, ()), None)
            set_class(self, _subclass(base, region))

    return recompile


class InstanceMethod:
    """An instance attribute that hides a method and runs in a region. It is copied and pickled with its module."""

    def __init__(self, function: Callable[..., Any], region: Region, module: nn.Module | None = None) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self._region = region
        self._module = None if module is None else weakref.ref(module)
        into, spared = region.input_dtype, region.spared
        self._spare = None if into is None or not spared else cast_some(function, spared, into, bound=True)
        # The attribute casts its arguments itself where some are spared: only it knows their positions.
        self._inside = dataclasses.replace(region, input_dtype=None, spared=()) if self._spare else region

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the attribute in its region."""
        module = None if self._module is None else self._module()
        if module is not None and self._region.follows:
            masters.write_changed_into(module)
        if self._spare is not None:
            args, kwargs = self._spare(args, kwargs)
        run = _caller(self._inside)
        try:
            if module is not None and self._region.watched:
                return run_watched(module, run, (self.function, *args), kwargs)
            return run(self.function, *args, **kwargs)
        except RuntimeError as error:
            if module is not None and self._region.lowers:
                explain_forward(error, module, (*args, *kwargs.values()))
            raise

    def __reduce__(self) -> Any:
        return make_instance_method, (self.function, self._region)


@pickled_as("instance_method")
def make_instance_method(function: Callable[..., Any], region: Region) -> InstanceMethod:
    """Make an instance attribute under a policy, from a pickle."""
    return InstanceMethod(function, region)


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


@functools.cache
def _caller(region: Region) -> Callable[..., Any]:
    return _in_region(_call, dataclasses.replace(region, follows=False, lowers=False, watched=False))


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _caster(cast: Cast, dtype: torch.dtype | None) -> Callable[[Any], Any]:
    """Return ``cast`` to ``dtype`` as a function of the value alone; None stands for no cast."""
    if dtype is None:
        return lambda value: value
    return caster(dtype) if cast is cast_floats else lambda value: cast(value, dtype)


def _in_region(function: Callable[..., Any], region: Region) -> Callable[..., Any]:
    """Wrap ``function(self, ...)`` so that it runs in ``region``. This is the hot path of every forward."""
    device, on = region.device_type, region.autocast_dtype is not None
    mark = region.mark
    into, out_of = region.input_dtype, region.output_dtype
    ddp = nn.parallel.DistributedDataParallel
    is_compiling, is_enabled = torch.compiler.is_compiling, torch._C.is_autocast_enabled
    enter, leave, number = active.enter, active.leave, active.next_number
    cast, apart, lowers = region.cast, region.apart, region.lowers
    spare = cast_some(function, region.spared, into) if into is not None and region.spared else None

    take, finish = _caster(cast, into), _caster(cast, out_of)

    def traced(self: Any, args: Any, kwargs: Any) -> Any:
        if spare is None and into is not None:
            args, kwargs = cast(args, into), cast(kwargs, into)
        distributed.note_wrapper_while_tracing()
        if apart and (on or is_enabled(device) or needs.replaced_outside):
            result = active.run_traced(mark, function, self, *args, **kwargs)
        else:
            result = function(self, *args, **kwargs)
        return result if out_of is None else cast(result, out_of)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if spare is not None:
            args, kwargs = spare(args, kwargs)
        if is_compiling():
            return traced(self, args, kwargs)
        if into is not None and spare is None:
            args, kwargs = take(args), take(kwargs)
        if ddp._active_ddp_module is not None:
            distributed.note_wrapper()
        if not apart or (not on and not is_enabled(device) and not needs.replaced_outside):
            try:
                return finish(function(self, *args, **kwargs))
            except RuntimeError as error:
                if lowers:
                    explain_forward(error, self, (*args, *kwargs.values()))
                raise
        entered = None
        try:
            entered = enter(mark, number())
            return finish(function(self, *args, **kwargs))
        except RuntimeError as error:
            if lowers:
                explain_forward(error, self, (*args, *kwargs.values()))
            raise
        finally:
            if entered is not None:
                leave(entered)

    with contextlib.suppress(AttributeError):  # a callable object has no __name__
        functools.update_wrapper(method, function)
    if region.watched:
        method = watched(method)
    return masters.following(method) if region.follows else method
