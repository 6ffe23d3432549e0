"""Whether the kernels of :mod:`xamp.onepass` can run on a device."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

from xamp.onepass import Plan, Row, Rule

__all__ = ["refusal"]


def refusal(device: torch.device | str) -> str:
    """Say in one line why the kernels cannot run on ``device``; the empty string where they can.

    Triton is imported only where the device could be one of its own; there a kernel is tried, once a process. On a CPU
    they run with ``TRITON_INTERPRET=1`` in the environment, set before Triton is first imported: for tests.
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
    import triton

    try:
        own = triton.runtime.driver.active.get_active_torch_device().type
    except Exception:  # there is no driver, or more than one
        own = "no device"
    if own != device_type:
        return f"Triton compiles for {own} here"
    try:
        param, grad = torch.ones(3, device=device_type), torch.ones(3, device=device_type)
        Plan(Rule("sgd"), [Row(param)]).step([grad], [{"lr": 0.5}])
        return "" if param.tolist() == [0.5] * 3 else "a kernel of Triton's gives a wrong result here"
    except Exception as error:  # whatever a compiler, a driver or a card raises
        return f"Triton does not compile for this device: {' '.join(repr(error).split())[:200]}"
