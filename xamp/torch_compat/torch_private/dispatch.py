"""The dispatcher: its keys, which kernels it has, and the guards that exclude keys on a thread."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

__all__ = [
    "HOMES",
    "AutoDispatchBelowAutograd",
    "OpOverload",
    "get_privateuse1_backend_name",
    "has_kernel",
    "has_kernel_for_key",
    "is_torch_function_mode_enabled",
    "key_for_device",
    "keyset_full_after",
    "len_torch_dispatch_stack",
    "put_kernel",
    "registrations_for_key",
    "set_key_excluded",
]

AutoDispatchBelowAutograd: Any = torch._C._AutoDispatchBelowAutograd

HOMES: tuple[Any, ...] = (torch._C._VariableFunctions, torch._C._nn, torch._C._linalg)  # type: ignore[attr-defined]
"""The modules in C++ that have the functions of Python, in the order in which to look for one."""

has_kernel: Callable[[str], bool] = torch._C._dispatch_has_kernel
"""Returns whether there is an operator of a name, such as ``"aten::mm"``."""

has_kernel_for_key: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key
registrations_for_key: Callable[[str], list[str]] = torch._C._dispatch_get_registrations_for_dispatch_key
key_for_device: Callable[[str], str] = torch._C._dispatch_key_for_device
keyset_full_after: Callable[[Any], Any] = torch._C._dispatch_keyset_full_after
set_key_excluded: Callable[[Any, bool], None] = torch._C._dispatch_tls_set_dispatch_key_excluded
get_privateuse1_backend_name: Callable[[], str] = torch._C._get_privateuse1_backend_name

is_torch_function_mode_enabled: Callable[[], bool] = torch._C._is_torch_function_mode_enabled
len_torch_dispatch_stack: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Returns the number of modes that see this thread's operators."""


def put_kernel(
    library: torch.library.Library, overload: str, kernel: Callable[..., Any], key: str, with_keyset: bool
) -> None:
    """Put a kernel of an aten operator, also in the place of another that is written in Python.

    torch 2.13 replaces such a kernel without being told to, 2.8 wants to be told, and 2.7 refuses the second one.

    Args:
        library: what holds the kernel.
        overload: the operator's name, without its namespace.
        kernel: the function.
        key: the dispatch key.
        with_keyset: whether the kernel takes the keys of the call first.
    """
    options: dict[str, Any] = {"with_keyset": with_keyset}
    if "allow_override" in inspect.signature(library.impl).parameters:
        options["allow_override"] = True
    else:
        torch.library._impls.discard(f"aten/{overload}/{key}")
    library.impl(overload, kernel, key, **options)
