"""What torch takes only for some devices: default types of tensors, memory formats, pinned memory."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch

from xamp.accel.used_device import in_use
from xamp.errors import PolicyError
from xamp.registry.device_in_use import device
from xamp.registry.registry import HOST
from xamp.values.log import say

__all__ = ["FORMATS", "has_memory_format", "memory_format", "pin_memory", "set_default_tensor_type"]

FORMATS = {"channels_last": 4, "channels_last_3d": 5}
"""Memory formats that not every device has -> dimensions of a tensor that can have one."""


def set_default_tensor_type(t: Any) -> None:
    """Make new tensors of a type, and put them on its device, as ``torch.set_default_tensor_type``.

    Args:
        t: a type of the device in use, such as ``xamp.accel.FloatTensor``; torch's own, such as ``torch.FloatTensor``;
            or the name of one as text.

    Raises:
        PolicyError: ``t`` names no type of tensors.
    """
    name = t.rpartition(".")[2] if isinstance(t, str) else getattr(t, "__name__", "")
    of_name = getattr(torch, name, None) if name.endswith("Tensor") else None
    if of_name is None:
        raise PolicyError(
            f"accel.set_default_tensor_type({t!r}): is no type of tensors. Give one of the device in use, such as "
            "xamp.accel.FloatTensor, or torch.FloatTensor."
        )
    global _has_set
    if _has_set:  # so that the next one starts from torch's own state
        torch.set_default_device(None)
        _has_set = False
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.set_default_tensor_type", UserWarning)  # it is deprecated
            torch.set_default_tensor_type(t)
    except TypeError:  # torch takes the types that it was compiled with
        torch.set_default_dtype(of_name.dtype)
        if in_use().device_type != HOST:
            torch.set_default_device(device().type)
            _has_set = True


_has_set = False  # whether torch's default device is one that set_default_tensor_type has set


def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in memory that the device in use reads by itself, as ``Tensor.pin_memory``; on a CPU the tensor.

    torch's own raises where there is no accelerator.
    """
    return tensor if in_use().device_type == HOST else tensor.pin_memory()


def memory_format(name: str) -> torch.memory_format:
    """The memory format of a name of :data:`FORMATS` where the device in use takes it, else the contiguous one.

    Results are the same in both; the first is faster on some devices. It is logged once where it is the other one.
    """
    if has_memory_format(name):
        wanted: torch.memory_format = getattr(torch, name)
        return wanted
    _tell(name, in_use().device_type)
    return torch.contiguous_format


def has_memory_format(name: str) -> bool:
    """Whether the device in use takes a memory format of :data:`FORMATS`; it is tried once for each type of device."""
    return _has_memory_format(name, in_use().device_type)


@functools.cache
def _has_memory_format(name: str, device_type: str) -> bool:
    wanted: torch.memory_format = getattr(torch, name)
    try:
        torch.zeros((1,) * FORMATS[name], device=device_type).to(memory_format=wanted)
        torch.empty((1,) * FORMATS[name], device=device_type, memory_format=wanted)
    except (RuntimeError, NotImplementedError):
        return False
    return True


@functools.cache
def _tell(name: str, device_type: str) -> None:
    say("accel.%s: %s takes no such memory format; torch.contiguous_format stands for it", name, device_type)
