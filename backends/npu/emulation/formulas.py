"""Ascend's small operators that training scripts call by name, by their formulas, in float32 and rounded once.

Labels and their loss (``npu_one_hot``, ``npu_softmax_cross_entropy_with_logits``), activations (``npu_silu``,
``npu_mish``, ``npu_swiglu``, ``npu_gelu``, ``npu_fast_gelu``), rotary embeddings, products and transposes. The formulas
are those of Ascend's documentation of torch_npu; shapes and dtypes are those that op-plugin allocates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from xamp.backends.npu.emulation.crossing import computed

__all__ = ["KERNELS"]

Tensor = torch.Tensor
_OfOne = Callable[[Tensor], Tensor]


# ---- labels


def _one_hot(labels: Tensor, axis: int = -1, depth: int = 1, on_value: float = 1, off_value: float = 0) -> Tensor:
    """The second argument is called ``num_classes``, and is the axis; ``depth`` is the number of classes."""
    places = torch.arange(depth).reshape(-1, *[1] * (labels.dim() - (axis % (labels.dim() + 1))))
    hit = labels.unsqueeze(axis) == places
    return torch.where(hit, torch.tensor(float(on_value)), torch.tensor(float(off_value)))


def _softmax_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return -(labels.float() * logits.float().log_softmax(-1)).sum(-1).to(logits.dtype)


def _softmax_loss_backward(grad: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
    """The kernel takes the labels of a row to add up to 1."""
    return (grad.float().unsqueeze(-1) * (logits.float().softmax(-1) - labels.float())).to(logits.dtype)


# ---- activations


def _of_one(function: _OfOne, slope: _OfOne) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The forward of a function of each element, and its backward, which gets the gradient and the input first."""

    def forward(tensor: Tensor) -> Tensor:
        return function(tensor.float()).to(tensor.dtype)

    def backward(grad: Tensor, tensor: Tensor, *_: Any) -> Tensor:
        return (grad.float() * slope(tensor.float())).to(tensor.dtype)

    return forward, backward


def _silu_slope(x: Tensor) -> Tensor:
    return x.sigmoid() * (1 + x * (1 - x.sigmoid()))


def _mish_slope(x: Tensor) -> Tensor:
    tanh = functional.softplus(x).tanh()
    return tanh + x * (1 - tanh.square()) * x.sigmoid()


def _fast_gelu(x: Tensor) -> Tensor:
    return x * (0.851 * (x - x.abs())).exp() / (1 + (-1.702 * x.abs()).exp())


def _fast_gelu_slope(x: Tensor) -> Tensor:
    gate = (1.702 * x).sigmoid()
    return gate * (1 + 1.702 * x * (1 - gate))


def _swiglu(tensor: Tensor, dim: int = -1) -> Tensor:
    gate, value = tensor.float().chunk(2, dim)
    return (functional.silu(gate) * value).to(tensor.dtype)


def _swiglu_backward(grad: Tensor, tensor: Tensor, dim: int = -1) -> Tensor:
    gate, value = tensor.float().chunk(2, dim)
    wide, open_ = grad.float(), gate.sigmoid()
    of_gate = wide * value * open_ * (1 + gate * (1 - open_))
    return torch.cat([of_gate, wide * gate * open_], dim).to(tensor.dtype)


def _gelu(tensor: Tensor, *, approximate: str = "none") -> Tensor:
    return functional.gelu(tensor.float(), approximate=approximate).to(tensor.dtype)


def _gelu_backward(grad: Tensor, tensor: Tensor, *, approximate: str = "none") -> Tensor:
    made: Tensor = torch.ops.aten.gelu_backward(grad.float(), tensor.float(), approximate=approximate)
    return made.to(tensor.dtype)


# ---- rotary embeddings


def _turned(tensor: Tensor, mode: str) -> Tensor:
    """The vector that a rotation by a quarter makes: of the two halves, or of neighbours."""
    if mode == "half":
        first, second = tensor.chunk(2, -1)
        return torch.cat([-second, first], -1)
    return torch.stack([-tensor[..., 1::2], tensor[..., ::2]], -1).flatten(-2)


def _rotary(
    tensor: Tensor, cos: Tensor, sin: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    if rotate is not None:
        raise NotImplementedError("npu::npu_rotary_mul with rotate= is not served on an emulated Ascend card")
    wide = tensor.float()
    return (wide * cos.float() + _turned(wide, rotary_mode) * sin.float()).to(tensor.dtype)


def _rotary_backward(
    grad: Tensor, tensor: Tensor, cos: Tensor, sin: Tensor, rotary_mode: str = "half"
) -> tuple[Tensor, Tensor, Tensor]:
    wide, along = tensor.float(), grad.float()
    back = -_turned(along * sin.float(), rotary_mode)  # the inverse of a turn by a quarter
    of_cos = (along * wide).sum_to_size(cos.shape).to(cos.dtype)
    of_sin = (along * _turned(wide, rotary_mode)).sum_to_size(sin.shape).to(sin.dtype)
    return (along * cos.float() + back).to(tensor.dtype), of_cos, of_sin


# ---- products and transposes


def _linear(tensor: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return functional.linear(tensor, weight, bias)


def _linear_backward(grad: Tensor, tensor: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return grad @ weight, grad.flatten(0, -2).t() @ tensor.flatten(0, -2)


def _bmm(first: Tensor, second: Tensor, _: list[int]) -> Tensor:
    return first @ second


def _bmm_first_backward(grad: Tensor, first: Tensor, second: Tensor, _: list[int]) -> Tensor:
    return (grad @ second.transpose(-1, -2)).sum_to_size(first.shape)


def _bmm_second_backward(grad: Tensor, first: Tensor, second: Tensor, _: list[int]) -> Tensor:
    return (first.transpose(-1, -2) @ grad).sum_to_size(second.shape)


def _transpose(tensor: Tensor, perm: list[int], require_contiguous: bool = True) -> Tensor:  # noqa: ARG001
    return tensor.permute(perm).contiguous()


def _confusion_transpose(tensor: Tensor, perm: list[int], shape: list[int], transpose_first: bool) -> Tensor:
    if transpose_first:
        return tensor.permute(perm).reshape(shape).contiguous()
    return tensor.reshape(shape).permute(perm).contiguous()


def _confusion_transpose_backward(grad: Tensor, perm: list[int], shape: list[int], transpose_first: bool) -> Tensor:
    """``shape`` is the input's; autograd's formula negates ``transpose_first``."""
    inverse = torch.tensor(perm).argsort().tolist()
    if transpose_first:
        return grad.permute(inverse).reshape(shape).contiguous()
    return grad.reshape([shape[each] for each in perm]).permute(inverse).contiguous()


_mish, _mish_backward = _of_one(functional.mish, _mish_slope)
_silu, _silu_backward = _of_one(functional.silu, _silu_slope)
_fast, _fast_backward = _of_one(_fast_gelu, _fast_gelu_slope)

_COMPUTED: dict[str, Callable[..., Any]] = {
    "npu::npu_one_hot": _one_hot,
    "npu::npu_softmax_cross_entropy_with_logits": _softmax_loss,
    "npu::npu_softmax_cross_entropy_with_logits_backward": _softmax_loss_backward,
    "npu::npu_silu": _silu,
    "npu::npu_silu_backward": _silu_backward,
    "npu::npu_mish": _mish,
    "npu::npu_mish_backward": _mish_backward,
    "npu::fast_gelu": _fast,
    "npu::npu_fast_gelu": _fast,
    "npu::npu_fast_gelu_backward": _fast_backward,
    "npu::npu_gelu": _gelu,
    "npu::npu_gelu_backward": _gelu_backward,
    "npu::npu_swiglu": _swiglu,
    "npu::npu_swiglu_backward": _swiglu_backward,
    "npu::npu_rotary_mul": _rotary,
    "npu::npu_rotary_mul_backward": _rotary_backward,
    "npu::npu_linear": _linear,
    "npu::npu_linear_backward": _linear_backward,
    "npu::npu_bmmV2": _bmm,
    "npu::npu_bmm_v2_mat1_backward": _bmm_first_backward,
    "npu::npu_bmm_v2_mat2_backward": _bmm_second_backward,
    "npu::npu_transpose": _transpose,
    "npu::npu_confusion_transpose": _confusion_transpose,
    "npu::npu_confusion_transpose_backward": _confusion_transpose_backward,
}
KERNELS: dict[str, Callable[..., Any]] = {name: computed(name, function) for name, function in _COMPUTED.items()}
