"""``hccl`` between emulated cards: gloo moves the bytes, and a script sees the group as it would see hccl.

A group has one backend, for cards only, so it refuses a CPU tensor as hccl does. The kernels of the collectives call
the same operators on CPU tensors over the cards' memory. They use a shadow group, which has the same gloo for the CPU.
"""

from __future__ import annotations

import collections
import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from xamp.backends.npu.emulation import arithmetic, deviations, reductions, strided
from xamp.backends.npu.emulation.crossing import Crossing, aside, over
from xamp.backends.npu.emulation.reductions import tensors_of

__all__ = ["KERNELS", "install"]

_NPU = torch.device("npu")
_CPU = torch.device("cpu")
# The type stubs of these classes lack some of their C++ methods.
_Group: Any = dist.ProcessGroup
_Gloo: Any = dist.ProcessGroupGloo
_c10d: Any = torch._C._distributed_c10d

_COLLECTIVES = (
    *("allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "barrier"),
    *("allgather_", "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_"),
    *("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"),
    *("alltoall_", "alltoall_base_", "gather_", "scatter_"),
)
# On hccl these count elements and ignore the shape; gloo splits the first dimension.
_FLAT = (
    *("_allgather_base_", "allgather_into_tensor_coalesced_"),
    *("_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"),
)
_PEER_TO_PEER = ("send", "recv_", "recv_any_source_")


class EmulatedHccl(_Gloo):  # type: ignore[misc]
    """The result of ``group._get_backend(torch.device("npu"))``; torch_npu calls some of its methods directly."""

    def __init__(self, options: Any) -> None:
        # A group that is made again after it was destroyed must not find the addresses of the first in the store.
        _made[options.group_id] += 1
        store = _c10d.PrefixStore(f"emulated-{_made[options.group_id]}", options.store)
        super().__init__(store, options.group_rank, options.group_size, timeout=options.timeout)
        shadow = _Group(store, options.group_rank, options.group_size)
        shadow._register_backend(_CPU, _Group.BackendType.GLOO, self)
        shadow._set_default_backend(_Group.BackendType.GLOO)
        self.shadow = shadow

    def gather(self, outputs: Any, inputs: Any, *options: Any) -> Any:
        """The backend's own gather, for tensors of cards."""
        return _waited("gather", super().gather, outputs, inputs, *options)

    def allgather(self, outputs: Any, inputs: Any, *options: Any) -> Any:
        """The backend's own allgather, for tensors of cards."""
        return _waited("allgather", super().allgather, outputs, inputs, *options)

    def batch_isend_irecv(self, kinds: list[str], tensors: list[torch.Tensor], ranks: list[int]) -> Any:
        """Start all sends and receives in the order of the list, and wait for them."""
        works = []
        with aside():
            for kind, tensor, rank in zip(kinds, tensors, ranks, strict=True):
                call = self.send if "send" in kind else self.recv
                works.append(call([Crossing("hccl").over(tensor)], rank, 0))
        for work in works:
            work.wait()
        return _finished(tensors)


_made: collections.Counter[str] = collections.Counter()
# Keeps the Python objects alive: C++ holds a backend, but not its Python part.
_alive: list[EmulatedHccl] = []
# The sends and receives since a batch was opened; None while no batch is open.
_batch: list[tuple[Any, list[torch.Tensor]]] | None = None


def _create(options: Any, _options_of_hccl: Any) -> EmulatedHccl:
    backend = EmulatedHccl(options)
    _alive.append(backend)
    return backend


def install() -> None:
    """Make every new ``hccl`` group use gloo from now on."""
    plugins: dict[str, Any] = dist.Backend._plugins
    plugins["HCCL"] = plugins["HCCL"]._replace(creator_fn=_create)
    start, end = _Group._start_coalescing, _Group._end_coalescing

    @functools.wraps(start)
    def start_coalescing(group: Any, device: torch.device) -> None:
        global _batch
        if device.type == "npu":
            _batch = []
        else:
            start(group, device)

    @functools.wraps(end)
    def end_coalescing(group: Any, device: torch.device) -> Any:
        return end(group, device) if device.type != "npu" else _finish_batch()

    _Group._start_coalescing = start_coalescing
    _Group._end_coalescing = end_coalescing
    reductions.install()


def _finish_batch() -> Any:
    """Close a batch of sends and receives: wait for all, because gloo has no handle for a batch."""
    global _batch
    held, _batch = _batch or [], None
    for work, _ in held:
        work.wait()
    return _finished([tensor for _, tensors in held for tensor in tensors])


def _finished(tensors: list[torch.Tensor]) -> Any:
    """A handle of finished work, whose future holds the cards' tensors."""
    devices = sorted({tensor.device.index for tensor in tensors}) or [0]
    future: torch.futures.Future[Any] = torch.futures.Future(devices=[torch.device("npu", index) for index in devices])
    future.set_result(tensors)
    return _c10d._create_work_from_future(future)


def _waited(name: str, call: Callable[..., Any], *args: Any) -> Any:
    with aside():
        crossing = Crossing(f"hccl {name}")
        call(*(crossing.over(arg) for arg in args)).wait()
    return _finished(tensors_of(args[:1]))


def _shadowed(group: Any) -> Any:
    backend = _Group.unbox(group)._get_backend(_NPU)
    if not isinstance(backend, EmulatedHccl):
        raise NotImplementedError(f"process groups of {type(backend).__name__} are not served on emulated Ascend cards")
    return backend.shadow.boxed()


def _refuse_offsets(tensors: list[torch.Tensor]) -> None:
    if any(tensor.storage_offset() and deviations.is_private(tensor) for tensor in tensors):
        raise RuntimeError("For a tensor of internal format, it's storage_offset must be 0 (emulated Ascend)")


def _crossed(name: str, args: Any) -> tuple[int, list[Any]]:
    if deviations.has_private():
        _refuse_offsets(tensors_of(args))
    crossing = Crossing(name)
    crossed = [
        _shadowed(arg) if isinstance(arg, torch.ScriptObject) and _is_group(arg) else crossing.over(arg) for arg in args
    ]
    return crossing.index, crossed


def _is_group(value: torch.ScriptObject) -> bool:
    return value._type().qualified_name().endswith("ProcessGroup")


def _collective(name: str) -> Callable[..., Any]:
    operator = getattr(torch.ops.c10d, name).default
    returns = len(operator._schema.returns)

    def kernel(*args: Any) -> Any:
        with aside():
            index, crossed = _crossed(f"c10d::{name}", args)
            if name in _FLAT:
                crossed[:2] = map(_flattened, crossed[:2])
            made = operator(*crossed)
            _c10d.Work.unbox(made[-1] if returns > 1 else made).wait()
            arithmetic.settle(crossed[0], index)
        work = _finished(tensors_of(args[0])).boxed()
        return (args[0], work) if returns > 1 else work

    return kernel


def _flattened(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.view(-1) if value.is_contiguous() else value
    return [_flattened(each) for each in value]


def _peer_to_peer(name: str) -> Callable[..., Any]:
    operator = getattr(torch.ops.c10d, name).default

    def kernel(tensors: list[torch.Tensor], group: Any, *rest: Any) -> Any:
        with aside():
            made = operator([_holding(tensor) for tensor in tensors], _shadowed(group), *rest)
        if _batch is not None:
            _batch.append((_c10d.Work.unbox(made), tensors))
        return made

    return kernel


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
    **{f"c10d::{name}": _collective(name) for name in _COLLECTIVES},
    **{f"c10d::{name}": _peer_to_peer(name) for name in _PEER_TO_PEER},
}
