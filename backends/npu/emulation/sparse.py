"""Sparse tensors of a card. Their parts are dense tensors of the card; operators on them run on the CPU."""

from __future__ import annotations

from typing import Any

import torch

from xamp.backends.npu.emulation import strided
from xamp.backends.npu.emulation.torch_private import sparse_of_parts

__all__ = ["STAYS", "give", "over", "put_back", "writable"]

STAYS = frozenset(
    f"aten::{name}"
    for name in (
        *("_coalesced_", "_dimI", "_dimV", "_indices", "_nnz", "_values", "dense_dim", "sparse_dim", "is_coalesced"),
        *("indices", "values", "_sparse_coo_tensor_with_dims", "_sparse_coo_tensor_with_dims_and_tensors"),
        *("copy_", "copy_sparse_to_sparse_", "resize_as_sparse_", "sparse_resize_", "sparse_resize_and_clear_"),
        *("empty.memory_format", "empty_like", "zero_"),
    )
)
"""The operators for which torch_npu's sparse kernel stays: those that build a sparse tensor or take it apart."""


def over(tensor: torch.Tensor) -> torch.Tensor:
    """A sparse CPU tensor whose parts share the memory of ``tensor``'s parts."""
    if tensor.layout is not torch.sparse_coo:
        raise NotImplementedError(f"{tensor.layout} is not served on an emulated Ascend card")
    seen: torch.Tensor = sparse_of_parts(
        *(tensor.sparse_dim(), tensor.dense_dim(), tensor.size()),
        *(strided.over(tensor._indices()), strided.over(tensor._values())),
        dtype=tensor.dtype,
        layout=torch.sparse_coo,
        device=strided.CPU,
        is_coalesced=tensor.is_coalesced(),
    )
    return seen


def give(made: torch.Tensor, index: int) -> torch.Tensor:
    """Copy the sparse CPU tensor ``made`` to card ``index``."""
    if made.layout is not torch.sparse_coo:
        raise NotImplementedError(f"{made.layout} is not served on an emulated Ascend card")
    indices, values = strided.give(made._indices(), index), strided.give(made._values(), index)
    given: torch.Tensor = sparse_of_parts(
        *(made.sparse_dim(), made.dense_dim(), made.size(), indices, values),
        dtype=made.dtype,
        layout=torch.sparse_coo,
        device=indices.device,
        is_coalesced=made.is_coalesced(),
    )
    return given


def writable(seen: Any) -> Any:
    """``seen``, or a copy of it if it is sparse, for an operator that writes to it.

    A write to a sparse tensor mostly gives it parts of other sizes, and memory of a card cannot be resized here.
    """
    return seen.clone() if isinstance(seen, torch.Tensor) and seen.layout is torch.sparse_coo else seen


def put_back(target: Any, written: Any, index: int) -> None:
    """Copy to a sparse ``target`` on the card what an operator wrote to its CPU copy."""
    if isinstance(target, torch.Tensor) and target.layout is torch.sparse_coo:
        torch.ops.aten.copy_sparse_to_sparse_(target, give(written, index))
