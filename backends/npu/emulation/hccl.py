"""What a script sees as torch_npu's ``ProcessGroupHCCL``, between emulated cards: gloo moves the bytes."""

from __future__ import annotations

import collections
import contextlib
import datetime
import os
import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from xamp.backends.npu.emulation.crossing import Crossing, aside, over
from xamp.backends.npu.emulation.records import Records
from xamp.backends.npu.emulation.reductions import tensors_of
from xamp.backends.npu.emulation.refusals import peers, refuse_offsets, refuse_strided
from xamp.backends.npu.emulation.torch_private import finished_work, prefixed

__all__ = ["Batch", "EmulatedHccl", "batch", "close_batch", "finished", "open_batch"]

_NPU = torch.device("npu")
_CPU = torch.device("cpu")
# The type stubs of these classes lack some of their C++ methods.
_Group: Any = dist.ProcessGroup
_Gloo: Any = dist.ProcessGroupGloo

_LONGEST_NAME = 127  # characters of a communicator's name
# The types of the entries of ``Options.hccl_config`` that HCCL knows. It leaves others alone.
_CONFIG = {
    **dict.fromkeys(("group_name", "hccl_algo", "hccl_buffer_name", "hccl_retry_enable", "hccl_retry_params"), str),
    **dict.fromkeys(("hccl_buffer_size", "hccl_exec_timeout", "hccl_job_id", "hccl_op_expansion_mode"), int),
    **dict.fromkeys(("hccl_sdma_qos", "hccl_sym_win_max_mem_size_per_rank", "hccl_world_rank_id"), int),
    **dict.fromkeys(("qos_service_level", "qos_traffic_class"), int),
}


class Batch:
    """Sends and receives that end together; gloo has no handle for them."""

    def __init__(self) -> None:
        self._works: list[Any] = []
        self._tensors: list[torch.Tensor] = []
        # CPU tensors over what this rank sends to itself, and over what it receives from itself, in order.
        self._sent: list[torch.Tensor] = []
        self._received: list[torch.Tensor] = []

    def add(self, tensors: list[torch.Tensor], work: Any) -> None:
        """Add what ``work`` moves."""
        self._tensors += tensors
        self._works.append(work)

    def keep(self, tensors: list[torch.Tensor], memory: list[torch.Tensor], sends: bool) -> None:
        """Keep what a rank sends to itself or receives from itself: gloo would wait for it forever.

        Args:
            tensors: on the card.
            memory: CPU tensors over their memory.
            sends: whether they are sent.
        """
        self._tensors += tensors
        if sends:
            self._sent += memory
        else:
            self._received += memory

    def finish(self) -> Any:
        """Wait for all, and return a handle of finished work.

        Raises:
            RuntimeError: this rank sends to itself and does not receive that, or the other way round.
        """
        with peers():
            for work in self._works:
                work.wait()
        sizes = [[(each.numel(), each.dtype) for each in side] for side in (self._sent, self._received)]
        if sizes[0] != sizes[1]:
            raise RuntimeError(
                "what a rank sends to itself, it must receive in the same batch (emulated Ascend, hccl); "
                f"sent: {sizes[0]}, received: {sizes[1]}"
            )
        with aside():
            for source, target in zip(self._sent, self._received, strict=True):
                target.view(-1).copy_(source.view(-1))
        return finished(self._tensors)


_batch: Batch | None = None


def batch() -> Batch | None:
    """The batch that is open."""
    return _batch


def open_batch() -> None:
    """Collect sends and receives from now on."""
    global _batch
    _batch = Batch()


def close_batch() -> Batch:
    """Return the batch that was open, and collect no longer."""
    global _batch
    closed, _batch = _batch, None
    return Batch() if closed is None else closed


class EmulatedHccl(_Gloo):  # type: ignore[misc]
    """The result of ``group._get_backend(torch.device("npu"))``. Scripts and torch_npu call its methods directly."""

    Options: Any = None
    """torch_npu's own class; set when this class takes the place of torch_npu's."""

    def __init__(
        self, store: Any, rank: int, size: int, options: Any = None, timeout: datetime.timedelta | None = None
    ) -> None:
        if isinstance(options, datetime.timedelta):  # the fourth may be either
            options, timeout = None, options
        self._options = self.Options() if options is None else _copy_of(options)
        if timeout is not None:
            self._options._timeout = timeout
        store = prefixed(_prefix(self._options), store)
        super().__init__(store, rank, size, timeout=self._options._timeout)
        # The kernels of collectives call the same operators on CPU tensors over the cards' memory, in this group.
        shadow = _Group(store, rank, size)
        shadow._register_backend(_CPU, _Group.BackendType.GLOO, self)
        shadow._register_backend(_NPU, _Group.BackendType.CUSTOM, self)
        shadow._set_default_backend(_Group.BackendType.GLOO)
        self.shadow = shadow
        self.records = Records(self._options, rank, size)
        self._name = ""
        self._connected = False
        self._streams: dict[object, Any] = {}
        _alive.append(self)

    @property
    def options(self) -> Any:
        """The options of the group: a copy of those that the script gave."""
        return self._options

    def connect(self) -> None:
        """Check the options, as a card does when the first collective makes the communicator.

        Raises:
            RuntimeError: an entry of ``hccl_config`` has another type than HCCL takes, or names no algorithm.
        """
        if self._connected:
            return
        for name, value in dict(self._options.hccl_config).items():
            wanted = _CONFIG.get(name)
            if wanted is not None and type(value) is not wanted:
                raise RuntimeError(f"Value type of {name} should be {'string' if wanted is str else 'int'}.")
            if name == "hccl_exec_timeout" and value >= 2**31:
                raise RuntimeError(f"Value type of {name} exceeds INT32_MAX(2147483647).")
        algorithm = "".join(self._options.hccl_config.get("hccl_algo", "").split())
        if algorithm and not re.search(r"level\d:", algorithm):
            raise RuntimeError(
                f"HCCL function error: hccl_algo {algorithm[:40]!r} names no algorithm of a level, "
                "as 'level0:NA;level1:ring' does (emulated Ascend)"
            )
        self._connected = True

    @contextlib.contextmanager
    def working(self, op_type: str, inputs: list[torch.Tensor]) -> Iterator[None]:
        """What is around each collective: the communicator is made, the work recorded, a rank that is gone told.

        Args:
            op_type: as torch's ``OpType`` calls it.
            inputs: on the card.

        Raises:
            RuntimeError: a rank is gone; see also :meth:`connect`.
        """
        self.connect()
        with self.records.of(op_type, inputs, self.get_hccl_comm_name(0)), peers():
            yield

    def get_hccl_comm_name(self, rank: int, init_comm: bool = True) -> str:
        """The communicator's name; "" if there is no communicator yet and none is asked for."""
        if init_comm:
            self.connect()
        return (self._name or f"emulated-{self._options.group_id}") if self._connected else ""

    def _set_hccl_comm_name(self, name: str) -> None:
        if not 0 < len(name) <= _LONGEST_NAME:
            raise RuntimeError(f"The length of the name must be between 1 and {_LONGEST_NAME}, got {name!r}")
        if name != self._name and (self._name or self._connected):
            raise RuntimeError(
                f"The current ProcessGroup is called {self.get_hccl_comm_name(0)!r} already, not {name!r}"
            )
        self._name = name

    def _group_start(self) -> None:
        open_batch()

    def _group_end(self) -> None:
        close_batch().finish()

    def _stream_of(self, device: torch.device, peer: int | None = None) -> int:
        """The id of the stream that stands for one of HCCL's; the collectives here run on none."""
        key = device.index, peer
        if key not in self._streams:
            npu: Any = torch.get_device_module("npu")
            self._streams[key] = npu.Stream(device)
        return int(self._streams[key].stream_id)

    def _get_stream_id(self, p2p: bool = False, peer: int = -1) -> int:
        own = p2p and os.environ.get("P2P_HCCL_BUFFSIZE") != "0"
        npu: Any = torch.get_device_module("npu")
        device = torch.device("npu", npu.current_device())
        return self._stream_of(device, peer if own else None) if self._connected else -1

    def get_coll_stream_id(self, device: torch.device) -> int:
        """The id of the stream for collectives."""
        return self._stream_of(device)

    def get_p2p_stream_id(self, device: torch.device, peer: int, is_batched: int) -> int:
        """The id of the stream for sends to ``peer`` and receives from it; -1 before the first collective."""
        return self._stream_of(device, None if is_batched else peer) if self._connected else -1

    def gather(self, outputs: Any, inputs: Any, *options: Any) -> Any:
        """The backend's own gather, for tensors of cards."""
        return self._waited("GATHER", super().gather, outputs, inputs, *options)

    def allgather(self, outputs: Any, inputs: Any, *options: Any) -> Any:
        """The backend's own allgather, for tensors of cards."""
        return self._waited("ALLGATHER", super().allgather, outputs, inputs, *options)

    def _waited(self, op_type: str, function: Any, *args: Any) -> Any:
        refuse_offsets(tensors_of(args))
        with self.working(op_type, tensors_of(args[1:])), aside():
            crossing = Crossing(f"hccl {op_type.lower()}")
            function(*(crossing.over(arg) for arg in args)).wait()
        return finished(tensors_of(args[:1]))

    def batch_isend_irecv(self, kinds: list[str], tensors: list[torch.Tensor], ranks: list[int]) -> Any:
        """Start all sends and receives in the order of the list, and wait for them."""
        refuse_offsets(tensors)
        started = Batch()
        with self.working("UNKNOWN", tensors[:1]), aside():
            for kind, tensor, rank in zip(kinds, tensors, ranks, strict=True):
                sends, memory = "send" in kind, [over(tensor)]
                if rank == self.rank():
                    started.keep([tensor], memory, sends)
                else:
                    started.add([tensor], (self.send if sends else self.recv)(memory, rank, 0))
            return started.finish()

    @torch.no_grad()  # as all collectives, these are below autograd
    def reduce_scatter_tensor_uneven(
        self, output: torch.Tensor, input: torch.Tensor, input_split_sizes: Any = (), opts: Any = None
    ) -> Any:
        """Reduce ``input`` over the ranks; each gets its part, of the size (along the first dimension) of its rank."""
        refuse_offsets([output, input])
        refuse_strided([output, input])
        whole, options = input.clone(), dist.AllreduceOptions()
        part = self._parts(whole, output, input_split_sizes)[self.rank()]
        if opts is not None:
            options.reduceOp = opts.reduceOp
        with self.working("REDUCE_SCATTER", [input]):
            self.shadow.allreduce([whole], options).wait()
        output.copy_(part.view_as(output))
        return finished([output])

    def all_gather_into_tensor_uneven(
        self, output: torch.Tensor, input: torch.Tensor, output_split_sizes: Any = (), opts: Any = None
    ) -> Any:
        """Put the ranks' inputs one after the other; their sizes are along the first dimension."""
        refuse_offsets([output, input])
        refuse_strided([output, input])
        with aside():
            parts = self._parts(over(output), input, output_split_sizes)
        with self.working("ALLGATHER", [input]), aside():
            for rank, part in enumerate(parts):
                if rank == self.rank():
                    part.copy_(over(input).view_as(part))
                root = dist.BroadcastOptions()
                root.rootRank = rank
                self.shadow.broadcast([part], root).wait()
        return finished([output])

    def _parts(self, whole: torch.Tensor, own: torch.Tensor, sizes: Any) -> tuple[torch.Tensor, ...]:
        """Split ``whole``, of which ``own`` is this rank's part, along its first dimension.

        Raises:
            RuntimeError: the sizes do not fit, or the dtypes differ.
        """
        if whole.dtype != own.dtype:
            raise RuntimeError("output tensor must have the same type as input tensor (emulated Ascend, hccl)")
        length, ranks = whole.shape[0], self.size()
        if not sizes and length % ranks:
            raise RuntimeError("the first dimension does not divide equally across group size (emulated Ascend, hccl)")
        sizes = list(sizes) or [length // ranks] * ranks
        if len(sizes) != ranks:
            raise RuntimeError("Number of tensor splits not equal to group size (emulated Ascend, hccl)")
        parts: tuple[torch.Tensor, ...] = whole.split(sizes)
        return parts

    def alltoallvc(self, output: torch.Tensor, input: torch.Tensor, counts: list[int]) -> Any:
        """Send ``counts[rank * size + other]`` numbers to each other rank, and receive what they send."""
        refuse_offsets([output, input])
        refuse_strided([output, input])
        size, rank = self.size(), self.rank()
        received, sent = counts[rank::size], counts[rank * size : (rank + 1) * size]
        with self.working("ALLTOALL", [input]), aside():
            flat = over(output).view(-1), over(input).view(-1)
            self.shadow.alltoall_base(*flat, received, sent, dist.AllToAllOptions()).wait()
        return finished([output])


# Keeps the Python objects alive: C++ holds a backend, but not its Python part.
_alive: list[EmulatedHccl] = []
# How often the default group was made, and since then, each other group by its id.
_lives = 0
_made: collections.Counter[str] = collections.Counter()


def _copy_of(options: Any) -> Any:
    """A copy, as torch_npu makes one: a script may use its options for several groups."""
    copied = EmulatedHccl.Options()
    for name in (
        "op_timeout",
        "is_high_priority_stream",
        "global_ranks_in_group",
        "hccl_config",
        "group_id",
        "_timeout",
    ):
        setattr(copied, name, getattr(options, name))
    return copied


def _prefix(options: Any) -> str:
    """What keeps a group that is made again from finding the addresses of the first in the store.

    All ranks of a group find the same, whatever other groups they were in.
    """
    global _lives
    if options.group_id and not options.global_ranks_in_group:
        _lives += 1
        _made.clear()
    _made[options.group_id] += 1
    return f"emulated-{_lives}-{_made[options.group_id]}"


def finished(tensors: list[torch.Tensor]) -> Any:
    """A handle of finished work, whose future holds the cards' tensors."""
    devices = sorted({tensor.device.index for tensor in tensors}) or [0]
    future: torch.futures.Future[Any] = torch.futures.Future(devices=[torch.device("npu", index) for index in devices])
    future.set_result(tensors)
    return finished_work(future)
