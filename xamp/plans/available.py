"""Whether a device runs the kernels of :mod:`xamp.onepass`, in which form: each rule is tried, once a process."""

from __future__ import annotations

import functools
import importlib.util
import math
import os
from collections.abc import Callable, Sequence

import torch

from xamp import onepass
from xamp.onebyone import OneByOne
from xamp.onepass.rules import STATES

__all__ = ["described", "plan", "refusal"]

_FORMS: tuple[type[onepass.Plan], ...] = (onepass.Plan, OneByOne)
"""In the order in which they are tried: few launches first."""


def plan(
    rule: onepass.Rule, rows: Sequence[onepass.Row], tables: Callable[..., onepass.PointerRing] = onepass.PointerRing
) -> onepass.Plan:
    """Return a plan in the form that runs on the device of ``rows``. ``tables`` sends what changes at each step.

    Raises:
        ValueError: there is none, or it does not take the rule or one of the tensors.
    """
    form, why = _form_of(rows[0].param.device, rule.name) if rows else (onepass.Plan, "")
    if form is None:
        raise ValueError(f"no kernels: {why}")
    return form(rule, rows, tables)


def refusal(device: torch.device | str) -> str:
    """Say in one line why the kernels of SGD and Adam cannot run on ``device``; the empty string where they can.

    Triton is imported only where the device could be one of its own. On a CPU the kernels run with
    ``TRITON_INTERPRET=1`` in the environment, set before Triton is first imported: for tests.
    """
    form, why = _form_of(torch.device(device))
    return "" if form is not None else why


def described(device: torch.device) -> str:
    """Say in one line whether those of SGD and Adam do, in which form, and why not or not in the first one."""
    form, why = _form_of(device)
    if form is None:
        return f"no ({why})"
    return "yes" if form is _FORMS[0] else f"yes, with a launch for each tensor ({why})"


def _form_of(device: torch.device, rule: str = "adam") -> tuple[type[onepass.Plan] | None, str]:
    """Return the form that runs a rule there and why those before it do not; None where none runs."""
    if importlib.util.find_spec("triton") is None:
        return None, "Triton is not installed"
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return None, "Triton has no kernels for a CPU, but for tests with TRITON_INTERPRET=1"
    return _tried(device.type, "adam" if rule == "sgd" else rule)  # Adam's kernels are those of SGD and more


@functools.cache
def _tried(device_type: str, rule: str) -> tuple[type[onepass.Plan] | None, str]:
    import triton

    if device_type != "cpu":
        try:
            own = triton.runtime.driver.active.get_active_torch_device().type
        except Exception:  # there is no driver, or more than one
            own = "no device"
        if own != device_type:
            return None, f"Triton compiles for {own} here"
    reasons: list[str] = []
    for form in _FORMS:
        if (why := _defect(form, device_type, rule)) == "":
            return form, "; ".join(reasons)
        reasons.append(f"{form.__name__}: {why}")
    return None, "; ".join(reasons)


def _defect(form: type[onepass.Plan], device_type: str, rule: str) -> str:
    """Return what is wrong with a form on a device; empty where it finds a nan and steps by a rule as it should.

    With these options a first step by any rule, from ones by gradients of ones, has the size of the learning rate. The
    norms of which LAMB takes the ratio are equal.
    """
    try:
        param, low, grad = (torch.ones(3, device=device_type) for _ in range(3))
        low, grad, found = low.bfloat16(), grad.half(), torch.zeros((), device=device_type)
        states = [torch.zeros_like(param) for _ in range(STATES[rule][0])]
        if rule == "novograd":
            states[1] = torch.zeros_like(found)
        row = onepass.Row(param, low, tuple(states), count := torch.zeros_like(found))
        trial = form(onepass.Rule(rule, use_nvlamb=True), [row])
        betas = 0.9, 0.0 if rule == "novograd" else 0.999  # the correction of its norm shortens the step
        trial.step([grad], [{"lr": 0.5, "eps": 0.0, "betas": betas, "norm_type": math.inf}], found)
        trial.check([grad * torch.nan], found)
        right = bool(found) and bool(count == 1.0) and bool(((param - 0.5).abs() < 1e-5).all())
        return "" if right and bool((low == 0.5).all()) else "a kernel of Triton's gives a wrong result here"
    except Exception as error:  # whatever a compiler, a driver or a card raises
        return f"Triton does not compile for this device: {' '.join(repr(error).split())[:200]}"
