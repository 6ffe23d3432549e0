"""Which fused implementations of torch's optimizers are right: each class is tried once for each device and dtype."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from xamp.registry.causes import one_line
from xamp.registry.device_trials import device_trial

__all__ = ["fused_refusal", "honours_found_inf", "is_right", "is_torchs", "right_classes", "takes_grad_scaler"]


def honours_found_inf(optimizer: Any) -> bool:
    """Return whether ``optimizer`` says that its step skips by ``optimizer.found_inf``.

    In torch's older protocol ``step`` asks an argument ``grad_scaler``, and without it applies whatever the gradients
    hold. That does not count.
    """
    supports = getattr(optimizer, "_step_supports_amp_scaling", False)
    return bool(supports) and not takes_grad_scaler(optimizer)


def takes_grad_scaler(optimizer: Any) -> bool:
    """Return whether ``step`` of ``optimizer`` takes a GradScaler, by which it unscales and skips."""
    supports = getattr(optimizer, "_step_supports_amp_scaling", False)
    return bool(supports) and "grad_scaler" in inspect.signature(optimizer.step).parameters


def is_torchs(kind: type) -> bool:
    """Return whether ``kind`` is or is derived from an optimizer of torch, whose kernels skip by ``found_inf``."""
    return any(base is not Optimizer and base.__module__.startswith("torch.optim") for base in kind.__mro__)


@device_trial(one_line)
def fused_refusal(cls: Any, device: torch.device, dtype: torch.dtype, momentum: bool | None) -> str:
    """Try one step of the fused implementation and return its error message; an empty string where it steps.

    ``momentum``: step with or without momentum; None: the class has no such option.
    """
    options = {} if momentum is None else {"momentum": 0.9 if momentum else 0.0}
    param = torch.nn.Parameter(torch.ones(1, device=device, dtype=dtype))
    param.grad = torch.ones_like(param)
    cls([param], lr=0.125, fused=True, **options).step()
    return ""


def right_classes(device: torch.device, offered: Callable[[str], bool] = bool) -> tuple[str, ...]:
    """Return the names of the classes in ``torch.optim`` whose fused implementation is right on ``device`` in fp32.

    A class is tried only if ``offered`` is true of its name. The trials take 10 ms on a CPU, once a process.

    Raises:
        Exception: see :func:`is_right`.
    """
    classes: list[Any] = [cls for name in torch.optim.__all__ if isinstance(cls := getattr(torch.optim, name), type)]
    fused = (cls for cls in classes if issubclass(cls, Optimizer) and "fused" in inspect.signature(cls).parameters)
    return tuple(c.__name__ for c in fused if offered(c.__name__) and is_right(c, device, torch.float32))


@device_trial(lambda _: False)
def is_right(cls: type[Optimizer], device: torch.device, dtype: torch.dtype) -> bool:
    """Try the fused implementation of ``cls`` on ``device`` with parameters of ``dtype``; return whether it is right.

    Right means: with ``found_inf`` raised no parameter moves, else the step equals that of the unfused one. The
    trial uses more elements than a vector register holds, and momentum where the class has it, because torch 2.13's
    fused SGD in half precision on a CPU is wrong in exactly these cases.

    Raises:
        Exception: no memory was left, or a graph was being captured: the form is tried when somebody asks again.
    """
    options: list[dict[str, float]] = [{}]
    if "momentum" in inspect.signature(cls).parameters:
        options.append({"momentum": 0.9})
    return all(_steps_alike(cls, device, dtype, extra) for extra in options)


def _steps_alike(make: Any, device: torch.device, dtype: torch.dtype, options: dict[str, float]) -> bool:
    """Return whether the fused implementation takes and skips the same steps as the unfused one to equal weights."""
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
