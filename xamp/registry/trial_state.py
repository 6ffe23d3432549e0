"""The state in which a device is tried: that of a new process, whatever the caller has set since.

What a trial finds out is kept for the process. So it must tell of the device, not of the moment of the first question.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from xamp.ground.torch_private.autocast import DisableAutocast
from xamp.registry.causes import NotNow

__all__ = ["as_in_a_new_process"]


@contextlib.contextmanager
def as_in_a_new_process(device: torch.device) -> Iterator[None]:
    """A block without the caller's default device and autocast, in which the host may wait.

    The default dtype is the process's, not the thread's, so it stays: trials name the dtype of each tensor.

    Raises:
        NotNow: a graph is being captured on the device, which a trial would end with an error.
    """
    if _ask(device, "is_current_stream_capturing"):
        raise NotNow(
            f"a graph is being captured on {device}, and what the device can do was not tried before. Run at least one "
            "whole training step before the capture."
        )
    with torch.device("cpu"), DisableAutocast(), _waiting_allowed(device):
        yield


@contextlib.contextmanager
def _waiting_allowed(device: torch.device) -> Iterator[None]:
    """Suspend a mode in which torch warns, or raises, where the host waits for the device: a trial waits."""
    mode = _ask(device, "get_sync_debug_mode")
    if mode in (None, 0, "default"):
        yield
        return
    set_mode = torch.get_device_module(device.type).set_sync_debug_mode
    set_mode("default")
    try:
        yield
    finally:
        set_mode(mode)


def _ask(device: torch.device, function: str) -> Any:
    """Call a function of the device's module; None where there is no such module, function or device."""
    try:
        return getattr(torch.get_device_module(device.type), function)()
    except (AttributeError, RuntimeError, AssertionError):
        return None
