"""Reductions as torch_npu does them over HCCL, which itself adds, multiplies and compares only.

An average is a sum that is divided after it, and truncated for integers. A sum of multiples is a sum after a
multiplication, in place. Reductions of bits are refused. Gloo, which moves the bytes here, differs in all three.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["install"]

_Operation: Any = dist.ReduceOp
_REDUCE = ("allreduce", "allreduce_coalesced", "reduce")
_SCATTER = (
    *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
)
_NOT_SERVED = ("BAND", "BOR", "BXOR")


def install() -> None:
    """Put these in the place of the reductions of every process group; those of CPU tensors stay what they are."""
    group: Any = dist.ProcessGroup
    for name in _REDUCE + _SCATTER:
        if hasattr(group, name):  # the names differ between versions of torch
            setattr(group, name, _as_on_cards(getattr(group, name), name in _SCATTER))


def _as_on_cards(reduce: Callable[..., Any], scatters: bool) -> Callable[..., Any]:
    @functools.wraps(reduce)
    def kernel(group: Any, *args: Any, **kwargs: Any) -> Any:
        options: Any = args[-1] if args else None
        outputs = tensors_of(args[0]) if args else []
        if not outputs or outputs[0].device.type != "npu" or not hasattr(options, "reduceOp"):
            return reduce(group, *args, **kwargs)
        operation = copy.copy(options.reduceOp)  # what it gives changes with it
        _refuse_bits(operation)
        if operation == _Operation.PREMUL_SUM:
            _multiply(tensors_of(args[1]) if scatters else outputs, operation)
        elif operation != _Operation.AVG or outputs[0].is_floating_point():
            return reduce(group, *args, **kwargs)
        options.reduceOp = _Operation.SUM
        try:
            work = reduce(group, *args, **kwargs)
        finally:
            options.reduceOp = operation
        if operation == _Operation.AVG:
            for output in outputs:
                output.div_(group.size(), rounding_mode="trunc")
        return work

    return kernel


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in a nest of lists."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for each in value for tensor in tensors_of(each)] if isinstance(value, (list, tuple)) else []


def _refuse_bits(operation: Any) -> None:
    for name in _NOT_SERVED:
        if operation == getattr(_Operation, name):
            raise RuntimeError(f"Cannot use ReduceOp.{name} with HCCL (emulated Ascend)")


def _multiply(tensors: list[torch.Tensor], operation: Any) -> None:
    if not tensors[0].is_floating_point():
        raise RuntimeError("PreMulSum Data type must be half, float, bfloat16 or double (emulated Ascend)")
    with torch.no_grad():
        for tensor in tensors:
            tensor.mul_(operation.factor)
