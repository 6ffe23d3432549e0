"""Puts an optimizer under a session by giving it a subclass of its own class.

The ``step`` of the subclass decides whether the step is skipped. Everything else works as before: schedulers made
before and after find the attributes they need, step hooks and the profiler see one step, and a pickle or a copy is a
torch optimizer of its own class.

The class's own ``step`` and ``zero_grad`` are called without their entries for the profiler where nobody profiles. Each
entry takes 15 to 35 us on a CPU, a third of the step of one small parameter. Everything else that torch's wrapper does
is done: where a step hook is registered, the wrapper itself runs. An ``ExecutionTraceObserver`` that is started by
itself, without a profiler, does not see the two entries.
"""

from __future__ import annotations

import copyreg
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from xamp.errors import PolicyError
from xamp.ground.class_swap import make_subclass, set_class
from xamp.ground.compiler import eager_by_rule
from xamp.ground.containers import CASTABLE
from xamp.ground.torch_private.autograd import is_profiling
from xamp.ground.torch_private.modules import optimizer_post_hooks, optimizer_pre_hooks
from xamp.scaling.masters import LOWER, master_of
from xamp.scaling.step import OptimizerState, call_step, unwrapped

__all__ = ["bound_step", "cast_state", "is_zero", "lent_params", "manage", "replace_params", "state_of"]


def state_of(optimizer: object) -> OptimizerState | None:
    """Return what xamp keeps for ``optimizer``; None where no session manages it."""
    return getattr(optimizer, "__dict__", {}).get("_xamp")


@eager_by_rule
def lent_params(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Iterate over the tensors that ``optimizer`` steps. Where user code writes into masters, the model follows."""
    state = state_of(optimizer)
    versions = None if state is None or not state.gradients.pairs else state.master_versions
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if versions is None:
        yield from params
    else:
        try:
            yield from params
        finally:  # a caller may leave the loop early. Now, for a copy may be made before the next forward
            versions.follow()


def manage(optimizer: Optimizer, state: OptimizerState) -> Callable[[], None]:
    """Let ``state`` run the steps of ``optimizer``.

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
        optimizer.__dict__["_xamp"] = state
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
        self._opt_called = True  # a scheduler, which asks for it, warns of a wrong order else
        return self._xamp.step(self._xamp_own_step or _bind(self, own, inner), args, kwargs)

    step.hooked = True  # type: ignore[attr-defined]  # else torch wraps it again: two hook calls and profiler entries
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return step


def _bind(optimizer: Any, own: Callable[..., Any], inner: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return what runs in place of ``own``, the ``step`` of the optimizer's class, with the optimizer bound.

    ``inner`` is what :func:`unwrapped` says of ``own``.
    """
    if (
        inner is None
        or is_profiling()
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or optimizer_pre_hooks
        or optimizer_post_hooks
    ):
        return functools.partial(own, optimizer)
    return functools.partial(call_step, inner, optimizer)


def bound_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return what runs in place of ``step``, the attribute of an optimizer that no session manages."""
    own = getattr(step, "__func__", None)  # there is none where a scheduler or a user put a function there
    return step if own is None else _bind(step.__self__, own, unwrapped(own))  # type: ignore[attr-defined]


def _zero_grad_of(base: Any) -> Callable[..., None]:
    """Return the ``zero_grad`` of the managed class of ``base``. It clears what the session keeps as well."""
    own = base.zero_grad
    drops = own is Optimizer.zero_grad

    @eager_by_rule
    @functools.wraps(own)
    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        only_drops = drops and not (args or kwargs or is_profiling())
        self._xamp.zero_grad(functools.partial(_drop_gradients if only_drops else own, self), args, kwargs)

    return zero_grad


def _drop_gradients(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = None


class _Managed:
    """The methods of a managed optimizer besides ``step``."""

    _xamp: OptimizerState
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
        self._xamp.engine.check_not_shared(self._xamp, tensors)
        super().add_param_group({**group, "params": params})  # type: ignore[misc]
        self._xamp.engine.adopt_group(self._xamp, self.param_groups[-1])

    def state_dict(self) -> dict[str, Any]:
        """Return the base's, with ``fused`` as the user gave it, so that it loads where there is none."""
        state: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        if "param_groups" not in state:
            return state  # of an optimizer that keeps another one in it, in a layout of its own
        groups = self._xamp.fused.as_before(self, state["param_groups"])
        return {**state, "param_groups": self._xamp.saved_groups(groups)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as the base class does, then choose the fused implementation again for this device."""
        base_load = super().load_state_dict  # type: ignore[misc]
        self._xamp.fused.load(self, lambda: base_load(state_dict))
        _restore_numbers(self, state_dict)
        self._xamp.loaded()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy as an optimizer of its own class, which loads where xamp is not installed."""
        state = dict(self.__dict__)
        if hasattr(self._xamp_base, "__getstate__"):  # torch's own has one; object has one since Python 3.11
            state = dict(super().__getstate__())  # type: ignore[misc]
        state.pop("_xamp", None)
        state.pop("_xamp_own_step", None)
        state["param_groups"] = self._xamp.fused.as_before(self, self.param_groups)
        return copyreg._reconstructor, (self._xamp_base, object, None), state  # type: ignore[attr-defined]


def _restore_numbers(optimizer: Any, saved: dict[str, Any]) -> None:
    """Give single numbers in the state (``mu_product`` of NAdam) their fp32 values back.

    torch casts all loaded state but ``step`` to the parameter's dtype. A step keeps such numbers in fp32.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    indices = [index for group in saved.get("param_groups", ()) for index in group["params"]]
    for index, param in zip(indices, params, strict=False):
        state = optimizer.state.get(param, {}) if param.dtype in LOWER else {}
        for key, value in saved["state"].get(index, {}).items() if state else ():
            held: Any = state.get(key)
            was_cast = isinstance(held, torch.Tensor) and held.dtype in LOWER and value.dtype == torch.float32
            if was_cast and not held.dim():
                state[key] = value.detach().to(held.device, copy=True)


def cast_state(optimizer: Optimizer, params: Sequence[torch.Tensor]) -> Callable[[], None]:
    """Cast existing optimizer state to the dtypes of ``params``, as ``load_state_dict`` would.

    ``params`` has, for each low-precision parameter of the model, what the optimizer steps: itself or its master.

    Returns:
        A function that makes low-precision state fp32 again. It restores the original tensors, unless a step has
        changed the cast ones.
    """
    cast: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor, int]] = []
    for param in params:
        state: dict[str, Any] = optimizer.state.get(param, {})
        for key, value in state.items():
            if key != "step" and isinstance(value, torch.Tensor) and value.dtype in CASTABLE:
                made = value.to(param.dtype)
                if made is not value:
                    cast.append((state, key, value, made, made._version))
    held_weakly = weakref.ref(optimizer)
    low_precision = any(p.dtype in LOWER for p in params)

    def undo() -> None:
        if not low_precision:  # if any state is in half precision, the optimizer itself chose that
            return
        before = {id(made): value for _, _, value, made, version in cast if made._version == version}
        found = held_weakly()
        for state in () if found is None else found.state.values():
            for key, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor) and value.dtype in LOWER:
                    state[key] = before.get(id(value), value.float())

    try:
        for state, key, _, made, _ in cast:
            state[key] = made
        return undo
    except BaseException:
        for state, key, value, _, _ in cast:
            state[key] = value
        raise


def replace_params(optimizer: Any, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Replace the first of each pair by the second, in the groups and as keys of the state.

    A ZeroRedundancyOptimizer has another optimizer in it for this rank's share, and lists of which rank has what.
    """
    pairs = list(pairs)
    _replace_in(optimizer, pairs)
    if is_zero(optimizer) and hasattr(optimizer, "optim"):  # where it overlaps with DDP, only after two steps
        _replace_in(optimizer.optim, pairs)
        optimizer._clear_cache()


def _replace_in(optimizer: Any, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    new_of = {id(old): new for old, new in pairs}
    for group in optimizer.param_groups:
        group["params"][:] = [new_of.get(id(p), p) for p in group["params"]]
    for old in [p for p in optimizer.state if id(p) in new_of]:
        optimizer.state[new_of[id(old)]] = optimizer.state[old]  # it is in both places before it leaves one
        del optimizer.state[old]


def is_zero(optimizer: object) -> bool:
    """Return whether ``optimizer`` is torch's ZeroRedundancyOptimizer, whose module may not be imported yet."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)
