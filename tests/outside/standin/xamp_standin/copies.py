"""Pinned memory, and copies to it that the host does not wait for."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _device
from xamp_abacus import kernels
from xamp_abacus.memory import host

from xamp_standin import queue

__all__ = ["install"]

_MAKERS = ("empty", "zeros", "ones", "full")
_COMPOSITE: Any = torch._C.DispatchKey.CompositeExplicitAutograd
_library = torch.library.Library("aten", "IMPL")


def install() -> None:
    """Register the copies, and give torch's functions pinned memory, for which it has no hook in Python."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        _library.impl("copy_", _copy_, "PrivateUse1", allow_override=True)
        _library.impl("_to_copy", _to_copy, "PrivateUse1")
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


@kernels.hidden
def _copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Between tensors of the device, and to and from the CPU."""
    for watch in kernels.watchers:
        watch(torch.ops.aten.copy_.default, (target, source))
    if target.is_cpu:
        values = host(source)
        if non_blocking and queue.is_pinned(target):
            queue.put_copy(target, values.clone())
            return target
        queue.wait_here()
        target.copy_(values)
    elif not source.is_cpu:
        host(target).copy_(host(source))
    else:  # read at once: memory that the host writes to before the device has read it is not stood in for
        if not non_blocking:
            queue.wait_here()
        host(target).copy_(source)
    return target


@kernels.hidden
def _to_copy(tensor: torch.Tensor, *, pin_memory: Any = None, non_blocking: bool = False, **wanted: Any) -> Any:
    """What torch does in C++, for which it needs the allocator of pinned memory."""
    device = torch.device(wanted.get("device") or tensor.device)
    if not (non_blocking and device.type == "cpu" and not tensor.is_cpu):
        return _composite(tensor, non_blocking=non_blocking, **wanted)
    memory_format = wanted.pop("memory_format", None) or torch.preserve_format
    made = queue.pin(torch.empty_like(host(tensor), **wanted, memory_format=memory_format))
    return _copy_(made, tensor, True)


def _composite(tensor: torch.Tensor, **wanted: Any) -> Any:
    return torch.ops.aten._to_copy.default._op_dk(_COMPOSITE, tensor, **wanted)
