"""The state in which a device is tried: that of a new process, whatever the caller has set since.

What a trial finds out is kept for the process. So it must tell of the device, not of the moment of the first question.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from xamp.registry.causes import NotNow

__all__ = ["as_in_a_new_process"]


@contextlib.contextmanager
def as_in_a_new_process(device: torch.device) -> Iterator[None]:
    """A block without the caller's default device and autocast, in which the host may wait.

    The default dtype is the process's, not the thread's, so it stays: trials name the dtype of each tensor.

    Raises:
        NotNow: a graph is being captured on the device, which a trial would end with an error.
    """
    module = _module_of(device)
    captures = getattr(module, "is_current_stream_capturing", None)
    if captures is not None and captures():
        raise NotNow(
            f"a graph is being captured on {device}, and what the device can do was not tried before. Run at least one "
            "whole training step before the capture."
        )
    with torch.device("cpu"), torch._C._DisableAutocast(), _waiting_allowed(module):
        yield


@contextlib.contextmanager
def _waiting_allowed(module: Any) -> Iterator[None]:
    """Suspend a mode in which torch warns, or raises, where the host waits for the device: a trial waits."""
    mode = module.get_sync_debug_mode() if hasattr(module, "get_sync_debug_mode") else 0
    if mode in (0, "default"):
        yield
        return
    module.set_sync_debug_mode("default")
    try:
        yield
    finally:
        module.set_sync_debug_mode(mode)


def _module_of(device: torch.device) -> Any:
    """The device's module in torch; None if it has none."""
    try:
        return torch.get_device_module(device.type)
    except RuntimeError:
        return None
