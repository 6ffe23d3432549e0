"""``apex.parallel.distributed``: Apex's DistributedDataParallel over torch's, and its calls on flat tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from xamp.apex import apex_C

__all__ = [
    "DistributedDataParallel",
    "Reducer",
    "apply_flat_dist_call",
    "extract_tensors",
    "flat_dist_call",
    "flatten",
    "split_by_type",
    "split_half_float_double",
    "unflatten",
]

flatten, unflatten = apex_C.flatten, apex_C.unflatten

_SHARED_PARAM = (
    "shared_param is no longer supported as an option.  It was misleadingly named from the start.  It turns out "
    "overlapping communication with computation should work fine with shared parameters.  If you still wish to delay "
    "communication to the end of the backward pass, use delay_allreduce=True|False instead."
)
_ELEMENT = 4  # bytes; message_size counts elements, torch's buckets are sized in MiB


def apply_flat_dist_call(bucket: Sequence[torch.Tensor], call: Callable[..., Any], extra_args: Any = None) -> None:
    """Join tensors of one dtype, run ``call`` on the whole, and write the result back; a sum becomes the average."""
    coalesced = flatten(bucket)
    call(coalesced, *(extra_args or ()))
    if call is dist.all_reduce:
        coalesced /= dist.get_world_size()
    for buffer, synced in zip(bucket, unflatten(coalesced, bucket), strict=True):
        buffer.copy_(synced)


def split_by_type(tensors: Iterable[torch.Tensor]) -> dict[str, list[torch.Tensor]]:
    """Return the tensors by ``tensor.type()``, in the order of their first appearance."""
    buckets: dict[str, list[torch.Tensor]] = {}
    for tensor in tensors:
        buckets.setdefault(tensor.type(), []).append(tensor)
    return buckets


def split_half_float_double(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return the fp16, the fp32 and the fp64 tensors as lists; a dtype of which there are none has no list."""
    found = list(tensors)
    lists = [[t for t in found if t.dtype == kind] for kind in (torch.float16, torch.float32, torch.float64)]
    return [bucket for bucket in lists if bucket]


def flat_dist_call(tensors: Iterable[torch.Tensor], call: Callable[..., Any], extra_args: Any = None) -> None:
    """Run ``call`` of torch.distributed on all ``tensors``, joined by type, in place."""
    for bucket in split_by_type(tensors).values():
        apply_flat_dist_call(bucket, call, extra_args)


def extract_tensors(maybe_tensor: Any, tensor_list: list[torch.Tensor]) -> None:
    """Append to ``tensor_list`` every tensor in ``maybe_tensor``, a tensor or nested iterables."""
    if isinstance(maybe_tensor, torch.Tensor):
        tensor_list.append(maybe_tensor)
    elif isinstance(maybe_tensor, Iterable) and not isinstance(maybe_tensor, str):
        for item in maybe_tensor:
            extract_tensors(item, tensor_list)


class Reducer:
    """Averages gradients over the ranks when ``reduce()`` is called, and not before.

    Args:
        module_or_grads_list: a module, whose parameters are then broadcast from rank 0; or gradients.
    """

    def __init__(self, module_or_grads_list: Any) -> None:
        self.module: nn.Module | None = None
        self.grads: list[torch.Tensor] = []
        if isinstance(module_or_grads_list, nn.Module):
            self.module = module_or_grads_list
            flat_dist_call([param.data for param in self.module.parameters()], dist.broadcast, (0,))
        else:
            extract_tensors(module_or_grads_list, self.grads)

    def reduce(self) -> None:
        """Average the gradients over the ranks, in place."""
        grads = self.grads
        if self.module is not None:
            grads = [param.grad.data for param in self.module.parameters() if param.grad is not None]
        flat_dist_call(grads, dist.all_reduce)


class DistributedDataParallel(TorchDistributedDataParallel):
    """torch's DistributedDataParallel with Apex's arguments. Buffers are not broadcast before a forward, as in Apex.

    Args:
        module: the model; its parameters may be on any device.
        message_size: the elements of a bucket, as fp32.
        delay_allreduce: accepts parameters that get no gradient; torch overlaps reduction and backward all the same.
        shared_param: no longer supported, as in Apex.
        allreduce_trigger_params: accepted; torch reduces a bucket when it is full.
        retain_allreduce_buffers: keep the gradients in the buckets.
        allreduce_always_fp32: reduce 16-bit gradients in fp32.
        num_allreduce_streams: accepted; torch manages the streams.
        allreduce_communicators: accepted; torch manages the streams.
        gradient_average: divide the sum over the ranks by their number.
        gradient_predivide_factor: divide the gradients by this before the sum and multiply by it afterwards.
        gradient_average_split_factor: accepted, as in Apex.
        prof: accepted.

    Raises:
        ValueError: ``shared_param``; or ``delay_allreduce`` with several streams or trigger parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        message_size: int = 10000000,
        delay_allreduce: bool = False,
        shared_param: Any = None,
        allreduce_trigger_params: Any = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: Any = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: Any = None,
        prof: bool = False,
    ) -> None:
        if num_allreduce_streams > 1 and delay_allreduce:
            raise ValueError("self.allreduce_different_streams may only be used if delay_allreduce=False.")
        if shared_param is not None:
            raise ValueError(_SHARED_PARAM)
        if allreduce_trigger_params is not None and delay_allreduce:
            raise ValueError("Setting allreduce_trigger_params is only valid if delay_allreduce=False.")
        with warnings.catch_warnings():
            # torch has no other name yet for what Apex does: leave buffers alone at the start too.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            super().__init__(
                module,
                broadcast_buffers=False,
                bucket_cap_mb=max(1, round(message_size * _ELEMENT / 2**20)),
                find_unused_parameters=bool(delay_allreduce),
                gradient_as_bucket_view=bool(retain_allreduce_buffers),
            )
        self.delay_allreduce = delay_allreduce
        self.message_size = message_size
        self.allreduce_always_fp32 = allreduce_always_fp32
        self.gradient_average = gradient_average
        self.gradient_predivide_factor = gradient_predivide_factor
        self.retain_allreduce_buffers = retain_allreduce_buffers
        self.prof = prof
        if allreduce_always_fp32 or not gradient_average or gradient_predivide_factor != 1.0:
            divide_after = gradient_predivide_factor / dist.get_world_size() if gradient_average else 1.0
            before = 1.0 / gradient_predivide_factor
            # Without annotations: torch compares them with its own types, and those of this file are strings.
            how = _Reduction(allreduce_always_fp32, before, divide_after)
            self.register_comm_hook(how, lambda how, bucket: how(bucket))

    def enable_allreduce(self) -> None:
        """Reduce gradients again, those that were accumulated meanwhile too."""
        self.require_backward_grad_sync = True

    def disable_allreduce(self) -> None:
        """Do not reduce gradients from now on; they add up on each rank."""
        self.require_backward_grad_sync = False


class _Reduction:
    """Sums a bucket over the ranks: in fp32 or not, multiplied by numbers before and after."""

    def __init__(self, in_fp32: bool, before: float, after: float) -> None:
        self.in_fp32 = in_fp32
        self.before = before
        self.after = after

    def __call__(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        buffer: torch.Tensor = bucket.buffer()
        sent = buffer.float() if self.in_fp32 and buffer.dtype in (torch.float16, torch.bfloat16) else buffer
        if self.before != 1.0:
            sent.mul_(self.before)
        future: Any = dist.all_reduce(sent, async_op=True).get_future()

        def finish(done: Any) -> torch.Tensor:
            summed: torch.Tensor = done.value()[0]
            if self.after != 1.0:
                summed.mul_(self.after)
            return buffer.copy_(summed) if summed is not buffer else buffer

        return future.then(finish)  # type: ignore[no-any-return]
