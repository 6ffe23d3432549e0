"""Tensors of the abacus: real ones of torch's PrivateUse1 key, whose memory is a CPU storage.

torch keeps one Python object for each storage as long as the storage lives. That of an abacus storage holds, as
attribute ``host``, the CPU storage whose memory it points to, so that memory is freed when the last tensor goes.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = [
    "ON_CPU",
    "ON_SPARSE_CPU",
    "allocate",
    "device_type",
    "host",
    "is_here",
    "move_in",
    "set_device_type",
    "wrap",
]

_name = "abacus"

ON_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
"""For ``redispatch``: CPU kernels that touch no memory, such as those of views, are right on any tensor."""

ON_SPARSE_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.SparseCPU)

_aten = torch.ops.aten
_seat = _aten.set_.source_Storage_storage_offset


def device_type() -> str:
    """The device's type in torch. It has one index: torch's guard for devices written in Python knows no other."""
    return _name


def set_device_type(name: str) -> None:
    """Give the device another type, once a process and before its first use: a device that builds on this one."""
    global _name
    _name = name


def is_here(device: torch.device | str | None) -> bool:
    """Whether it is this device; torch's own check of the index is that of a string."""
    if device is None:
        return False
    device = torch.device(device)
    if device.type == _name and device.index not in (None, 0):
        raise RuntimeError(f"{_name}: invalid device ordinal {device.index}, there is {_name}:0 only")
    return device.type == _name


def _storage_over(memory: torch.UntypedStorage) -> Any:
    here = torch.device(_name, 0)
    storage: Any = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), here, memory.nbytes())
    storage.host = memory
    return storage


def allocate(nbytes: int) -> Any:
    """A storage of its own memory."""
    return _storage_over(torch.UntypedStorage(nbytes))


def _seated(storage: Any, like: torch.Tensor) -> torch.Tensor:
    """A tensor in ``storage`` of the dtype and shape of ``like``."""
    made = torch._C._acc.create_empty_tensor((0,), like.dtype)
    return move_in(made, storage, like)


def move_in(tensor: torch.Tensor, storage: Any, like: torch.Tensor) -> torch.Tensor:
    """Put ``tensor`` into ``storage``, with the shape of ``like``."""
    _seat.redispatch(ON_CPU, tensor, storage, like.storage_offset(), like.size(), like.stride())
    return tensor


def wrap(result: torch.Tensor) -> Any:
    """The abacus tensor over the memory of a CPU tensor."""
    if result.is_sparse:
        return _wrap_sparse(result)
    if result._is_zerotensor():  # what autograd makes of zeros; it has no memory
        result = result.clone()
    made = _seated(_storage_over(result.untyped_storage()), result)
    return _same_bits(made, result)


def host(tensor: torch.Tensor) -> Any:
    """The CPU tensor over the memory of an abacus tensor."""
    if tensor.is_sparse:
        return _host_sparse(tensor)
    memory = _memory_of(tensor.untyped_storage())
    made = torch.empty(0, dtype=tensor.dtype).set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())
    return _same_bits(made, tensor)


def _memory_of(storage: Any) -> Any:
    memory = getattr(storage, "host", None)
    if memory is None:  # made by torch in C++ over memory of ours, for the length of a call
        memory = torch._C._construct_storage_from_data_pointer(
            storage.data_ptr(), torch.device("cpu"), storage.nbytes()
        )
    return memory


def _same_bits(made: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Some complex tensors, and real parts of them, are the conjugate or the negative of what is in their memory."""
    if like.is_conj():
        torch._C._set_conj(made, True)
    if like.is_neg():
        torch._C._set_neg(made, True)
    return made


def _host_sparse(tensor: torch.Tensor) -> Any:
    indices, values = host(tensor._indices()), host(tensor._values())
    return _sparse(tensor, indices, values, ON_SPARSE_CPU, torch.device("cpu"))


def _wrap_sparse(result: torch.Tensor) -> Any:
    indices, values = wrap(result._indices()), wrap(result._values())
    return _sparse(result, indices, values, ON_SPARSE_CPU, torch.device(_name, 0))


def _sparse(like: Any, indices: Any, values: Any, keys: Any, device: torch.device) -> Any:
    return _aten._sparse_coo_tensor_with_dims_and_tensors.default.redispatch(
        keys,
        like.sparse_dim(),
        like.dense_dim(),
        like.size(),
        indices,
        values,
        dtype=like.dtype,
        layout=torch.sparse_coo,
        device=device,
        is_coalesced=like.is_coalesced(),
    )
