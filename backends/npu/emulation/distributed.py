"""``hccl`` between emulated cards: gloo moves the bytes, and a script sees the group as it would see hccl.

A group has one backend, for cards only, so it refuses a CPU tensor as hccl does. The kernels of the collectives call
the same operators on CPU tensors over the cards' memory, in the backend's shadow group.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from xamp.backends.npu.emulation import arithmetic, reductions, strided
from xamp.backends.npu.emulation.crossing import Crossing, aside, over
from xamp.backends.npu.emulation.hccl import (
    Batch,
    EmulatedHccl,
    batch,
    close_batch,
    finished,
    open_batch,
)
from xamp.backends.npu.emulation.reductions import tensors_of
from xamp.backends.npu.emulation.refusals import peers, refuse
from xamp.backends.npu.emulation.torch_private import coalescing, replace_coalescing, work_of
from xamp.backends.npu.emulation.uneven import UNEVEN

__all__ = ["KERNELS", "install"]

_NPU = torch.device("npu")
_CPU = torch.device("cpu")
# The type stubs of these lack some of their C++ methods.
_Group: Any = dist.ProcessGroup

# On hccl these count elements and ignore the shape; gloo splits the first dimension.
_FLAT_GATHERS = ("_allgather_base_", "allgather_into_tensor_coalesced_")
_FLAT_REDUCE_SCATTERS = ("_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_")
_FLAT = (*_FLAT_GATHERS, *_FLAT_REDUCE_SCATTERS)
_COLLECTIVES = {
    **dict.fromkeys(("allreduce_", "allreduce_coalesced_", "barrier"), "ALLREDUCE"),
    **dict.fromkeys(("allgather_", "allgather_coalesced_", *_FLAT_GATHERS), "ALLGATHER"),
    **dict.fromkeys(("reduce_scatter_", *_FLAT_REDUCE_SCATTERS), "REDUCE_SCATTER"),
    "broadcast_": "BROADCAST",
    "reduce_": "REDUCE",
    "gather_": "GATHER",
    "scatter_": "SCATTER",
    "alltoall_": "ALLTOALL",
    "alltoall_base_": "ALLTOALL_BASE",
}
"""By operator: the kind of work that torch_npu calls it, which has no barrier of its own."""
_PEER_TO_PEER = {"send": "SEND", "recv_": "RECV"}


def install() -> None:
    """Make every new ``hccl`` group use gloo from now on: torch_npu makes its backend by the name that is set here."""
    theirs: Any = sys.modules["torch_npu"]._C._distributed_c10d
    EmulatedHccl.Options = theirs.ProcessGroupHCCL.Options
    theirs.ProcessGroupHCCL = EmulatedHccl
    (start, end), stop = coalescing(), _Group.shutdown

    @functools.wraps(start)
    def start_coalescing(group: Any, device: torch.device) -> None:
        if device.type == "npu":
            open_batch()
        else:
            start(group, device)

    @functools.wraps(end)
    def end_coalescing(group: Any, device: torch.device) -> Any:
        return end(group, device) if device.type != "npu" else close_batch().finish()

    @functools.wraps(stop)
    def shutdown(group: Any) -> None:
        backend = group._get_backend(_NPU) if _NPU in group._device_types else None
        stop(group)
        if isinstance(backend, EmulatedHccl):
            backend.records.close()

    replace_coalescing(start_coalescing, end_coalescing)
    _Group.shutdown = shutdown
    reductions.install()


def _backend(group: Any) -> EmulatedHccl:
    backend = _Group.unbox(group)._get_backend(_NPU)
    if not isinstance(backend, EmulatedHccl):
        raise NotImplementedError(f"process groups of {type(backend).__name__} are not served on emulated Ascend cards")
    return backend


def _is_group(value: Any) -> bool:
    return isinstance(value, torch.ScriptObject) and value._type().qualified_name().endswith("ProcessGroup")


def _collective(name: str, op_type: str) -> Callable[..., Any]:
    operator = getattr(torch.ops.c10d, name).default
    returns, uneven = len(operator._schema.returns), UNEVEN.get(name)

    def kernel(*args: Any) -> Any:
        with aside():
            refuse(name, args)
            crossing, backend = Crossing(f"c10d::{name}"), _backend(next(filter(_is_group, args)))
            crossed = [backend.shadow.boxed() if _is_group(arg) else crossing.over(arg) for arg in args]
            if name in _FLAT:
                crossed[:2] = map(_flattened, crossed[:2])
            with backend.working(op_type, tensors_of(args[1:]) or tensors_of(args)):
                if uneven is None or not uneven(*crossed):
                    made = operator(*crossed)
                    work_of(made[-1] if returns > 1 else made).wait()
            arithmetic.settle(crossed[0], crossing.index)
        work = finished(tensors_of(args[0])).boxed()
        return (args[0], work) if returns > 1 else work

    return kernel


def _flattened(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.view(-1) if value.is_contiguous() else value
    return [_flattened(each) for each in value]


def _peer_to_peer(name: str, op_type: str) -> Callable[..., Any]:
    operator = getattr(torch.ops.c10d, name).default

    def kernel(tensors: list[torch.Tensor], group: Any, peer: int, _tag: int) -> Any:
        """HCCL has no tags: what goes from a rank to another arrives in order."""
        outer = batch()
        started = Batch() if outer is None else outer
        try:
            refuse(name, (tensors,))
            backend = _backend(group)
            backend.connect()
            with aside():
                memory = [_holding(tensor) for tensor in tensors]
                if peer == backend.rank():
                    started.keep(tensors, memory, name == "send")
                    made = None if outer else started.finish()  # refuses: the other half is in no batch
                else:
                    last = backend.records.begin(op_type, tensors, backend.get_hccl_comm_name(0))
                    with peers():
                        made = operator(memory, backend.shadow.boxed(), peer, 0)
                    last.work = work_of(made)
                    started.add(tensors, last.work)
        except BaseException:
            close_batch()  # nobody else does where the body of a batch raises
            raise
        return made if outer is None else finished(tensors).boxed()

    return kernel


def _recv_any_source(*_: Any) -> Any:
    raise RuntimeError("ProcessGroupHCCL does not support recv (emulated Ascend): name the rank to receive from")


class _Held(ctypes.Array):  # type: ignore[type-arg]
    """The memory of a tensor; it keeps the tensor alive as long as something uses the memory."""

    _type_ = ctypes.c_char
    _length_ = 0


def _holding(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the memory of ``tensor`` that keeps it alive, because the work continues after the call."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return over(tensor)
    if strided.QUEUED:
        strided.finish_queue(tensor.get_device())
    kind: Any = type("_HeldBytes", (_Held,), {"_length_": storage.nbytes(), "_type_": ctypes.c_char})
    memory = kind.from_address(storage.data_ptr())
    memory.tensor = tensor
    seen = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    empty = torch.empty(0, dtype=tensor.dtype, device=_CPU)
    return empty.set_(seen, tensor.storage_offset(), tensor.size(), tensor.stride())


KERNELS: dict[str, Callable[..., Any]] = {
    **{f"c10d::{name}": _collective(name, op_type) for name, op_type in _COLLECTIVES.items()},
    **{f"c10d::{name}": _peer_to_peer(name, op_type) for name, op_type in _PEER_TO_PEER.items()},
    "c10d::recv_any_source_": _recv_any_source,
}
