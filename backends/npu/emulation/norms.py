"""Ascend's fused norms (``npu::npu_rms_norm`` and its like), computed by their formulas, in float32 and rounded once.

Shapes and dtypes of the results are those that op-plugin allocates for them.
"""

# ruff: noqa: ARG001 - the signatures are those of the operators

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from xamp.backends.npu.emulation.crossing import computed

__all__ = ["KERNELS"]

Tensor = torch.Tensor


def _last(tensor: Tensor, gamma: Tensor) -> list[int]:
    """The dimensions that are normalized: the last ones, as many as ``gamma`` has."""
    return list(range(tensor.dim() - gamma.dim(), tensor.dim()))


def _first(tensor: Tensor, gamma: Tensor) -> list[int]:
    return list(range(tensor.dim() - gamma.dim()))


def _total(tensor: Tensor, dims: list[int]) -> Tensor:
    return tensor.sum(dims) if dims else tensor.clone()  # sum([]) would add up everything


# ---- by the root of the mean of squares


def _rms_norm(tensor: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    wide = tensor.float()
    rstd = (wide.square().mean(_last(tensor, gamma), keepdim=True) + epsilon).rsqrt()
    return (wide * rstd * gamma.float()).to(tensor.dtype), rstd


def _gemma_rms_norm(tensor: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    return _rms_norm(tensor, gamma.float() + 1, epsilon)


def _add_rms_norm(first: Tensor, second: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, ...]:
    total = first.float() + second.float()
    normed, rstd = _rms_norm(total, gamma, epsilon)
    return normed.to(first.dtype), rstd, total.to(first.dtype)


def _rms_norm_backward(grad: Tensor, tensor: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    wide, along = tensor.float() * rstd, grad.float() * gamma.float()
    mean = (along * wide).mean(_last(tensor, gamma), keepdim=True)
    of_gamma = _total(grad.float() * wide, _first(tensor, gamma))
    return ((along - wide * mean) * rstd).to(tensor.dtype), of_gamma


# ---- by mean and variance


def _normed(wide: Tensor, gamma: Tensor, beta: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    variance, mean = torch.var_mean(wide, _last(wide, gamma), correction=0, keepdim=True)
    rstd = (variance + epsilon).rsqrt()
    return (wide - mean) * rstd * gamma.float() + beta.float(), mean, rstd


def _normed_backward(grad: Tensor, wide: Tensor, gamma: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, ...]:
    """Gradients of the input, of ``gamma`` and of ``beta``, in float32."""
    dims, around = _last(wide, gamma), _first(wide, gamma)
    centred, along = (wide - mean) * rstd, grad.float() * gamma.float()
    slope = (along * centred).mean(dims, keepdim=True)
    of_input = (along - along.mean(dims, keepdim=True) - centred * slope) * rstd
    return of_input, _total(grad.float() * centred, around), _total(grad.float(), around)


def _layer_norm_eval(
    tensor: Tensor, shape: list[int], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    made: Tensor = torch.ops.aten.native_layer_norm(tensor, shape, weight, bias, eps)[0]
    return made


def _add_layer_norm(
    first: Tensor, second: Tensor, gamma: Tensor, beta: Tensor, epsilon: float = 1e-5, additional_output: bool = False
) -> tuple[Tensor, ...]:
    dtype = first.dtype if first.dtype is second.dtype else torch.float32
    total = first.float() + second.float()
    normed, mean, rstd = _normed(total, gamma, beta, epsilon)
    return normed.to(dtype), mean, rstd, total.to(dtype)


def _add_layer_norm_backward(
    grad: Tensor | None,
    first: Tensor,
    second: Tensor,
    rstd: Tensor,
    mean: Tensor,
    gamma: Tensor,
    of_sum: Tensor | None = None,
) -> tuple[Tensor, ...]:
    grad = torch.zeros_like(first) if grad is None else grad
    made, of_gamma, of_beta = _normed_backward(grad, first.float() + second.float(), gamma, mean, rstd)
    made = (made if of_sum is None else made + of_sum.float()).to(first.dtype)
    return made, made.clone(), of_gamma, of_beta


def _deep_norm(
    tensor: Tensor, residual: Tensor, beta: Tensor, gamma: Tensor, alpha: float = 0.3, epsilon: float = 1e-6
) -> tuple[Tensor, ...]:
    normed, mean, rstd = _normed(alpha * tensor.float() + residual.float(), gamma, beta, epsilon)
    return mean, rstd, normed.to(tensor.dtype)


def _deep_norm_backward(
    grad: Tensor, tensor: Tensor, residual: Tensor, gamma: Tensor, mean: Tensor, rstd: Tensor, alpha: float = 0.3
) -> tuple[Tensor, ...]:
    total = alpha * tensor.float() + residual.float()
    made, of_gamma, of_beta = _normed_backward(grad, total, gamma, mean, rstd)
    return (made * alpha).to(tensor.dtype), made.to(residual.dtype), of_beta, of_gamma


# ---- by groups of channels


def _grouped(tensor: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The normalized input, in float32, and mean and rstd by sample and group."""
    parts = tensor.float().reshape(tensor.size(0), groups, -1)
    variance, mean = torch.var_mean(parts, 2, correction=0, keepdim=True)
    rstd = (variance + eps).rsqrt()
    return ((parts - mean) * rstd).reshape(tensor.size()), mean[..., 0], rstd[..., 0]


def _per_channel(values: Tensor, tensor: Tensor) -> Tensor:
    return values.float().view(1, -1, *([1] * (tensor.dim() - 2)))


def _affine(normed: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    made = normed if weight is None else normed * _per_channel(weight, normed)
    return made if bias is None else made + _per_channel(bias, normed)


def _group_norm_silu(
    tensor: Tensor, weight: Tensor | None, bias: Tensor | None, group: int, eps: float = 1e-5
) -> tuple[Tensor, ...]:
    dtype = tensor.dtype if weight is None else weight.dtype
    normed, mean, rstd = _grouped(tensor, group, eps)
    made = torch.ops.aten.silu(_affine(normed, weight, bias))
    return made.to(tensor.dtype), mean.to(dtype), rstd.to(dtype)


def _group_norm_swish(
    tensor: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float | None = 1e-5, swish_scale: float | None = 1.0
) -> tuple[Tensor, ...]:
    normed, mean, rstd = _grouped(tensor, groups, 1e-5 if eps is None else eps)
    made = _affine(normed, weight, bias)
    made = made * (made * (1.0 if swish_scale is None else swish_scale)).sigmoid()
    return made.to(tensor.dtype), mean.to(weight.dtype), rstd.to(weight.dtype)


def _group_norm_swish_backward(
    grad: Tensor,
    tensor: Tensor,
    groups: int,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    rstd: Tensor,
    mask: list[bool],
    swish_scale: float | None = 1.0,
) -> tuple[Tensor | None, ...]:
    scale = 1.0 if swish_scale is None else swish_scale
    parts = tensor.float().reshape(tensor.size(0), groups, -1)
    wide_rstd = rstd.float().unsqueeze(2)
    normed = ((parts - mean.float().unsqueeze(2)) * wide_rstd).reshape(tensor.size())
    made = _affine(normed, weight, bias)
    gate = (made * scale).sigmoid()
    inner = grad.float() * (gate + made * scale * gate * (1 - gate))
    others = [dim for dim in range(tensor.dim()) if dim != 1]
    along = (inner * _per_channel(weight, tensor)).reshape(parts.size())
    flat = normed.reshape(parts.size())
    of_input = (along - along.mean(2, keepdim=True) - flat * (along * flat).mean(2, keepdim=True)) * wide_rstd
    return (
        of_input.reshape(tensor.size()).to(tensor.dtype),
        (inner * normed).sum(others).to(weight.dtype) if mask[1] else None,
        inner.sum(others).to(bias.dtype) if mask[2] else None,
    )


_COMPUTED: dict[str, Callable[..., Any]] = {
    "npu::npu_rms_norm": _rms_norm,
    "npu::npu_rms_norm_backward": _rms_norm_backward,
    "npu::npu_gemma_rms_norm": _gemma_rms_norm,
    "npu::npu_add_rms_norm": _add_rms_norm,
    "npu::npu_layer_norm_eval": _layer_norm_eval,
    "npu::npu_add_layer_norm": _add_layer_norm,
    "npu::npu_add_layer_norm_backward": _add_layer_norm_backward,
    "npu::npu_deep_norm": _deep_norm,
    "npu::npu_deep_norm_backward": _deep_norm_backward,
    "npu::npu_group_norm_silu": _group_norm_silu,
    "npu::npu_group_norm_swish": _group_norm_swish,
    "npu::npu_group_norm_swish_grad": _group_norm_swish_backward,
}
KERNELS: dict[str, Callable[..., Any]] = {name: computed(name, function) for name, function in _COMPUTED.items()}
