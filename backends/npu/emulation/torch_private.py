"""The private names of torch that an emulated card uses; no other module of the emulation names one.

They are listed, with those of the core, in :mod:`xamp.torch_compat.torch_private.names`: the release that brought each,
and what xamp does without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format

__all__ = [
    "AUTOCAST",
    "NOT_HERE",
    "ExcludeDispatchKeyGuard",
    "OpOverload",
    "coalescing",
    "conj",
    "fft_c2c",
    "fft_r2c",
    "finished_work",
    "forget_kernel",
    "has_kernel_for_key",
    "neg_view",
    "pack_padded_sequence",
    "prefixed",
    "registrations_for_key",
    "replace_coalescing",
    "sparse_of_parts",
    "storage_at",
    "suggest_memory_format",
    "tensor_metadata",
    "to_copy",
    "unscale_",
    "work_of",
]

ExcludeDispatchKeyGuard: Any = torch._C._ExcludeDispatchKeyGuard

AUTOCAST = torch.DispatchKeySet(torch._C._dispatch_key_parse("AutocastPrivateUse1"))
NOT_HERE = (
    torch.DispatchKeySet(torch.DispatchKey.AutogradCPU)
    | torch.DispatchKeySet(torch.DispatchKey.ADInplaceOrView)
    | torch.DispatchKeySet(torch.DispatchKey.AutocastCPU)
)
"""Keys to exclude in a kernel: autograd has already run, and an active CPU autocast must not see the computation."""

has_kernel_for_key: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key
registrations_for_key: Callable[[str], list[str]] = torch._C._dispatch_get_registrations_for_dispatch_key

storage_at: Callable[[int, torch.device, int], Any] = torch._C._construct_storage_from_data_pointer
"""Returns a storage over memory that somebody else owns: address, device, bytes."""

tensor_metadata: Callable[[torch.Tensor], dict[str, bool]] = torch._C._get_tensor_metadata  # type: ignore[attr-defined]
conj = torch._conj
neg_view = torch._neg_view


fft_c2c: Any = torch.ops.aten._fft_c2c
fft_r2c: Any = torch.ops.aten._fft_r2c
sparse_of_parts: Any = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors
to_copy: Any = torch.ops.aten._to_copy.default
unscale_: Any = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_


def forget_kernel(namespace: str, name: str, key: str) -> None:
    """Let a library put a kernel where another that is written in Python is: torch 2.7 refuses the second one."""
    torch.library._impls.discard(f"{namespace}/{name}/{key}")


def pack_padded_sequence(*args: Any) -> Any:
    """Call torch's own kernel, which calls the operators of the tensors' device."""
    return torch.ops.aten._pack_padded_sequence.default._op_dk(torch.DispatchKey.CompositeExplicitAutograd, *args)


# ---- process groups


def prefixed(prefix: str, store: Any) -> Any:
    """Return ``store`` with a prefix before its keys, of the class that groups in C++ take."""
    return torch._C._distributed_c10d.PrefixStore(prefix, store)


def work_of(boxed: Any) -> Any:
    """Return the handle of work in what an operator of a collective returns."""
    return torch._C._distributed_c10d.Work.unbox(boxed)


def finished_work(future: Any) -> Any:
    """Return a handle of work that ends with ``future``."""
    return torch._C._distributed_c10d._create_work_from_future(future)  # type: ignore[attr-defined]


def coalescing() -> tuple[Any, Any]:
    """Return the methods of ``ProcessGroup`` that begin and end a batch of sends and receives."""
    group: Any = dist.ProcessGroup
    return group._start_coalescing, group._end_coalescing


def replace_coalescing(start: Any, end: Any) -> None:
    """Put ``start`` and ``end`` in the places of the two methods."""
    group: Any = dist.ProcessGroup
    group._start_coalescing, group._end_coalescing = start, end
