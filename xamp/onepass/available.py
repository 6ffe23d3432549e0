"""Whether the kernels can run on a device."""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any

import torch

__all__ = ["dtype_of_work", "refusal"]


def refusal(device: torch.device | str) -> str:
    """Say in one line why the kernels cannot run on ``device``; the empty string where they can.

    Triton is looked for, and imported only where the device could be one of its own; there a kernel is tried, once a
    process. On a CPU they run with ``TRITON_INTERPRET=1`` in the environment, set before Triton is first imported: for
    tests.
    """
    device = torch.device(device)
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if device.type == "cpu":
        interprets = os.environ.get("TRITON_INTERPRET") == "1"
        return "" if interprets else "Triton has no kernels for a CPU, but for tests with TRITON_INTERPRET=1"
    return _tried(device.type)


@functools.cache
def _tried(device_type: str) -> str:
    try:
        import triton

        own = triton.runtime.driver.active.get_active_torch_device().type
        if own != device_type:
            return f"Triton compiles for {own} here"
        from xamp.onepass.plan import Plan
        from xamp.onepass.rules import Row, Rule

        param, grad = torch.ones(3, device=device_type), torch.ones(3, device=device_type)
        Plan(Rule("sgd"), [Row(param)]).step([grad], [{"lr": 0.5}])
        right = param.tolist() == [0.5] * 3
    except Exception as error:  # whatever a compiler, a driver or a card raises
        words = " ".join(str(error).split()) or type(error).__name__
        return f"Triton does not compile for this device: {words[:200]}"
    return "" if right else "a kernel of Triton's gives a wrong result here"


def dtype_of_work(device: torch.device) -> Any:
    """Return Triton's dtype in which a step computes: fp64, rounded once, where chips have it at half the rate of fp32.

    These are versions 6.0 to 10.0 of data centres' chips. Others have a 32nd of the rate or less, and fp64 would take
    longer than memory does: fp32 there, as torch's own fused kernels compute.
    """
    import triton.language as tl

    if device.type == "cpu":
        return tl.float64
    ask = getattr(torch.get_device_module(device), "get_device_capability", None)
    version = ask(device) if ask is not None else (0, 0)
    return tl.float64 if version[1] == 0 and 6 <= version[0] <= 10 else tl.float32
