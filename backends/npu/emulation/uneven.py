"""Collectives of lists that do not fit each other: HCCL takes them, and gloo, which moves the bytes here, does not.

A gather is one broadcast by each rank, and what is scattered is reduced part by part. Ranks that gather must go the
same way, so the list of outputs decides, which all have alike, and not a rank's own input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from xamp.backends.npu.emulation.torch_private import work_of

__all__ = ["UNEVEN"]

_c10d: Any = torch.ops.c10d
_Group: Any = dist.ProcessGroup


def _wait(made: Any) -> None:
    work_of(made[-1] if isinstance(made, (tuple, list)) else made).wait()


def _is_even(tensors: list[torch.Tensor]) -> bool:
    return all(tensor.shape == tensors[0].shape for tensor in tensors)


def _check_own(name: str, listed: list[torch.Tensor], own: torch.Tensor, group: Any) -> int:
    """Return this rank, whose tensor in the list must be as large as its own.

    Raises:
        RuntimeError: it is not, or the list has another length than the group.
    """
    unboxed = _Group.unbox(group)
    rank, ranks = int(unboxed.rank()), unboxed.size()
    if len(listed) != ranks:
        raise RuntimeError(
            f"Tensor list input to scatter/gather must match number of collective participants: got {len(listed)} for "
            f"{ranks} ranks (emulated Ascend, {name})"
        )
    if listed[rank].numel() != own.numel():
        raise RuntimeError(
            "All tensor operands to scatter/gather must have the same size: rank "
            f"{rank} has {own.numel()} numbers and the list {listed[rank].numel()} (emulated Ascend, {name})"
        )
    return rank


def _allgather(outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], group: Any, *more: Any) -> bool:
    rank = _check_own("allgather", outputs[0], inputs[0], group)
    if _is_even(outputs[0]):
        if inputs[0].shape == outputs[0][0].shape:
            return False
        _wait(_c10d.allgather_.default(outputs, [inputs[0].view(outputs[0][0].shape)], group, *more))
        return True
    for root, output in enumerate(outputs[0]):
        moved = inputs[0].reshape(-1).clone() if root == rank else output.new_empty(output.numel())
        _wait(_c10d.broadcast_.default([moved], group, root, 0, *more))
        output.copy_(moved.view(output.shape))
    return True


def _reduce_scatter(
    outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], group: Any, operation: Any, *more: Any
) -> bool:
    whole, output, ranks = inputs[0], outputs[0], _Group.unbox(group).size()
    if _is_even([*whole, output]) and len(whole) == ranks:
        return False
    if _is_even(whole):
        # Laid end to end; each rank gets as many numbers as its output has. What is missing is 0, more is left out.
        flat = output.new_zeros(ranks * output.numel())
        given = torch.cat([part.reshape(-1) for part in whole])[: flat.numel()]
        flat[: given.numel()] = given
        whole = list(flat.chunk(ranks))
    rank = _check_own("reduce_scatter", whole, output, group)
    for target, part in enumerate(whole):
        reduced = part.reshape(-1).clone()
        _wait(_c10d.allreduce_.default([reduced], group, operation, None, *more))
        if target == rank:
            output.copy_(reduced.view(output.shape))
    return True


def _alltoall(outputs: list[torch.Tensor], inputs: list[torch.Tensor], group: Any, *more: Any) -> bool:
    if _is_even([*outputs, *inputs]):
        return False
    sizes = [[tensor.numel() for tensor in side] for side in (outputs, inputs)]
    received = outputs[0].new_empty(sum(sizes[0]))
    sent = torch.cat([tensor.reshape(-1) for tensor in inputs])
    _wait(_c10d.alltoall_base_.default(received, sent, group, *sizes, *more))
    for output, part in zip(outputs, received.split(sizes[0]), strict=True):
        output.copy_(part.view(output.shape))
    return True


UNEVEN: dict[str, Callable[..., bool]] = {
    "allgather_": _allgather,
    "reduce_scatter_": _reduce_scatter,
    "alltoall_": _alltoall,
}
"""By operator: what does it where sizes differ, with the arguments as CPU tensors, and tells whether it did."""
