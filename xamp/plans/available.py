"""Whether a device runs the kernels of :mod:`xamp.onepass`: each rule is tried, once a process."""

from __future__ import annotations

import functools
import importlib.util
import math
import os
from collections.abc import Callable, Sequence

import torch

from xamp import onepass
from xamp.onepass.rules import STATES

__all__ = ["described", "expects", "plan", "refusal"]


def plan(
    rule: onepass.Rule, rows: Sequence[onepass.Row], tables: Callable[..., onepass.PointerRing] = onepass.PointerRing
) -> onepass.Plan:
    """Return a plan of ``rule`` over ``rows``. ``tables`` sends what changes at each step.

    Raises:
        ValueError: the kernels do not run there, or do not take one of the tensors.
    """
    if rows and (why := _refusal_of(rows[0].param.device, rule.name)):
        raise ValueError(f"no kernels: {why}")
    return onepass.Plan(rule, rows, tables)


def refusal(device: torch.device | str, rule: str = "adam") -> str:
    """Say in one line why the kernels of a rule cannot run on ``device``; the empty string where they can.

    Triton is imported only where the device could be one of its own. On a CPU the kernels run with
    ``TRITON_INTERPRET=1`` in the environment, set before Triton is first imported: for tests.
    """
    return _refusal_of(torch.device(device), rule)


def expects(device: torch.device | str) -> bool:
    """Return whether Triton compiles for devices of this type: the kernels should run there, unless they are wrong."""
    return importlib.util.find_spec("triton") is not None and _own() == torch.device(device).type


@functools.cache
def _own() -> str:
    """Return the type of the devices for which Triton compiles here."""
    import triton

    try:
        return str(triton.runtime.driver.active.get_active_torch_device().type)
    except Exception:  # there is no driver, or more than one
        return "no device"


def described(device: torch.device) -> str:
    """Say in one line whether steps of SGD and Adam can be one pass on ``device``, or why not."""
    why = refusal(device)
    return f"no ({why})" if why else "yes, where fused='one-pass' asks for it"


def _refusal_of(device: torch.device, rule: str) -> str:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type == "cpu" and not is_interpreted:
        return "Triton has no kernels for a CPU, but for tests with TRITON_INTERPRET=1"
    if device.type != "cpu" and is_interpreted:  # it would read the device's addresses on the host, and crash
        return "TRITON_INTERPRET=1 lets kernels run on the host, which cannot read the device's memory: unset it"
    return _defect(device.type, "adam" if rule == "sgd" else rule)  # Adam's kernels are those of SGD and more


@functools.cache
def _defect(device_type: str, rule: str) -> str:
    """Say what is wrong with the kernels of a rule on a device; the empty string where nothing is."""
    if device_type != "cpu" and _own() != device_type:
        return f"Triton compiles for {_own()} here"
    try:
        return "" if _is_right(device_type, rule) else "a kernel of Triton's gives a wrong result here"
    except Exception as error:  # whatever a compiler, a driver or a card raises
        return f"Triton does not compile for this device: {' '.join(repr(error).split())[:200]}"


def _is_right(device_type: str, rule: str) -> bool:
    """Return whether the kernels find a nan on a device, and step by a rule as they should.

    With these options a first step by any rule, from ones by gradients of ones, has the size of the learning rate. The
    norms of which LAMB takes the ratio are equal.
    """
    param, low, grad = (torch.ones(3, device=device_type) for _ in range(3))
    low, grad, found = low.bfloat16(), grad.half(), torch.zeros((), device=device_type)
    states = [torch.zeros_like(param) for _ in range(STATES[rule][0])]
    if rule == "novograd":
        states[1] = torch.zeros_like(found)
    row = onepass.Row(param, low, tuple(states), count := torch.zeros_like(found))
    trial = onepass.Plan(onepass.Rule(rule, use_nvlamb=True), [row])
    betas = 0.9, 0.0 if rule == "novograd" else 0.999  # the correction of its norm shortens the step
    trial.step([grad], [{"lr": 0.5, "eps": 0.0, "betas": betas, "norm_type": math.inf}], found)
    trial.check([grad * torch.nan], found)
    right = bool(found) and bool(count == 1.0) and bool(((param - 0.5).abs() < 1e-5).all())
    return right and bool((low == 0.5).all())
