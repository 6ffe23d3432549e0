"""Whether a device runs the kernels of :mod:`xamp.onepass`, and which form of them: it is tried, once a process."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Sequence

import torch

from xamp import onepass
from xamp.onebyone import OneByOne

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
    form, why = _form_of(rows[0].param.device) if rows else (onepass.Plan, "")
    if form is None:
        raise ValueError(f"no kernels: {why}")
    return form(rule, rows, tables)


def refusal(device: torch.device | str) -> str:
    """Say in one line why the kernels cannot run on ``device``; the empty string where they can.

    Triton is imported only where the device could be one of its own. On a CPU the kernels run with
    ``TRITON_INTERPRET=1`` in the environment, set before Triton is first imported: for tests.
    """
    form, why = _form_of(torch.device(device))
    return "" if form is not None else why


def described(device: torch.device) -> str:
    """Say in one line whether the kernels run on ``device``, in which form, and why not or not in the first one."""
    form, why = _form_of(device)
    if form is None:
        return f"no ({why})"
    return "yes" if form is _FORMS[0] else f"yes, with a launch for each tensor ({why})"


def _form_of(device: torch.device) -> tuple[type[onepass.Plan] | None, str]:
    """Return the form that runs there and why those before it do not; None where none runs."""
    if importlib.util.find_spec("triton") is None:
        return None, "Triton is not installed"
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return None, "Triton has no kernels for a CPU, but for tests with TRITON_INTERPRET=1"
    return _tried(device.type)


@functools.cache
def _tried(device_type: str) -> tuple[type[onepass.Plan] | None, str]:
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
        if (why := _defect(form, device_type)) == "":
            return form, "; ".join(reasons)
        reasons.append(f"{form.__name__}: {why}")
    return None, "; ".join(reasons)


def _defect(form: type[onepass.Plan], device_type: str) -> str:
    """Return what is wrong with a form on a device; empty where it finds a nan and steps as it should."""
    try:
        param, low, grad, found = (torch.ones(3, device=device_type) for _ in range(4))
        low, grad, found = low.bfloat16(), grad.half(), torch.zeros((), device=device_type)
        moments, count = (torch.zeros_like(param), torch.zeros_like(param)), torch.zeros((), device=device_type)
        trial = form(onepass.Rule("adam"), [onepass.Row(param, low, moments, count)])
        trial.step([grad], [{"lr": 0.5, "eps": 0.0}], found)
        trial.check([grad * torch.nan], found)
        right = bool(found) and bool(count == 1.0) and bool(((param - 0.5).abs() < 1e-5).all())
        return "" if right and bool((low == 0.5).all()) else "a kernel of Triton's gives a wrong result here"
    except Exception as error:  # whatever a compiler, a driver or a card raises
        return f"Triton does not compile for this device: {' '.join(repr(error).split())[:200]}"
