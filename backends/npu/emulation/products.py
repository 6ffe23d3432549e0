"""In which digits a card computes float32 products and convolutions: those of float16 or HF32, where a setting says so.

A card's cube unit multiplies in float16. Chips before Atlas A2 give it float32 operands that are cast to float16,
unless ``ACL_PRECISION_MODE`` says otherwise. Later chips round the operands of convolutions to HF32, and those of
matrix products too if they are told to. Sums are float32 in both cases. This is read where torch_npu reads it:
``CalcuOpUtil::GetCubeMathType`` of torch_npu, and ``get_cube_math_type_with_passthrough`` of op-plugin.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from xamp.backends.npu.emulation import arithmetic

__all__ = ["PRODUCTS", "narrowing"]

_CONV, _MATMUL = "conv", "matmul"
_MATRICES = (0, 1)
_ADDED = (1, 2)
PRODUCTS: dict[str, tuple[str, tuple[int, ...]]] = {
    **dict.fromkeys(("aten::mm", "aten::bmm", "aten::mv"), (_MATMUL, _MATRICES)),
    **dict.fromkeys(("aten::addmm", "aten::baddbmm", "aten::addbmm", "aten::addmv"), (_MATMUL, _ADDED)),
    "aten::_addmm_activation": (_MATMUL, _ADDED),
    **dict.fromkeys(("aten::convolution", "aten::convolution_overrideable"), (_CONV, _MATRICES)),
    **dict.fromkeys(("aten::convolution_backward", "aten::convolution_backward_overrideable"), (_CONV, (0, 1, 2))),
    **dict.fromkeys(("aten::_convolution", "aten::_slow_conv2d_forward"), (_CONV, _MATRICES)),
    "aten::_slow_conv2d_backward": (_CONV, (0, 1, 2)),
}
"""By operator, without its overload: the setting that it obeys, and which arguments are operands of its product.

The operators are those whose kernels in op-plugin pass a ``cubeMathType``. Others, such as ``dot``, keep float32.
"""

# cubeMathType, as CANN numbers it.
_KEEP, _ALLOW, _FP16, _HF32 = range(4)
_OLD = not arithmetic.CHIP.number >= arithmetic.FIRST_A2
_HF32_DROPPED = 12  # bits of float32's mantissa that HF32 lacks
Narrow = Callable[[list[Any], int], list[Any]]


def narrowing(name: str) -> Narrow | None:
    """A function that rounds the operands of operator ``name`` as the card does; None if it is no such product.

    It takes the operator's arguments, on the CPU, and the index of the card.
    """
    row = PRODUCTS.get(name.partition(".")[0])
    if row is None or name.endswith((".dtype", ".dtype_out")):
        return None
    kind, operands = row

    def narrow(values: list[Any], index: int) -> list[Any]:
        places = [place for place in operands if place < len(values) and _is_float32(values[place])]
        rounded = _rounding(kind) if places else None  # the settings are asked only where they matter
        if rounded is None:
            return values
        return [rounded(value, index) if place in places else value for place, value in enumerate(values)]

    return narrow


def _is_float32(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is torch.float32


def _rounding(kind: str) -> Callable[[torch.Tensor, int], torch.Tensor] | None:
    """What becomes of an operand now; None if it keeps its digits."""
    said = _cube_math_type(kind)
    if said == _FP16 or (said == _ALLOW and _OLD):
        return _in_float16
    return _in_hf32 if said in (_ALLOW, _HF32) and not _OLD else None  # old chips have no HF32


def _cube_math_type(kind: str) -> int:
    option = sys.modules["torch_npu"]._C._npu_getOption
    if kind == _MATMUL and (told := option("CUBE_MATH_TYPE")):
        return int(told)
    mode = option("ACL_PRECISION_MODE")
    to_fp16 = mode == b"allow_fp32_to_fp16" or (_OLD and mode != b"must_keep_origin_dtype")
    to_hf32 = option("ALLOW_CONV_HF32") != b"disable" if kind == _CONV else option("ALLOW_MATMUL_HF32") == b"enable"
    if to_fp16:
        return _ALLOW if to_hf32 else _FP16
    return _HF32 if to_hf32 else _KEEP


def _in_float16(operand: torch.Tensor, index: int) -> torch.Tensor:
    half = operand.half()
    arithmetic.settle(half, index, arithmetic.Sources(operand))
    return half.float()


def _in_hf32(operand: torch.Tensor, index: int) -> torch.Tensor:  # noqa: ARG001
    """``operand`` with 11 bits of mantissa, rounded to nearest and to even."""
    bits = operand.contiguous().view(torch.int32)
    odd = (bits >> _HF32_DROPPED) & 1
    kept = (bits + ((1 << (_HF32_DROPPED - 1)) - 1) + odd) & -(1 << _HF32_DROPPED)
    return torch.where(operand.isfinite(), kept.view(torch.float32), operand)
