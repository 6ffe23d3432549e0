"""Puts an optimizer under a session by giving it a subclass of its own class.

The ``step`` of the subclass decides whether the step is skipped. Everything else works as before: schedulers made
before and after find the attributes they need, step hooks and the profiler see one step, and a pickle or a copy is a
torch optimizer of its own class.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from xamp.errors import PolicyError
from xamp.scaling.block import outside
from xamp.scaling.engine import Engine
from xamp.scaling.masters import master_of
from xamp.scaling.step import OptimizerState
from xamp.scaling.torch_step import bind, unwrapped
from xamp.torch_compat.compiler import eager_by_rule
from xamp.torch_compat.torch_private import autocast
from xamp.torch_compat.torch_private.autograd import is_profiling
from xamp.values.class_swap import make_subclass, set_class

__all__ = ["Managed", "bring_gradients", "lent_params", "manage", "managed_by", "state_of"]


class Managed(NamedTuple):
    """The engine and the state of a managed optimizer, which carries them as its attribute ``_xamp``.

    Attributes:
        engine: runs its steps.
        state: what the engine keeps for it.
    """

    engine: Engine
    state: OptimizerState


def managed_by(optimizer: object) -> Managed | None:
    """Return the engine of ``optimizer`` and its state; None where no session manages it."""
    return getattr(optimizer, "__dict__", {}).get("_xamp")


def state_of(optimizer: object) -> OptimizerState | None:
    """Return the :class:`OptimizerState` of ``optimizer``; None where no session manages it."""
    found = managed_by(optimizer)
    return None if found is None else found.state


@eager_by_rule
def lent_params(optimizer: Optimizer, call: str) -> Iterator[torch.Tensor]:
    """Iterate over the tensors that ``optimizer`` steps, with unscaled gradients, for the public ``call``.

    Where user code writes into masters, the model follows.

    Raises:
        StateError: at once: the gradients cannot be read now.
    """
    return _lent(optimizer, bring_gradients(optimizer, call))


def bring_gradients(optimizer: object, call: str) -> Managed | None:
    """Let the gradients that ``optimizer`` will step be on the tensors that it steps; return what it carries.

    Raises:
        StateError: the gradients cannot be read now.
    """
    found = managed_by(optimizer)
    if found is not None:
        found.engine.begin_reading(found.state, call)
        found.state.gradients.move_held()
        found.engine.mark.end()
    return found


def _lent(optimizer: Optimizer, found: Managed | None) -> Iterator[torch.Tensor]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if found is None or not found.state.gradients.params.pairs:
        yield from params
        return
    try:
        yield from params
    finally:  # a caller may leave the loop early
        # Now: a copy may be made, or a part of the model called, before a forward.
        found.state.master_versions.copy_masters_to_model(lent=True)


def manage(optimizer: Optimizer, managed: Managed) -> Callable[[], None]:
    """Let the engine of ``managed`` run the steps of ``optimizer``.

    Returns:
        A function that gives the optimizer back.

    Raises:
        PolicyError: its class admits no subclass.
    """
    before = type(optimizer)
    held_weakly = weakref.ref(optimizer)

    def give_back() -> None:
        found = held_weakly()
        if found is None:
            return
        set_class(found, before)
        found.__dict__.pop("_xamp", None)
        if "_xamp_own_step" in found.__dict__:
            found.__dict__["step"] = found.__dict__["_xamp_own_step"]
            del found.__dict__["_xamp_own_step"]

    # Somebody may have put a step into the instance, as a scheduler made before does, and our step must call it. A
    # scheduler wraps what it finds there, so nothing tells whether its wrapper has a step of the user's in it.
    try:
        optimizer.__dict__["_xamp"] = managed
        set_class(optimizer, _subclass(before))
        if "step" in optimizer.__dict__:
            optimizer.__dict__["_xamp_own_step"] = optimizer.__dict__["step"]
            del optimizer.__dict__["step"]
        return give_back
    except BaseException as error:
        give_back()
        if isinstance(error, TypeError):
            raise PolicyError(f"initialize: optimizer {before.__name__} cannot be managed: {error}.") from error
        raise


_subclasses: weakref.WeakValueDictionary[int, type] = weakref.WeakValueDictionary()


def _subclass(base: type) -> type:
    """Return the managed subclass of ``base``, made once. It keeps ``base`` alive, so no other class gets its id."""
    found = _subclasses.get(id(base))
    if found is None:
        namespace = {
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
            "_xamp_base": base,
            "step": _step_of(base),
            "zero_grad": _zero_grad_of(base),
        }
        namespace.update((name, _follows(getattr(base, name))) for name in ("eval", "train") if hasattr(base, name))
        own = ("__copy__", "__deepcopy__")
        namespace.update((name, getattr(base, name)) for name in own if hasattr(base, name))
        found = make_subclass(base, _Managed, namespace)
        _subclasses[id(base)] = found
    return found


def _step_of(base: Any) -> Callable[..., Any]:
    """Return the ``step`` of the managed class of ``base``."""
    own = base.step
    inner = unwrapped(own)

    @eager_by_rule
    @functools.wraps(own)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._opt_called = True  # a scheduler warns of a wrong order elsewhere
        engine, state = self._xamp
        base = self._xamp_own_step or bind(self, own, inner)
        autocast.autocast_increment_nesting()
        if autocast.autocast_decrement_nesting() == 0:  # the usual case: in no region
            return engine.step(state, base, args, kwargs)
        if not any(map(callable, (*args, *kwargs.values()))):  # a closure computes losses, in its regions
            with outside(engine.blocks.regions):
                return engine.step(state, base, args, kwargs)
        result = engine.step(state, base, args, kwargs)
        autocast.clear_autocast_cache()
        return result

    step.hooked = True  # type: ignore[attr-defined]  # else torch wraps it again: two hook calls and profiler entries
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return step


def _zero_grad_of(base: Any) -> Callable[..., None]:
    """Return the ``zero_grad`` of the managed class of ``base``. It clears what the session keeps as well."""
    own = base.zero_grad
    drops = own is Optimizer.zero_grad

    @eager_by_rule
    @functools.wraps(own)
    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        engine, state = self._xamp
        if drops and not (args or kwargs or is_profiling()):
            engine.zero_grad(state)  # without torch's entry for the profiler
        else:
            engine.zero_grad(state, functools.partial(own, self, *args, **kwargs), (*args, *kwargs.values()))

    return zero_grad


def _follows(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``eval`` or ``train`` of the managed class, by which an optimizer swaps averages of the weights in or out.

    It may do so through ``.data``, of which no version tells.
    """

    @eager_by_rule
    @functools.wraps(own)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = own(self, *args, **kwargs)
        self._xamp.engine.follow_afresh(by_optimizer=True)
        return result

    return method


class _Managed:
    """The methods of a managed optimizer besides ``step``."""

    _xamp: Managed
    _xamp_base: type
    _xamp_own_step: Callable[..., Any] | None = None  # what somebody has put into the instance
    param_groups: list[dict[str, Any]]
    state: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass

    def add_param_group(self, group: Any) -> None:
        """Add the group as the base class does, and give its low-precision parameters masters."""
        if not isinstance(group, dict):
            super().add_param_group(group)  # type: ignore[misc]  # raises torch's error
        params = group.get("params", ())
        if isinstance(params, torch.Tensor):
            params = [params]
        elif not isinstance(params, set):  # torch refuses a set
            params = list(params)
        named = (p[1] if isinstance(p, tuple) else p for p in params)  # torch takes (name, parameter) too
        tensors = [p for p in named if isinstance(p, torch.Tensor)]
        present = {id(p) for g in self.param_groups for p in g["params"]}
        if any(id(m) in present for p in tensors if (m := master_of(p)) is not None):
            raise ValueError("some parameters appear in more than one parameter group")
        engine, state = self._xamp
        engine.settle()
        engine.refuse_shared(state, tensors)
        super().add_param_group({**group, "params": params})  # type: ignore[misc]
        engine.mark.begin("add_param_group")
        engine.adopt_group(state, self.param_groups[-1])
        engine.mark.end()

    def state_dict(self) -> dict[str, Any]:
        """Return the base's, with ``fused`` as the user gave it, so that it loads where there is none."""
        state: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        if "param_groups" not in state:
            return state  # of an optimizer that keeps another one in it, in a layout of its own
        engine, own = self._xamp
        engine.settle()
        groups = own.fused.as_before(self, state["param_groups"])
        return {**state, "param_groups": engine.saved_groups(own, groups)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as the base class does, then choose the fused implementation again for this device."""
        base_load = super().load_state_dict  # type: ignore[misc]
        engine, own = self._xamp
        engine.settle()
        own.fused.load(self, lambda: base_load(state_dict))
        from xamp.scaling import optimizer_states  # a training need not load it

        optimizer_states.restore_numbers(self, state_dict)
        engine.loaded(own)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as an optimizer of its own class, which loads where xamp is not installed.

        It has the model's parameters in place of masters. They are pickled in fp32, and so is its state.
        """
        from xamp.scaling import optimizer_states

        return optimizer_states.pickled(self, *self._reduced())

    def __copy__(self) -> Any:
        return copy._reconstruct(self, None, *self._reduced())  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy._reconstruct(self, memo, *self._reduced())  # type: ignore[attr-defined]

    def _reduced(self) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Return the parts of a copy that is an optimizer of its own class, as ``__reduce__`` does."""
        state = dict(self.__dict__)
        if hasattr(self._xamp_base, "__getstate__"):  # torch's own has one; object has one since Python 3.11
            state = dict(super().__getstate__())  # type: ignore[misc]
        state.pop("_xamp", None)
        state.pop("_xamp_own_step", None)
        groups = self._xamp.state.fused.as_before(self, self.param_groups)
        return copyreg._reconstructor, (self._xamp_base, object, None), {**state, "param_groups": groups}  # type: ignore[attr-defined]
