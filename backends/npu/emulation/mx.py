"""Matrices in microscaled fp8, which chips of the series Ascend 950 quantise and multiply.

By the documentation of ``npu_dynamic_mx_quant_with_dual_axis`` (formula, dtypes, order of the scales) and of
``npu_quant_matmul``; shapes and dtypes are checked by torch_npu's own meta functions too. Served are float8_e4m3fn and
float8_e5m2 in blocks of 32 with ``scale_alg=0``, the OCP's rule; what is not is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from xamp.backends.npu.emulation import arithmetic
from xamp.backends.npu.emulation.crossing import computed

__all__ = ["KERNELS"]

Tensor = torch.Tensor
_QUANT, _PRODUCT = "npu::npu_dynamic_mx_quant", "npu::npu_quant_matmul"
_BOTH = "npu::npu_dynamic_mx_quant_with_dual_axis"
_BLOCK, _BIAS, _NAN = 32, 127, 255
_FORMATS = {24: torch.float8_e4m3fn, 292: torch.float8_e4m3fn, 23: torch.float8_e5m2, 291: torch.float8_e5m2}
"""By the numbers of torch, and of torch_npu above those."""
_TOP = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}  # the documentation's emax
_E8M0 = 293
_RESULTS = {5: torch.float16, 6: torch.float32, 15: torch.bfloat16}
_LONGEST = 65535


def _wrong(name: str, what: str) -> RuntimeError:
    text = f"{name}: error code is 161002, AclNN_Parameter_Error(EZ1001): {what}"
    return RuntimeError(f"{text} (emulated {arithmetic.CHIP.name})")


def _check_chip(name: str) -> None:
    if not arithmetic.CHIP.mx:
        raise RuntimeError(f"{name}: {arithmetic.CHIP.name} has no such kernel, Ascend 950 has (emulated Ascend)")


def _on_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
    return value


def _checked(name: str, operator: Callable[[], Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel before which torch_npu's meta function of the operator has seen the arguments."""
    kernel = computed(name, function)

    def checking(*args: Any, **kwargs: Any) -> Any:
        _check_chip(name)
        operator()(*map(_on_meta, args), **{key: _on_meta(value) for key, value in kwargs.items()})
        return kernel(*args, **kwargs)

    return checking


def _quantised(input: Tensor, *, axis: int = -1, dst_type: int = 296, **options: Any) -> tuple[Tensor, Tensor]:
    """The values, and for each block two of whose scales lie in a last dimension a scale of format e8m0, in uint8."""
    dtype = _FORMATS.get(dst_type)
    if dtype is None or options.get("block_size", _BLOCK) != _BLOCK or options.get("scale_alg", 0):
        raise NotImplementedError(f"{_QUANT} with another format, block_size or scale_alg is not served on such a card")
    if options.get("round_mode", "rint") != "rint":
        raise _wrong(_QUANT, "round_mode must be rint for float8")
    if input.dtype not in (torch.float16, torch.bfloat16):
        raise _wrong(_QUANT, f"input not implemented for {input.dtype}, should be [DT_FLOAT16,DT_BFLOAT16]")
    if not input.numel():
        raise _wrong(_QUANT, "input is empty")
    along = input.double().movedim(axis, -1)
    length = along.size(-1)
    blocks = torch.nn.functional.pad(along, (0, -length % _BLOCK)).unflatten(-1, (-1, _BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True)
    shared = torch.frexp(largest).exponent.double() - 1 - _TOP[dtype]  # frexp's mantissa is below 1
    shared = torch.where(largest == 0, -_BIAS, shared).clamp(-_BIAS, _BIAS)
    most = torch.finfo(dtype).max
    finite = largest.isfinite()
    values = torch.where(finite, (blocks / 2.0**shared).clamp(-most, most), math.nan)
    scale = torch.where(finite, shared + _BIAS, _NAN).to(torch.uint8).squeeze(-1)
    pairs = torch.nn.functional.pad(scale, (0, scale.size(-1) % 2)).unflatten(-1, (-1, 2))
    made = values.flatten(-2)[..., :length].float().to(dtype).movedim(-1, axis).contiguous()
    place = axis if axis < 0 else axis - input.dim()
    return made, pairs.movedim(-2, place - 1).contiguous()


def _quantised_both(input: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """What :func:`_quantised` returns for the last dimension, and then for the one before it."""
    if input.dim() < 2:
        raise _wrong(_BOTH, "input must have at least 2 dimensions")
    return (*_quantised(input, axis=-1, **options), *_quantised(input, axis=-2, **options))


def _product(x1: Tensor, x2: Tensor, scale: Tensor, **options: Any) -> Tensor:
    """The product of two matrices with scales, (M, K) by (K, N): x1's (M, K / 64, 2), x2's (K / 64, N, 2)."""
    other = options.get("pertoken_scale")
    if {options.get("scale_dtype"), options.get("pertoken_scale_dtype")} != {_E8M0} or other is None:
        raise NotImplementedError(f"{_PRODUCT} with other scales than e8m0 is not served on an emulated Ascend card")
    if any(options.get(name) is not None for name in ("offset", "bias", "y_scale", "x1_dtype", "x2_dtype")):
        raise NotImplementedError(f"{_PRODUCT} with offset, bias, y_scale or dtypes is not served on such a card")
    if list(options.get("group_sizes") or ()) != [1, 1, _BLOCK]:
        raise _wrong(_PRODUCT, f"group_sizes must be [1, 1, {_BLOCK}]")
    result = _RESULTS.get(options.get("output_dtype") or 0)
    if result is None:
        raise _wrong(_PRODUCT, "output_dtype must be float16, bfloat16 or float32")
    if x1.dim() != 2 or x2.dim() != 2 or not x1.numel() or not x2.numel():
        raise _wrong(_PRODUCT, "x1 and x2 must be matrices, and not empty")
    if max(x1.size(1), x2.size(1)) > _LONGEST:
        raise _wrong(_PRODUCT, f"the last dimension of x1 and x2 must be at most {_LONGEST}")
    (rows, length), columns = x1.shape, x2.size(1)
    pairs = -(-length // (2 * _BLOCK))
    if other.shape != (rows, pairs, 2) or scale.shape != (pairs, columns, 2):
        raise _wrong(_PRODUCT, f"the scales must be ({rows}, {pairs}, 2) and ({pairs}, {columns}, 2)")
    left = x1.double() * _wide(other.flatten(1), length)
    right = x2.t().double() * _wide(scale.transpose(0, 1).flatten(1), length)
    return (left @ right.t()).float().to(result)


def _wide(scale: Tensor, length: int) -> Tensor:
    found = torch.where(scale == _NAN, math.nan, 2.0 ** (scale.double() - _BIAS))
    return found.repeat_interleave(_BLOCK, 1)[:, :length]


KERNELS: dict[str, Callable[..., Any]] = {
    _QUANT: _checked(_QUANT, lambda: torch.ops.npu.npu_dynamic_mx_quant.default, _quantised),
    _BOTH: _checked(_BOTH, lambda: torch.ops.npu.npu_dynamic_mx_quant_with_dual_axis.default, _quantised_both),
    _PRODUCT: _checked(_PRODUCT, lambda: torch.ops.npu.npu_quant_matmul.default, _product),
}
