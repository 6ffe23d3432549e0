"""Switches an optimizer to its fused form where that is right under loss scaling.

A fused step takes ``found_inf`` as a tensor and skips on the device, so the host never waits. Whether a device's
kernels do that rightly is not looked up but tried, once a process, class and device: a kernel that ignores
``found_inf`` (torch_npu's AdamW does) is not switched to, and where the user asked for it the host decides.
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
from xamp.registry.causes import one_line

__all__ = ["FusedForm", "honours_found_inf", "is_right"]


def honours_found_inf(optimizer: Any) -> bool:
    """Whether ``optimizer`` says that its step skips by ``optimizer.found_inf``.

    The older of torch's two protocols is not that: such a step asks a ``grad_scaler`` that it is passed, and without
    one applies whatever the gradients hold. It then steps like any other optimizer.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    return "grad_scaler" not in inspect.signature(optimizer.step).parameters


class FusedForm:
    """Which groups of one optimizer xamp switched to ``fused=True``, and what they said before.

    Attributes:
        skips_on_device: ``step`` honours ``found_inf`` in every group, so that the host need not know it.
    """

    def __init__(self, optimizer: Optimizer, choice: str | bool, names: Iterable[str], *, sparse: bool) -> None:
        self._choice = choice
        self._possible = type(optimizer).__module__.startswith("torch.optim") and type(optimizer).__name__ in names
        self._class = type(optimizer)
        self._sparse = sparse
        self._supported_before = getattr(optimizer, "_step_supports_amp_scaling", None)
        self._switched: list[dict[str, Any]] = []
        self.skips_on_device = False

    def look_again(self, optimizer: Optimizer) -> None:
        """Find out anew whether ``step`` honours ``found_inf`` in every group; called when they changed.

        A torch class that the user made fused is tried too; another's is taken at its word.
        """
        groups = optimizer.param_groups
        self.skips_on_device = honours_found_inf(optimizer) and all(group.get("fused", True) for group in groups)
        if self.skips_on_device and type(optimizer).__module__.startswith("torch.optim"):
            self.skips_on_device = all(self._right(group["params"]) for group in groups)

    def check(self, optimizer: Optimizer) -> None:
        """Raise if ``fused=True`` was asked for, here or of the optimizer itself, and cannot be.

        Raises:
            UnsupportedPolicy: the optimizer has no fused form that is right on this device; or was made with one that
                refuses to step there.
            PolicyError: a group asks for ``foreach=True``.
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
        if self._sparse or not all(self._right(group["params"]) for group in optimizer.param_groups):
            raise UnsupportedPolicy(
                f"initialize(fused=True): {name} has no fused form that skips rightly for these parameters on this "
                "device. Leave fused='auto', which uses it where it is right."
            )

    def _check_made_fused(self, optimizer: Optimizer) -> None:
        """Raise now what would be an error of the device's at the first step that is applied, mid-training."""
        cls: Any = self._class
        if not cls.__module__.startswith("torch.optim"):
            return
        for group in optimizer.param_groups:
            if group.get("fused") is not True:
                continue
            momentum = group["momentum"] if isinstance(group.get("momentum"), float | int) else None
            for device, dtype in {(p.device, p.dtype) for p in group["params"] if _is_plain(p)}:
                if reason := _refusal(cls, device, dtype, None if momentum is None else momentum > 0):
                    raise UnsupportedPolicy(
                        f"initialize: {cls.__name__} was made with fused=True, which refuses to step on {device} "
                        f"({reason}). Make it without fused=True."
                    )

    def switch_on(self, optimizer: Optimizer) -> None:
        """Use the fused form in each group whose user left the choice open."""
        if self._choice is False or self._sparse:
            return
        for group in optimizer.param_groups:
            if self._is_open(group) and self._right(group["params"]):
                group["fused"] = True
                self._switched.append(group)
        if self._switched:
            optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
            self._move_step_counters(optimizer)

    def switch_off(self, optimizer: Optimizer) -> None:
        """Give every group back what it said before."""
        for group in self._switched:
            group["fused"] = None
        self._switched = []
        if self._supported_before is None:
            optimizer.__dict__.pop("_step_supports_amp_scaling", None)

    @property
    def active(self) -> bool:
        """Whether xamp switched a group to its fused form."""
        return bool(self._switched)

    @contextlib.contextmanager
    def off(self, optimizer: Optimizer) -> Iterator[None]:
        """Without the fused form in the groups that xamp switched, for one step."""
        for group in self._switched:
            group["fused"] = None
        try:
            yield
        finally:
            for group in self._switched:
                group["fused"] = True
            if self._switched:
                self._move_step_counters(optimizer)

    def met_sparse(self, optimizer: Optimizer) -> None:
        """A sparse gradient came: the fused kernels do not take them."""
        self._sparse = True
        self.switch_off(optimizer)
        self.look_again(optimizer)

    def as_before(self, optimizer: Optimizer, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """``groups``, saved from ``optimizer`` in its order, with ``fused`` as the user had it."""
        switched = [any(group is g for g in self._switched) for group in optimizer.param_groups]
        return [{**group, "fused": None} if ours else group for group, ours in zip(groups, switched, strict=True)]

    def load(self, optimizer: Optimizer, load: Callable[[], None]) -> None:
        """Run ``load``, which replaces the groups, and decide again: the form is this device's, not the file's."""
        said = [
            {str(key): group[key] for key in ("fused", "foreach") if key in group}
            for group in self.as_before(optimizer, optimizer.param_groups)
        ]
        load()
        for group, own in zip(optimizer.param_groups, said, strict=True):
            group.update(**own)
        self._switched = []
        self.switch_on(optimizer)

    def _is_open(self, group: dict[str, Any]) -> bool:
        if group.get("foreach") or group.get("differentiable"):
            return False
        return group.get("fused") is None and (group.get("foreach") is None or self._choice is True)

    def _right(self, params: Iterable[torch.Tensor]) -> bool:
        if not self._possible:
            return False
        cls: Any = self._class
        return all(_is_plain(param) and is_right(cls, param.device, param.dtype) for param in params)

    @staticmethod
    def _move_step_counters(optimizer: Optimizer) -> None:
        """A for-loop optimizer keeps ``step`` on the host; the fused kernels want it beside the parameter."""
        for param, state in optimizer.state.items():
            if isinstance(state, dict) and torch.is_tensor(state.get("step")):
                state["step"] = state["step"].to(device=param.device, dtype=torch.float32)


def _is_plain(param: torch.Tensor) -> bool:
    # A subclass of Tensor (a sharded DTensor) answers for its own operators, and what was tried says nothing.
    return type(param) in (torch.Tensor, torch.nn.Parameter) and param.dtype.is_floating_point


@functools.cache
def _refusal(cls: Any, device: torch.device, dtype: torch.dtype, momentum: bool | None) -> str:
    """What the fused form says to one step, with or without momentum (None: the class knows none); empty: it steps."""
    param = torch.nn.Parameter(torch.ones(1, device=device, dtype=dtype))
    param.grad = torch.ones_like(param)
    options = {} if momentum is None else {"momentum": 0.9 if momentum else 0.0}
    try:
        cls([param], lr=0.125, fused=True, **options).step()
    except (RuntimeError, TypeError, ValueError, NotImplementedError, AttributeError) as error:
        return one_line(error)
    return ""


@functools.cache
def is_right(cls: type[Optimizer], device: torch.device, dtype: torch.dtype) -> bool:
    """Try the fused form: nothing may move under ``found_inf``, and without it the step must be the plain one's.

    On more elements than a vector register holds, and with momentum where there is one: torch 2.13's fused SGD in half
    precision on a CPU is wrong just there.
    """
    options: list[dict[str, float]] = [{}]
    if "momentum" in inspect.signature(cls).parameters:
        options.append({"momentum": 0.9})
    try:
        return all(_steps_alike(cls, device, dtype, extra) for extra in options)
    except (RuntimeError, TypeError, ValueError, NotImplementedError, AttributeError):
        return False


def _steps_alike(make: Any, device: torch.device, dtype: torch.dtype, options: dict[str, float]) -> bool:
    """Whether the fused form takes, and skips, the steps that the plain one takes."""
    start = torch.linspace(0.5, 1.5, 67).to(device, dtype)

    def run(fused: bool) -> torch.Tensor:
        param = torch.nn.Parameter(start.clone())
        optimizer = make([param], lr=0.125, **({"fused": True} if fused else {"foreach": False}), **options)
        for number, found in enumerate((0.0, 0.0, 1.0, 0.0)):
            param.grad = torch.full_like(param, float("nan")) if found else start / (number + 1)
            if fused:
                optimizer.grad_scale = None
                optimizer.found_inf = torch.full((), found, device=device)
            if fused or not found:
                optimizer.step()
        return param.detach().float()

    error = 16 * torch.finfo(dtype).eps
    return bool(torch.allclose(run(True), run(False), rtol=error, atol=error))
