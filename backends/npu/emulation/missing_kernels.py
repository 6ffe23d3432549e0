"""Kernels that CPUs lack: batch norm over several cards (``SyncBatchNorm``), and products with another result dtype."""

# ruff: noqa: ARG001 - the signatures are those of the operators

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from xamp.backends.npu.emulation.crossing import computed

__all__ = ["KERNELS"]


def _others(tensor: torch.Tensor) -> list[int]:
    return [dim for dim in range(tensor.dim()) if dim != 1]


def _per_channel(values: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return values.view(1, -1, *([1] * (tensor.dim() - 2)))


def _stats(tensor: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    variance, mean = torch.var_mean(tensor.float(), _others(tensor), correction=0)
    return mean, (variance + eps).rsqrt()


def _gather_stats(
    tensor: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    momentum: float,
    eps: float,
    counts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    weight = counts.view(-1, 1).double()
    total = weight.sum()
    means = mean.double()
    whole = (means * weight).sum(0) / total
    squares = (invstd.double().square().reciprocal() - eps + (means - whole).square()) * weight
    variance = squares.sum(0) / total
    if running_mean is not None:
        running_mean.lerp_(whole.to(running_mean.dtype), momentum)
    if running_var is not None:
        running_var.lerp_((variance * total / (total - 1)).to(running_var.dtype), momentum)
    return whole.to(mean.dtype), (variance + eps).rsqrt().to(mean.dtype)


def _apply(
    tensor: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    result = (tensor - _per_channel(mean, tensor)) * _per_channel(invstd, tensor)
    if weight is not None:
        result = result * _per_channel(weight, tensor)
    if bias is not None:
        result = result + _per_channel(bias, tensor)
    return result.to(tensor.dtype)


def _backward_sums(
    grad: torch.Tensor,
    tensor: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    weight: torch.Tensor | None,
    of_input: bool,
    of_weight: bool,
    of_bias: bool,
) -> tuple[torch.Tensor | None, ...]:
    dtype = weight.dtype if weight is not None else mean.dtype
    total = grad.float().sum(_others(grad))
    along = (grad.float() * (tensor - _per_channel(mean, tensor))).sum(_others(grad))
    return (
        total if of_input else None,
        along if of_input else None,
        (along * invstd).to(dtype) if of_weight else None,
        total.to(dtype) if of_bias else None,
    )


def _backward(
    grad: torch.Tensor,
    tensor: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    weight: torch.Tensor | None,
    total: torch.Tensor,
    along: torch.Tensor,
    counts: torch.Tensor,
) -> torch.Tensor:
    count = counts.sum()
    centred = tensor - _per_channel(mean, tensor)
    slope = _per_channel(invstd.square() * along / count, tensor)
    factor = invstd if weight is None else invstd * weight
    result = (grad - _per_channel(total / count, tensor) - centred * slope) * _per_channel(factor, tensor)
    return result.to(tensor.dtype)


def _product(name: str) -> Callable[..., Any]:
    plain = getattr(torch, name)

    def product(*args: Any, **kwargs: Any) -> Any:
        *tensors, dtype = args
        return plain(*(tensor.to(dtype) for tensor in tensors), **kwargs)

    return product


_COMPUTED: dict[str, Callable[..., Any]] = {
    "aten::batch_norm_stats": _stats,
    "aten::batch_norm_gather_stats_with_counts": _gather_stats,
    "aten::batch_norm_elemt": _apply,
    "aten::batch_norm_backward_reduce": _backward_sums,
    "aten::batch_norm_backward_elemt": _backward,
    **{f"aten::{name}.dtype": _product(name) for name in ("mm", "bmm", "addmm", "baddbmm")},
}
KERNELS = {name: computed(name, function) for name, function in _COMPUTED.items()}
