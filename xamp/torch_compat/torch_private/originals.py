"""What ``xamp run`` redirects, or calls in place of what it has redirected; tables of torch that it fills before."""

from __future__ import annotations

import importlib
import types
from typing import Any

import torch

from xamp.torch_compat.torch_private.late import imported

__all__ = [
    "DEVICE_CONTEXT",
    "STORAGE_BASE",
    "StorageBase",
    "compile_counter",
    "is_cuda",
    "list_device_constructors",
    "list_safe_globals",
    "tensor_to",
]

tensor_to: Any = torch._C.TensorBase.to
is_cuda: Any = torch._C.TensorBase.is_cuda

StorageBase: Any = torch.storage._StorageBase
STORAGE_BASE = "torch.storage:_StorageBase"
DEVICE_CONTEXT = "torch.utils._device:DeviceContext"


def list_device_constructors() -> None:
    """Let torch list, once, the functions that take a device, before one of them is replaced."""
    imported("torch.utils._device._device_constructors")()


def list_safe_globals() -> None:
    """Let torch list, once, what ``torch.load`` may make, before one of these is replaced."""
    imported("torch._weights_only_unpickler._get_allowed_globals")()


def compile_counter() -> tuple[types.ModuleType, str]:
    """Return the module, which this imports, and the name under which it counts the backwards that it compiles."""
    module, _, name = "torch._dynamo.compiled_autograd.COMPILE_COUNTER".rpartition(".")
    return importlib.import_module(module), name
