"""Switches an optimizer to its fused implementation where that is right under loss scaling.

The step of a fused optimizer takes ``found_inf`` as a tensor and skips on the device, so the host never waits. No list
tells which devices do this rightly: each class is tried once for each process, device and dtype. A kernel that ignores
``found_inf``, as torch_npu's AdamW does, is not chosen; where the user asked for it, the host decides whether to skip.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from xamp.errors import PolicyError, UnsupportedPolicy
from xamp.registry.fused_classes import fused_refusal, honours_found_inf, is_right
from xamp.scaling.parameters import Parameters

__all__ = ["FusedChoice", "WarmState"]

_is_contiguous = torch.Tensor.is_contiguous


class FusedChoice:
    """Remembers which groups of one optimizer xamp switched to ``fused=True``, and switches them back.

    Args:
        optimizer: the optimizer.
        choice: ``"auto"``, True or False.
        names: the classes whose fused implementation skips rightly on the device.
        sparse: a gradient may be sparse.
        stepped: the dtype of what will be stepped for a parameter; by default its own.

    Attributes:
        kind: the class of the optimizer before it was managed.
        one_pass: the user asked for steps in one pass.
        skips_on_device: ``step`` honours ``found_inf`` in every group, so the host need not read the flag.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        choice: str | bool,
        names: Iterable[str],
        *,
        sparse: bool,
        stepped: Callable[[torch.Tensor], torch.dtype] = lambda param: param.dtype,
    ) -> None:
        self.one_pass = choice == "one-pass"
        self._choice = "auto" if self.one_pass else choice
        self._stepped = stepped
        self._possible = type(optimizer).__module__.startswith("torch.optim") and type(optimizer).__name__ in names
        self.kind = type(optimizer)
        self._sparse = sparse
        self._supported_before = getattr(optimizer, "_step_supports_amp_scaling", None)
        self._switched: list[dict[str, Any]] = []
        self._counters: Any = WeakIdKeyDictionary()  # by parameter, its counter ``state["step"]`` before it was moved
        self.skips_on_device = False

    def refresh(self, optimizer: Optimizer) -> None:
        """Find out again whether ``step`` honours ``found_inf`` in every group. Called when the groups changed.

        torch's own classes are tried, also where the user made them fused. Any other class is believed.
        """
        groups = optimizer.param_groups
        self.skips_on_device = honours_found_inf(optimizer) and all(group.get("fused", True) for group in groups)
        if self.skips_on_device and type(optimizer).__module__.startswith("torch.optim"):
            self.skips_on_device = all(self._is_right_for(group["params"]) for group in groups)

    def check(self, optimizer: Optimizer) -> None:
        """Raise if the user asked for ``fused=True``, here or in ``initialize``, and cannot have it.

        Raises:
            UnsupportedPolicy: that implementation is not right on this device, or refuses to step on it.
            PolicyError: a group asks for ``foreach=True`` or ``differentiable=True``.
        """
        self._check_made_fused(optimizer)
        if self._choice is not True:
            return
        name = self.kind.__name__
        for group in optimizer.param_groups:
            if group.get("foreach") or group.get("differentiable"):
                raise PolicyError(
                    f"initialize(fused=True): {name} was made with foreach=True or differentiable=True, which excludes "
                    "fused=True. Make it without, or leave fused='auto'."
                )
        right = (self._is_right_for(group["params"], self._stepped) for group in optimizer.param_groups)
        if self._sparse or not all(right):
            raise UnsupportedPolicy(
                f"initialize(fused=True): {name} has no fused implementation that skips rightly for these parameters "
                "on this device. Leave fused='auto', which uses it where it is right."
            )

    def _check_made_fused(self, optimizer: Optimizer) -> None:
        """Raise now an error that the device would otherwise raise at the first applied step, during training."""
        cls: Any = self.kind
        if not cls.__module__.startswith("torch.optim"):
            return
        for group in optimizer.param_groups:
            if group.get("fused") is not True:
                continue
            momentum = group["momentum"] if isinstance(group.get("momentum"), float | int) else None
            for device, dtype in {(p.device, self._stepped(p)) for p in group["params"] if _is_ordinary(p)}:
                if reason := fused_refusal(cls, device, dtype, None if momentum is None else momentum > 0):
                    raise UnsupportedPolicy(
                        f"initialize: {cls.__name__} was made with fused=True, which refuses to step on {device} "
                        f"({reason}). Make it without fused=True."
                    )

    def switch_on(self, optimizer: Optimizer) -> None:
        """Use the fused implementation in each group where the user left the choice open."""
        if self._choice is False or self._sparse:
            return
        for group in optimizer.param_groups:
            if self._is_open(group) and self._is_right_for(group["params"]):
                self._switched.append(group)  # first, so that switch_off knows it
                group["fused"] = True
        if self._switched:
            optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
            self.move_counters(optimizer)

    def switch_off(self, optimizer: Optimizer) -> None:
        """Restore in every group the value of ``fused`` that the user gave, and in the state the step counters.

        The counters are the tensors that were found, with what was counted since. Waits for the device.
        """
        for group in self._switched:
            group["fused"] = None
        self._switched = []
        for param, given in list(self._counters.items()):
            state = optimizer.state.get(param, {})
            if torch.is_tensor(moved := state.get("step")) and moved is not given:
                state["step"] = given.copy_(moved)
        self._counters.clear()
        if self._supported_before is None:
            optimizer.__dict__.pop("_step_supports_amp_scaling", None)

    @property
    def active(self) -> bool:
        """Whether xamp switched a group to its fused implementation."""
        return len(self._switched) > 0

    @contextlib.contextmanager
    def off(self, optimizer: Optimizer) -> Iterator[None]:
        """Switch the fused implementation off, for one step, in the groups where xamp switched it on."""
        try:
            for group in self._switched:
                group["fused"] = None
            yield
        finally:
            self.on_again(optimizer)

    def on_again(self, optimizer: Optimizer) -> None:
        """Use the fused implementation again where xamp switched it on: after :meth:`off`, or where that ended."""
        for group in self._switched:
            group["fused"] = True
        if self._switched:
            self.move_counters(optimizer)

    def move_counters(self, optimizer: Optimizer) -> None:
        """Put each counter ``state["step"]`` where fused kernels need it: on its parameter's device, in fp32.

        An unfused implementation that found them there would wait for each at every step.
        """
        for param, state in optimizer.state.items():
            if isinstance(state, dict) and torch.is_tensor(given := state.get("step")):
                moved = given.to(device=param.device, dtype=torch.float32)
                if moved is not given:
                    self._counters[param] = given  # first, so that switch_off knows it
                    state["step"] = moved

    def counter_device(self, group: Mapping[str, Any], param: torch.Tensor) -> torch.device:
        """Return where the implementation that the user chose for ``group`` counts the steps of ``param``."""
        return torch.device("cpu") if any(group is one for one in self._switched) else param.device

    def met_sparse(self, optimizer: Optimizer) -> None:
        """Switch the fused implementation off for good: a sparse gradient came, and its kernels do not take them."""
        self._sparse = True
        self.switch_off(optimizer)
        self.refresh(optimizer)

    def as_before(self, optimizer: Any, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return ``groups``, which were saved from ``optimizer`` in its order, with ``fused`` as the user gave it."""
        switched = [any(group is g for g in self._switched) for group in optimizer.param_groups]
        return [{**group, "fused": None} if ours else group for group, ours in zip(groups, switched, strict=True)]

    def load(self, optimizer: Any, load: Callable[[], None]) -> None:
        """Run ``load``, which replaces the groups, then choose again: the implementation depends on the device.

        Each group keeps the ``fused`` and ``foreach`` that the user gave in this run.
        """
        given = [
            {str(key): group[key] for key in ("fused", "foreach") if key in group}
            for group in self.as_before(optimizer, optimizer.param_groups)
        ]
        load()
        for group, own in zip(optimizer.param_groups, given, strict=True):
            group.update(**own)
        self._switched = []
        self.switch_on(optimizer)

    def _is_open(self, group: dict[str, Any]) -> bool:
        if group.get("foreach") or group.get("differentiable"):
            return False
        return group.get("fused") is None and (group.get("foreach") is None or self._choice is True)

    def _is_right_for(
        self, params: Iterable[torch.Tensor], stepped: Callable[[torch.Tensor], torch.dtype] | None = None
    ) -> bool:
        if not self._possible:
            return False
        cls: Any = self.kind
        return all(
            _is_ordinary(param) and is_right(cls, param.device, param.dtype if stepped is None else stepped(param))
            for param in params
        )


def _is_ordinary(param: torch.Tensor) -> bool:
    # A subclass of Tensor (a sharded DTensor) has operators of its own: a trial on ordinary ones says nothing of it.
    return type(param) in (torch.Tensor, nn.Parameter) and param.dtype.is_floating_point


class WarmState:
    """The parameters of one optimizer whose state exists, so that the device may decide on their step.

    On a step that ``found_inf`` skips, torch's fused SGD makes momentum buffers of uninitialised memory; it also fails
    where one parameter has a buffer and another has none. So the host decides on the first step of a parameter, and
    that step runs in the user's implementation. A loaded state counts as made: the last bits of the two differ, and a
    resumed run must use that of the original run.

    Fused kernels on a CPU read a parameter, its gradient and its state in the order of memory, whatever their strides;
    those of a GPU raise an error where the strides differ. A step in which they do runs in the user's implementation.
    They differ where ``model.to(memory_format=...)`` came after a step, where a checkpoint was saved in another memory
    format, and where a script puts a gradient into ``.grad``. A parameter that is a view of a part of another tensor
    has gaps, into which the kernels would write.

    Attributes:
        is_proven: the optimizer steps what it holds, as torch's and xamp's own do, and others after a step that did.
    """

    def __init__(self, optimizer: weakref.ref[Optimizer], fused: FusedChoice) -> None:
        self._optimizer = optimizer
        self._fused = fused
        self._stepped: Sequence[torch.Tensor] = ()
        self._elements = 0  # of all stepped tensors when the optimizer last made or loaded its state
        self._known: set[int] = set()  # ids of the parameters whose state exists, made by a step or loaded
        self._states = 0
        self._contiguous = False  # parameters and state, as far as anybody knows
        self.is_proven = type(optimizer()).__module__.startswith(("torch.", "xamp."))

    def prove(self, base: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call ``base``, a step, and see whether it writes into what it should; a StateError where it does not."""
        from xamp.scaling.proof import Before  # most optimizers need none

        before = Before(self._optimizer(), self._stepped)
        result = before.run(base, args, kwargs)
        self.is_proven = before.has_written()
        return result

    def refresh(self, params: Parameters) -> None:
        """Read the optimizer's state. Called when it or the groups changed."""
        optimizer = self._optimizer()
        self._stepped = params.stepped
        self._known = set(map(id, _with_state(optimizer)))
        self._states = len(_state_of(optimizer))
        self._elements = self._count_elements()
        self._contiguous = False

    def fits_fused(self) -> bool:
        """Return whether all parameters about to move have their state and, if xamp chose a fused kernel, it fits that.

        A fused kernel reads past the end of a moment that is shorter than its parameter, as after
        ``resize_token_embeddings``. The user's implementation raises an error instead.
        """
        if not self._is_whole():
            return False
        return not self._fused.active or (self._elements == self._count_elements() and self._find_layout_alike())

    def in_users_implementation(self, base: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``base`` to step in the user's implementation, and remember the state that this step makes."""

        def step(*args: Any, **kwargs: Any) -> Any:
            optimizer: Any = self._optimizer()  # it lives, for it is about to step
            with self._fused.off(optimizer):
                result = base(*args, **kwargs)
            kept = set() if self._has_shrunk() else self._known
            self._known = kept.union(id(p) for p in self._stepped if p.grad is not None)
            self._states = len(_state_of(optimizer))
            self._elements = self._count_elements()
            return result

        return step

    def _has_shrunk(self) -> bool:
        """Return whether somebody has taken state away since the last step."""
        return len(_state_of(self._optimizer())) < self._states

    def _is_whole(self) -> bool:
        """Return whether the state of every parameter about to be stepped exists."""
        known = set() if self._has_shrunk() else self._known
        if len(known) == len(self._stepped):
            return True
        return known.issuperset(id(p) for p in self._stepped if p.grad is not None)

    def _find_layout_alike(self) -> bool:
        """Return whether each parameter has the strides of its gradient and of its state.

        All are contiguous in most models, which takes 35 us to see for the gradients of 300 parameters. What moves a
        parameter to another memory format moves its gradient too, and loaded state is read again (:meth:`refresh`).
        """
        stepped = self._stepped
        are_contiguous = all(map(_is_contiguous, [g for p in stepped for g in (p.grad,) if g is not None]))
        if self._contiguous and are_contiguous:
            return True
        held = [p for p in stepped if p.grad is not None]
        state = _state_of(self._optimizer())
        beside = [_beside(param, state) for param in held]
        self._contiguous = are_contiguous and all(map(_is_contiguous, [*held, *(t for ts in beside for t in ts)]))
        return self._contiguous or all(_is_like(t, p) for p, ts in zip(held, beside, strict=True) for t in ts)

    def _count_elements(self) -> int:
        return sum(map(torch.Tensor.numel, self._stepped))


def _state_of(optimizer: Any) -> Mapping[Any, Any]:
    """Return the optimizer's state; empty for an object that has ``param_groups`` and ``step`` but no ``state``."""
    return getattr(optimizer, "state", {})


def _with_state(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield the parameters that have state, and those of an SGD without momentum, which needs none."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = _state_of(optimizer).get(param)
            has_some = isinstance(state, dict) and any(isinstance(v, torch.Tensor) for v in state.values())
            if has_some or group.get("momentum") == 0:
                yield param


def _beside(param: torch.Tensor, state: Mapping[Any, Any]) -> list[torch.Tensor]:
    """Return the tensors that a fused kernel reads along with ``param``, element by element."""
    kept = state.get(param, {})
    moments = [t for t in kept.values() if isinstance(t, torch.Tensor) and t.shape == param.shape]
    return [*moments, param.grad] if param.grad is not None else moments


def _is_like(tensor: torch.Tensor, param: torch.Tensor) -> bool:
    """Return whether the elements of ``tensor`` and ``param`` have one order in memory, and no gaps."""
    strides = [(a, b) for a, b, n in zip(tensor.stride(), param.stride(), param.shape, strict=True) if n != 1]
    return all(a == b for a, b in strides) and _is_dense(param)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements of ``tensor`` fill a piece of memory: kernels write into what lies between them."""
    if tensor.is_contiguous() or not tensor.numel():
        return True
    dims = sorted((stride, length) for stride, length in zip(tensor.stride(), tensor.shape, strict=True) if length != 1)
    sizes = itertools.accumulate((length for _, length in dims), operator.mul, initial=1)
    return all(stride == size for (stride, _), size in zip(dims, sizes, strict=False))
