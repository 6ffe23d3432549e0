"""``apex.normalization``: layer norm and RMS norm, as modules and as functions, on torch's own kernels.

The results have the dtype of the input; those of the ``Mixed`` modules and of the ``mixed_dtype`` functions that of the
weight. Where the dtypes of input and weight differ, the arithmetic is in the wider one. ``memory_efficient`` is
accepted; torch saves what it needs for the backward.
"""

from __future__ import annotations

from xamp.registry.registry import require_torch

require_torch(__name__)

import numbers
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

__all__ = [
    "FusedLayerNorm",
    "FusedRMSNorm",
    "MixedFusedLayerNorm",
    "MixedFusedRMSNorm",
    "fused_layer_norm",
    "fused_layer_norm_affine",
    "fused_rms_norm",
    "fused_rms_norm_affine",
    "manual_rms_norm",
    "mixed_dtype_fused_layer_norm_affine",
    "mixed_dtype_fused_rms_norm_affine",
]


def fused_layer_norm_affine(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    normalized_shape: Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """Return the layer norm of ``input`` over its last dimensions ``normalized_shape``, in the dtype of ``input``."""
    return _layer_norm(input, weight, bias, normalized_shape, eps, input.dtype)


def fused_layer_norm(
    input: torch.Tensor, normalized_shape: Sequence[int], eps: float = 1e-6, memory_efficient: bool = False
) -> torch.Tensor:
    """Return the layer norm of ``input`` without weights."""
    return F.layer_norm(input, list(normalized_shape), None, None, eps)


def mixed_dtype_fused_layer_norm_affine(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    normalized_shape: Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """Return the layer norm of ``input`` in the dtype of ``weight``."""
    return _layer_norm(input, weight, bias, normalized_shape, eps, weight.dtype)


def fused_rms_norm_affine(
    input: torch.Tensor,
    weight: torch.Tensor,
    normalized_shape: Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """Return the RMS norm of ``input`` over its last dimensions ``normalized_shape``, in the dtype of ``input``."""
    return _rms_norm(input, weight, normalized_shape, eps, input.dtype)


def fused_rms_norm(
    input: torch.Tensor, normalized_shape: Sequence[int], eps: float = 1e-6, memory_efficient: bool = False
) -> torch.Tensor:
    """Return the RMS norm of ``input`` without weights."""
    return F.rms_norm(input, list(normalized_shape), None, eps)


def mixed_dtype_fused_rms_norm_affine(
    input: torch.Tensor,
    weight: torch.Tensor,
    normalized_shape: Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """Return the RMS norm of ``input`` in the dtype of ``weight``."""
    return _rms_norm(input, weight, normalized_shape, eps, weight.dtype)


def manual_rms_norm(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Return the RMS norm in single operations: the mean square in fp32, the result in the weight's dtype if 16-bit."""
    dims = tuple(range(-len(normalized_shape), 0))
    root = torch.rsqrt(input.float().square().mean(dims, keepdim=True) + eps)
    normed = input * root
    if weight is None:
        return normed
    return weight * (normed.to(weight.dtype) if weight.dtype in (torch.float16, torch.bfloat16) else normed)


def _layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    shape: Sequence[int],
    eps: float,
    result: torch.dtype,
) -> torch.Tensor:
    if weight is None or weight.dtype == x.dtype:
        return F.layer_norm(x, list(shape), weight, bias, eps)
    wide = torch.promote_types(x.dtype, weight.dtype)
    normed = F.layer_norm(x.to(wide), list(shape), weight.to(wide), None if bias is None else bias.to(wide), eps)
    return normed.to(result)


def _rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, shape: Sequence[int], eps: float, result: torch.dtype
) -> torch.Tensor:
    if weight is None or weight.dtype == x.dtype:
        return F.rms_norm(x, list(shape), weight, eps)
    wide = torch.promote_types(x.dtype, weight.dtype)
    return F.rms_norm(x.to(wide), list(shape), weight.to(wide), eps).to(result)


class FusedLayerNorm(nn.LayerNorm):
    """``torch.nn.LayerNorm`` with Apex's arguments. The result has the dtype of the input."""

    def __init__(
        self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True, memory_efficient: bool = False
    ) -> None:
        super().__init__(_as_shape(normalized_shape), eps=eps, elementwise_affine=elementwise_affine)
        self.memory_efficient = memory_efficient

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the layer norm of ``input``."""
        return _layer_norm(input, self.weight, self.bias, self.normalized_shape, self.eps, input.dtype)


class FusedRMSNorm(nn.RMSNorm):
    """``torch.nn.RMSNorm`` with Apex's arguments. The result has the dtype of the input."""

    eps: float

    def __init__(
        self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True, memory_efficient: bool = False
    ) -> None:
        super().__init__(_as_shape(normalized_shape), eps=eps, elementwise_affine=elementwise_affine)
        self.memory_efficient = memory_efficient

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the RMS norm of ``x``."""
        return _rms_norm(x, self.weight, self.normalized_shape, self.eps, x.dtype)


class MixedFusedLayerNorm(FusedLayerNorm):
    """:class:`FusedLayerNorm` whose result has the dtype of the weight. It always has weights."""

    def __init__(
        self, normalized_shape: Any, eps: float = 1e-5, *, memory_efficient: bool = False, **kwargs: Any
    ) -> None:
        _take_affine(type(self).__name__, kwargs)
        super().__init__(normalized_shape, eps, True, memory_efficient)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the layer norm of ``input``."""
        return _layer_norm(input, self.weight, self.bias, self.normalized_shape, self.eps, self.weight.dtype)


class MixedFusedRMSNorm(FusedRMSNorm):
    """:class:`FusedRMSNorm` whose result has the dtype of the weight. It always has weights."""

    def __init__(
        self, normalized_shape: Any, eps: float = 1e-5, *, memory_efficient: bool = False, **kwargs: Any
    ) -> None:
        _take_affine(type(self).__name__, kwargs)
        super().__init__(normalized_shape, eps, True, memory_efficient)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the RMS norm of ``x``."""
        return _rms_norm(x, self.weight, self.normalized_shape, self.eps, self.weight.dtype)


def _as_shape(shape: Any) -> list[int]:
    return [int(shape)] if isinstance(shape, numbers.Integral) else list(shape)


def _take_affine(name: str, kwargs: dict[str, Any]) -> None:
    if "elementwise_affine" in kwargs:
        warnings.warn(f"{name} does not support `elementwise_affine` argument", stacklevel=3)
        if not kwargs.pop("elementwise_affine"):
            raise RuntimeError(f"{name} does not support `elementwise_affine = False`")
    if kwargs:
        raise TypeError(f"{name}: unknown arguments {', '.join(kwargs)}")
