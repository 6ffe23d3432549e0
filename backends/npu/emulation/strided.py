"""Dense tensors of an emulated card: a CPU tensor over a card's memory, and a copy of a CPU tensor to the card."""

from __future__ import annotations

import ctypes
import os
import sys

import torch

from xamp.backends.npu.emulation.torch_private import conj, neg_view, storage_at

__all__ = ["CPU", "QUEUED", "dense", "finish_queue", "give", "over"]

CPU = torch.device("cpu")
_DEVICES = tuple(torch.device("npu", index) for index in range(64))
_BLOCK = 512
QUEUED = os.environ.get("TASK_QUEUE_ENABLE", "0") != "0"
"""Whether torch_npu queues the copies that its own kernels start, as a script may ask it to."""


def finish_queue(index: int) -> None:
    """Wait for what torch_npu has queued for card ``index``: Python kernels do not queue, so they would come first."""
    sys.modules["torch_npu"]._C._npu_getCurrentRawStream(index)  # torch_npu waits where a stream is asked for


def over(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the memory of ``tensor``, valid as long as ``tensor`` lives."""
    if QUEUED:
        finish_queue(tensor.get_device())
    storage = tensor.untyped_storage()
    shared = torch.empty(0, dtype=tensor.dtype, device=CPU)
    shape = (tensor.storage_offset(), tensor.size(), tensor.stride())
    try:
        shared.set_(storage_at(storage.data_ptr(), CPU, storage.nbytes()), *shape)
    except RuntimeError:
        # Its storage was made smaller by hand. A card goes on in the block of memory, which has 512 bytes or more.
        whole = -(-storage.nbytes() // _BLOCK) * _BLOCK
        shared.set_(storage_at(storage.data_ptr(), CPU, whole), *shape)
    if tensor.is_conj():
        shared = conj(shared)
    return neg_view(shared) if tensor.is_neg() else shared


def give(made: torch.Tensor, index: int) -> torch.Tensor:
    """Copy ``made``, a kernel's result on the CPU, to card ``index``, with the same strides."""
    if made.is_conj() or made.is_neg():
        made = made.resolve_conj().resolve_neg()
    if not dense(made):
        made = made.contiguous()
    given = torch.empty_strided(made.size(), made.stride(), dtype=made.dtype, device=_DEVICES[index])
    if QUEUED:
        finish_queue(index)
    if bytes_ := made.numel() * made.element_size():
        ctypes.memmove(given.data_ptr(), made.data_ptr(), bytes_)
    return given


def dense(tensor: torch.Tensor) -> bool:
    """Whether the elements of ``tensor`` fill a range of memory without gaps or overlaps, in any order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
