"""The device itself: torch's PrivateUse1, by torch's hooks for devices that are written in Python."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils import backend_registration

from xamp_abacus import collectives, kernels, runtime
from xamp_abacus.memory import NAME, allocate, is_here

__all__ = ["install"]


class _Guard(torch._C._acc.DeviceGuard):
    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.PrivateUse1


@functools.cache
def install() -> None:
    """Make torch know the device; once a process."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=runtime, device_guard=_Guard())
    kernels.install()
    collectives.install()
    _patch_storages()


def _patch_storages() -> None:
    """What a device in C++ gives to torch as its allocator, for which there is no hook in Python."""
    storage: Any = torch.UntypedStorage
    make, resize = storage.__new__, storage.resize_

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if is_here(kwargs.get("device")):
            return allocate(args[0] if args else 0)
        return make(cls, *args, **kwargs)

    def resize_(self: Any, nbytes: int) -> Any:
        if self.device.type != NAME:
            return resize(self, nbytes)
        if nbytes > self.nbytes():
            raise NotImplementedError("a storage of the abacus cannot grow")
        return None  # FSDP frees memory so, and takes it back; here it is kept

    storage.__new__, storage.resize_ = new, resize_
