"""What ProcessGroupHCCL refuses before HCCL is asked, and what it says if a rank is gone; gloo takes more.

Source: the checks at the head of each collective in torch_npu's ``ProcessGroupHCCL.cpp``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch._prims_common

from xamp.backends.npu.emulation import deviations
from xamp.backends.npu.emulation.reductions import tensors_of

__all__ = ["LOST", "peers", "refuse", "refuse_offsets", "refuse_strided"]

_prims: Any = torch._prims_common

_CONTIGUOUS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("allreduce_", "broadcast_", "reduce_", "reduce_scatter_", "scatter_", "send", "recv_"), (0,)),
    **dict.fromkeys(("allgather_", "gather_", "_reduce_scatter_base_"), (1,)),
    **dict.fromkeys(("_allgather_base_", "alltoall_", "alltoall_base_"), (0, 1)),
}
"""By operator: where the tensors stand that must be contiguous, in the order of channels if they are images."""

_DENSE: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("allgather_", "allreduce_coalesced_"), (0,)),
    "reduce_scatter_": (1,),
    "reduce_scatter_tensor_coalesced_": (0, 1),
}
"""By operator: where lists stand whose tensors must fill their memory without gaps, in whatever order."""

_ONE_DEVICE = {"reduce_scatter_": "reduce_scatter", "allgather_": "scatter/gather", "scatter_": "scatter/gather"}
"""By operator: its name in the message for an input and an output on two cards."""

LOST = "EI0002"
"""HCCL's code for a rank that has ended or does not come."""

_GONE = ("closed by peer", "reset by peer", "Broken pipe", "Timed out", "Application timeout", "Connection refused")
"""Words of gloo's errors for a rank that has ended or does not come."""


def refuse(name: str, args: Any) -> None:
    """Refuse a call of the collective ``name`` that torch_npu refuses.

    Raises:
        RuntimeError: a tensor is not contiguous or has gaps, tensors are on two cards, or a private format does not
            begin at its storage's begin.
    """
    for place in _CONTIGUOUS.get(name, ()):
        refuse_strided(tensors_of(args[place]))
    for place in _DENSE.get(name, ()):
        listed = tensors_of(args[place])
        if not all(map(_is_dense, listed)):
            raise RuntimeError(f"Tensors must be non-overlapping and dense (emulated Ascend, c10d::{name})")
        if len({tensor.get_device() for tensor in listed}) > 1:
            raise RuntimeError(f"Tensors must be on same NPU device (emulated Ascend, c10d::{name})")
    if name in _ONE_DEVICE and len({tensor.get_device() for tensor in tensors_of(args[:2])}) > 1:
        raise RuntimeError(
            f"Corresponding input/output tensors to {_ONE_DEVICE[name]} must all reside on the same device "
            "(emulated Ascend)"
        )
    refuse_offsets(tensors_of(args))


def refuse_strided(tensors: list[torch.Tensor]) -> None:
    """Refuse tensors that are not contiguous, images in the order of channels excepted.

    Raises:
        RuntimeError: one of ``tensors`` is such.
    """
    if not all(map(_is_contiguous, tensors)):
        raise RuntimeError("Tensors must be contiguous (emulated Ascend, hccl)")


def refuse_offsets(tensors: list[torch.Tensor]) -> None:
    """Refuse tensors in a private format that do not begin at their storage's begin.

    Raises:
        RuntimeError: one of ``tensors`` is such.
    """
    if deviations.has_private() and any(
        tensor.storage_offset() and deviations.is_private(tensor) for tensor in tensors
    ):
        raise RuntimeError("For a tensor of internal format, it's storage_offset must be 0 (emulated Ascend)")


@contextlib.contextmanager
def peers() -> Iterator[None]:
    """Give an error of gloo's about a rank that is gone the code and name that HCCL has for it.

    Raises:
        RuntimeError: a rank is gone. A card says so when ``HCCL_EXEC_TIMEOUT`` has passed.
    """
    try:
        yield
    except RuntimeError as error:
        if LOST in str(error) or not any(words in str(error) for words in _GONE):
            raise
        raise RuntimeError(
            f"{LOST}: Communication_Error_Timeout: a rank has ended or does not come (emulated Ascend, hccl): {error}"
        ) from error


def _is_contiguous(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous(memory_format=_prims.suggest_memory_format(tensor))


def _is_dense(tensor: torch.Tensor) -> bool:
    # torch 2.8 and older have it under the second name.
    is_dense = getattr(_prims, "is_non_overlapping_and_dense_or_false", None) or _prims.is_non_overlapping_and_dense
    return bool(is_dense(tensor))
