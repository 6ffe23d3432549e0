"""Pinned memory, and copies to it that the host does not wait for."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _device
from xamp_abacus.kernels import run
from xamp_abacus.memory import host
from xamp_standin import queue

__all__ = ["install"]

_MAKERS = ("empty", "zeros", "ones", "full")
_library = torch.library.Library("aten", "IMPL")


def install() -> None:
    """Register the copies, and give torch's functions pinned memory, for which it has no hook in Python."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        _library.impl("copy_", _copy_, "PrivateUse1", allow_override=True)
        _library.impl("_pin_memory", lambda tensor, device=None: queue.pin(tensor.clone()), "CPU", allow_override=True)
        _library.impl("is_pinned", lambda tensor, device=None: queue.is_pinned(tensor), "CPU", allow_override=True)
    _device._device_constructors()  # keeps torch's own functions, which are called below
    for name in _MAKERS:
        setattr(torch, name, _pinning(getattr(torch, name)))


def _pinning(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        if not kwargs.get("pin_memory"):
            return make(*args, **kwargs)
        return queue.pin(make(*args, **{**kwargs, "pin_memory": False}))

    return made


def _copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Between tensors of the device, and to and from the CPU."""
    if target.is_cpu:
        values = host(source)
        if non_blocking and queue.is_pinned(target):
            queue.put_copy(target, values.clone())
            return target
        queue.wait()
        target.copy_(values)
        return target
    (target if target.is_cpu else host(target)).copy_(source if source.is_cpu else host(source))
    return target
