"""The device itself: torch's PrivateUse1, by torch's hooks for devices that are written in Python."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch.utils import backend_registration

from xamp.errors import BackendUnavailable
from xamp_abacus import autocast, collectives, kernels, runtime
from xamp_abacus.memory import allocate, device_type, is_here, set_device_type

__all__ = ["install"]


class _Guard(torch._C._acc.DeviceGuard):
    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.PrivateUse1


_installed = ""


def install(name: str = "abacus", module: ModuleType = runtime, lists: Mapping[str, str] = autocast.LISTS) -> None:
    """Make torch know the device, under a name of another where it builds on this one; once a process.

    Args:
        name: its type.
        module: what ``torch.<name>`` becomes.
        lists: what its autocast does to which operators, see :data:`xamp_abacus.autocast.LISTS`.

    Raises:
        BackendUnavailable: the process has it under another name.
    """
    global _installed
    if _installed == name:
        return
    if _installed:
        raise BackendUnavailable(
            f"torch has one device that is written in Python, and in this process it is {_installed}\n"
            f"set XAMP_BACKEND={name} in a process of its own, or leave the other's package out"
        )
    _installed = name
    set_device_type(name)
    backend_registration._setup_privateuseone_for_python_backend(name, backend_module=module, device_guard=_Guard())
    kernels.install(lists)
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
        if self.device.type != device_type():
            return resize(self, nbytes)
        if nbytes > self.nbytes():
            raise NotImplementedError("a storage of the abacus cannot grow")
        return None  # FSDP frees memory so, and takes it back; here it is kept

    storage.__new__, storage.resize_ = new, resize_
