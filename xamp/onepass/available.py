"""Whether the kernels can run on a device."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

__all__ = ["refusal"]


def refusal(device: torch.device | str, wide: bool | None = None) -> str:
    """Say in one line why the kernels cannot run on ``device``; the empty string where they can.

    The first answer for a device takes a small step there, which compiles the kernels. On a CPU they run with
    ``TRITON_INTERPRET=1`` in the environment, set before Triton is first imported: for tests.

    Args:
        device: of the tensors.
        wide: ask about this form of a plan only, see :class:`~xamp.onepass.Plan`; None: either will do.
    """
    device = torch.device(device)
    interpreted = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")
    if interpreted != (device.type == "cpu"):
        return "kernels run on a CPU with TRITON_INTERPRET=1 only, and there alone with it"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    forms = (True, False) if wide is None else (wide,)
    reasons = [_trial(device, form) for form in forms]
    return "" if "" in reasons else reasons[0]


@functools.cache
def _trial(device: torch.device, wide: bool) -> str:
    """Say why a step of one number fails; a plan of this form takes it, and the form is not asked about again."""
    from xamp.onepass.plan import Plan
    from xamp.onepass.rules import Row, Rule

    try:
        param = torch.ones(3, device=device)
        plan = Plan(Rule("sgd"), [Row(param)], wide=wide, block=1024)
        found = torch.zeros((), device=device)
        grads = [torch.ones(3, device=device, dtype=torch.float16)]
        plan.check(grads, found)
        plan.step(grads, [{"lr": 0.25}], found)
        if param.tolist() != [0.75] * 3 or float(found):
            return f"a step of SGD from 1 by 0.25 gave {param.tolist()}"
    except Exception as problem:  # a compiler, or a driver, has errors of its own
        return f"{type(problem).__name__}: {str(problem).strip().partition(chr(10))[0]}"
    return ""
