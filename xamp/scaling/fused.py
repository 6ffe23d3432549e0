"""Switches an optimizer to its fused form where that form is right under loss scaling.

The step of a fused optimizer takes ``found_inf`` as a tensor and skips on the device, so the host never waits. xamp
does not keep a list of devices whose kernels do this rightly. It tries each class once for each process, device and
dtype. It does not switch to a kernel that ignores ``found_inf`` (torch_npu's AdamW does); where the user asked for
that kernel, the host decides whether to skip.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from xamp.errors import PolicyError, UnsupportedPolicy
from xamp.ground.torch_private.modules import default_to_fused_or_foreach
from xamp.registry.causes import may_pass, one_line
from xamp.registry.trials import as_in_a_new_process
from xamp.scaling.shards import is_dtensor
from xamp.scaling.step_counters import StepCounters

__all__ = ["FusedForm", "honours_found_inf", "is_right", "list_refusal", "right_forms"]

_REFUSALS = (RuntimeError, TypeError, ValueError, NotImplementedError, AttributeError)
"""What torch raises where a class has no fused form for a device or a dtype."""


def honours_found_inf(optimizer: Any) -> bool:
    """Return whether ``optimizer`` says that its step skips by ``optimizer.found_inf``.

    torch has an older protocol too, and it does not count here. In that protocol ``step`` takes an argument
    ``grad_scaler`` and asks it. Without that argument ``step`` applies whatever the gradients hold, so xamp treats such
    an optimizer like any other.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    return "grad_scaler" not in inspect.signature(optimizer.step).parameters


class FusedForm:
    """Remembers which groups of one optimizer xamp switched to ``fused=True``, and switches them back.

    Args:
        optimizer: the optimizer.
        choice: ``"auto"``, True or False.
        names: the classes whose fused form skips rightly on the device.
        sparse: a gradient may be sparse.
        stepped: the dtype of what will be stepped for a parameter; by default its own.

    Attributes:
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
        self._choice = choice
        self._stepped = stepped
        self._possible = type(optimizer).__module__.startswith("torch.optim") and type(optimizer).__name__ in names
        self._class = type(optimizer)
        self._sparse = sparse
        self._supported_before = getattr(optimizer, "_step_supports_amp_scaling", None)
        self._switched: list[dict[str, Any]] = []
        self._counters = StepCounters()
        self.skips_on_device = False

    def look_again(self, optimizer: Optimizer) -> None:
        """Find out again whether ``step`` honours ``found_inf`` in every group. Called when the groups changed.

        This tries torch's own classes, also where the user made them fused. It believes what any other class says.
        """
        groups = optimizer.param_groups
        self.skips_on_device = honours_found_inf(optimizer) and all(group.get("fused", True) for group in groups)
        if self.skips_on_device and type(optimizer).__module__.startswith("torch.optim"):
            self.skips_on_device = all(self._is_right_for(group["params"]) for group in groups)

    def check(self, optimizer: Optimizer) -> None:
        """Raise if the user asked for ``fused=True`` and cannot have it.

        The user asks for it in ``initialize`` or in the optimizer's constructor.

        Raises:
            UnsupportedPolicy: the optimizer has no fused form that is right on this device; or it was made with
                ``fused=True``, and that form refuses to step on this device.
            PolicyError: a group asks for ``foreach=True`` or ``differentiable=True``.
        """
        self._check_made_fused(optimizer)
        if self._choice is not True:
            return
        name = self._class.__name__
        for group in optimizer.param_groups:
            if group.get("foreach") or group.get("differentiable"):
                raise PolicyError(
                    f"initialize(fused=True): {name} was made with foreach=True or differentiable=True, which excludes "
                    "fused=True. Make it without, or leave fused='auto'."
                )
        if self._sparse or not all(
            self._is_right_for(group["params"], self._stepped) for group in optimizer.param_groups
        ):
            raise UnsupportedPolicy(
                f"initialize(fused=True): {name} has no fused form that skips rightly for these parameters on this "
                "device. Leave fused='auto', which uses it where it is right."
            )

    def _check_made_fused(self, optimizer: Optimizer) -> None:
        """Raise now an error that the device would otherwise raise at the first applied step, during training."""
        cls: Any = self._class
        if not cls.__module__.startswith("torch.optim"):
            return
        for group in optimizer.param_groups:
            if group.get("fused") is not True:
                continue
            momentum = group["momentum"] if isinstance(group.get("momentum"), float | int) else None
            for device, dtype in {(p.device, self._stepped(p)) for p in group["params"] if _is_plain(p)}:
                if reason := _refusal(cls, device, dtype, None if momentum is None else momentum > 0):
                    raise UnsupportedPolicy(
                        f"initialize: {cls.__name__} was made with fused=True, which refuses to step on {device} "
                        f"({reason}). Make it without fused=True."
                    )

    def switch_on(self, optimizer: Optimizer) -> None:
        """Use the fused form in each group where the user left the choice open."""
        if self._choice is False or self._sparse:
            return
        for group in optimizer.param_groups:
            if self._is_open(group) and self._is_right_for(group["params"]):
                self._switched.append(group)  # first, so that switch_off knows it
                group["fused"] = True
        if self._switched:
            optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
            self._counters.move(optimizer)

    def switch_off(self, optimizer: Optimizer) -> None:
        """Restore in every group the value of ``fused`` that the user gave, and in the state the step counters."""
        for group in self._switched:
            group["fused"] = None
        self._switched = []
        self._counters.give_back(optimizer)
        if self._supported_before is None:
            optimizer.__dict__.pop("_step_supports_amp_scaling", None)

    @property
    def active(self) -> bool:
        """Whether xamp switched a group to its fused form."""
        return len(self._switched) > 0

    @contextlib.contextmanager
    def off(self, optimizer: Optimizer) -> Iterator[None]:
        """Switch the fused form off, for one step, in the groups where xamp switched it on."""
        try:
            for group in self._switched:
                group["fused"] = None
            yield
        finally:
            try:
                self._on_again(optimizer)
            except BaseException:  # interrupted in the middle: groups of both forms would step wrongly
                self._on_again(optimizer)
                raise

    def _on_again(self, optimizer: Optimizer) -> None:
        for group in self._switched:
            group["fused"] = True
        if self._switched:
            self._counters.move(optimizer)

    def met_sparse(self, optimizer: Optimizer) -> None:
        """Switch the fused form off for good: a sparse gradient came, and the fused kernels do not take them."""
        self._sparse = True
        self.switch_off(optimizer)
        self.look_again(optimizer)

    def as_before(self, optimizer: Optimizer, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return ``groups``, which were saved from ``optimizer`` in its order, with ``fused`` as the user gave it."""
        switched = [any(group is g for g in self._switched) for group in optimizer.param_groups]
        return [{**group, "fused": None} if ours else group for group, ours in zip(groups, switched, strict=True)]

    def load(self, optimizer: Optimizer, load: Callable[[], None]) -> None:
        """Run ``load``, which replaces the groups, then choose the form again: it depends on the device, not the file.

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
        cls: Any = self._class
        return all(
            _is_plain(param) and is_right(cls, param.device, param.dtype if stepped is None else stepped(param))
            for param in params
        )


def _is_plain(param: torch.Tensor) -> bool:
    # A subclass of Tensor (a sharded DTensor) has operators of its own: a trial on plain tensors says nothing of it.
    return type(param) in (torch.Tensor, torch.nn.Parameter) and param.dtype.is_floating_point


@functools.cache
def _refusal(cls: Any, device: torch.device, dtype: torch.dtype, momentum: bool | None) -> str:
    """Try one step of the fused form and return its error message; an empty string where it steps.

    ``momentum``: step with or without momentum; None: the class has no such option. What is raised is not remembered.
    """
    options = {} if momentum is None else {"momentum": 0.9 if momentum else 0.0}
    try:
        with as_in_a_new_process(device):
            param = torch.nn.Parameter(torch.ones(1, device=device, dtype=dtype))
            param.grad = torch.ones_like(param)
            cls([param], lr=0.125, fused=True, **options).step()
    except _REFUSALS as error:
        if may_pass(error):
            raise
        return one_line(error)
    return ""


def list_refusal(optimizer: Optimizer) -> str:
    """Return why the optimizer's step on lists of tensors would fail: not all are DTensors; empty if it would not.

    torch steps lists by itself on most devices, and on a CPU where it is told to.
    """
    for group in optimizer.param_groups:
        count = sum(map(is_dtensor, group["params"]))
        if 0 < count < len(group["params"]) and _steps_lists(group):
            return (
                f"steps lists of parameters, and {count} of {len(group['params'])} in one group are DTensors, which "
                "torch's operators on lists refuse beside plain tensors. Make it with foreach=False, and not fused."
            )
    return ""


def _steps_lists(group: dict[str, Any]) -> bool:
    if group.get("fused") or group.get("foreach") is not None or "foreach" not in group:
        return bool(group.get("fused") or group.get("foreach"))
    return bool(default_to_fused_or_foreach(group["params"], bool(group.get("differentiable")), use_fused=False)[1])


def right_forms(device: torch.device, offered: Callable[[str], bool] = bool) -> tuple[str, ...]:
    """Return the names of the classes in ``torch.optim`` whose fused form is right on ``device`` in fp32.

    A class is tried only if ``offered`` is true of its name.

    torch says which classes have such a form; the device is tried, because torch has kernels for some devices only, and
    which they are changes with its releases. The trials take 10 ms on a CPU, once a process.

    Raises:
        Exception: see :func:`is_right`.
    """
    classes = ((name, getattr(torch.optim, name)) for name in torch.optim.__all__)
    fused = ((name, cls) for name, cls in classes if _has_fused(cls) and offered(name))
    return tuple(name for name, cls in fused if is_right(cls, device, torch.float32))


def _has_fused(cls: object) -> bool:
    return isinstance(cls, type) and issubclass(cls, Optimizer) and "fused" in inspect.signature(cls).parameters


@functools.cache
def is_right(cls: type[Optimizer], device: torch.device, dtype: torch.dtype) -> bool:
    """Try the fused form of ``cls`` on ``device``, with parameters of ``dtype``, and return whether it is right.

    Right means: with ``found_inf`` raised no parameter moves, else the step equals the step of the plain form. The
    trial uses more elements than a vector register holds, and momentum where the class has it, because torch 2.13's
    fused SGD in half precision on a CPU is wrong in exactly these cases. The answer is kept for the process.

    Raises:
        Exception: the device had no memory left, or a graph was being captured. That says nothing about the form, so
            it is tried again when somebody asks again.
    """
    options: list[dict[str, float]] = [{}]
    if "momentum" in inspect.signature(cls).parameters:
        options.append({"momentum": 0.9})
    try:
        with as_in_a_new_process(device):
            return all(_steps_alike(cls, device, dtype, extra) for extra in options)
    except _REFUSALS as error:
        if may_pass(error):
            raise
        return False


def _steps_alike(make: Any, device: torch.device, dtype: torch.dtype, options: dict[str, float]) -> bool:
    """Return whether the fused form takes and skips the same steps as the plain form, to the same parameters."""
    start = torch.linspace(0.5, 1.5, 67, dtype=torch.float32, device="cpu").to(device, dtype)

    def run(fused: bool) -> torch.Tensor:
        param = torch.nn.Parameter(start.clone())
        optimizer = make([param], lr=0.125, **({"fused": True} if fused else {"foreach": False}), **options)
        for number, found in enumerate((0.0, 0.0, 1.0, 0.0)):
            param.grad = torch.full_like(param, float("nan")) if found else start / (number + 1)
            if fused:
                optimizer.grad_scale = None
                optimizer.found_inf = torch.full((), found, dtype=torch.float32, device=device)
            if fused or not found:
                optimizer.step()
        return param.detach().float()

    error = 16 * torch.finfo(dtype).eps
    return bool(torch.allclose(run(True), run(False), rtol=error, atol=error))
