"""Casts matrices to fp8 with scales, and multiplies what was cast. Loaded only where linear layers run in fp8.

:func:`quantise` makes a :class:`Scaled` of a matrix, :func:`multiply` the product of two. The maximum, its scale and
the product with the scale are computed in fp32 (the quotient in fp64), so that the compiler's code gives the bits of
eager code. Where torch has no product for a kind of scale on a device, the quantised values are multiplied in fp32,
which rounds as a device with such a product does, and takes longer than bf16.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from xamp.torch_compat.torch_private import fp8

__all__ = [
    "BLOCK",
    "FORMATS",
    "SMALLEST",
    "Scaled",
    "dtype_of",
    "multiply",
    "only_torchs",
    "quantise",
    "runs",
    "tiled",
    "tried",
]

BLOCK = 32
"""Values that share a scale of format e8m0."""

SMALLEST = 1e-12
"""No maximum is taken for less: the scale of zeros would be infinite."""

FORMATS = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
"""The formats of the OCP, by the short names that recipes have."""

_BIAS, _NAN, _MANTISSA = 127, 255, 23  # of e8m0; bits of fp32's mantissa
_TOP = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}  # the power of two of the largest number


def dtype_of(name: str) -> torch.dtype:
    """Return torch's dtype of that name."""
    found: torch.dtype = getattr(torch, name)
    return found


class Scaled(NamedTuple):
    """A matrix in fp8.

    Attributes:
        values: the fp8 values, a matrix; with ``"block"`` filled with zeros to whole blocks along ``axis``.
        scale: with ``"block"`` what the values are multiplied with, the bits of e8m0 in uint8, which every compiler
            knows; else what the matrix was multiplied with, in fp32.
        scaling: see :class:`xamp.values.recipes.Recipe`.
        axis: the dimension that a product sums over, 0 or 1; with one scale for all values it says nothing.
    """

    values: torch.Tensor
    scale: torch.Tensor
    scaling: str
    axis: int

    def turned(self) -> Scaled:
        """The transposed matrix. Nothing is cast: the product copies the values where it needs them in order."""
        return Scaled(self.values.t(), self.scale.t(), self.scaling, 1 - self.axis)

    def wide(self) -> torch.Tensor:
        """The values that the fp8 values stand for, in fp32."""
        values = self.values.to(torch.float32)
        if self.scaling != "block":
            return values / self.scale
        bits = self.scale.to(torch.int32)
        scale = torch.where(
            bits == 0, 2.0**-_BIAS, (bits << _MANTISSA).view(torch.float32)
        )  # that of 0 is no fp32 normal
        return values * scale.repeat_interleave(BLOCK, self.axis)


def quantise(matrix: torch.Tensor, dtype: torch.dtype, scaling: str, axis: int) -> Scaled:
    """Cast ``matrix`` to ``dtype`` with the scales that its values ask for.

    Args:
        matrix: a matrix with values, in fp32, bf16 or fp16.
        dtype: a dtype of fp8.
        scaling: see :class:`xamp.values.recipes.Recipe`.
        axis: the dimension that the product will sum over, 0 or 1.
    """
    if scaling == "block":
        return _in_blocks(matrix, dtype, axis)
    most = torch.finfo(dtype).max
    sizes = matrix.abs()
    largest = sizes.amax(dim=axis, keepdim=True) if scaling == "row" else sizes.amax()
    scale = (most / largest.to(torch.float64).clamp(min=SMALLEST)).to(torch.float32)
    if scaling != "tensor":
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    values = (matrix.to(torch.float32) * scale).clamp(-most, most).to(dtype)
    return Scaled(values, scale, scaling, axis)


def _in_blocks(matrix: torch.Tensor, dtype: torch.dtype, axis: int) -> Scaled:
    """Cast in blocks. The scale is the power of two of a block's largest value, by the largest of the format.

    So the OCP has it, rounding down. What then lies above the format's largest number is cast to that. A block with an
    inf or a nan becomes nan.
    """
    along = matrix if axis == 1 else matrix.t()
    rows, length = along.shape
    filled = along.to(torch.float32)
    if length % BLOCK:
        filled = torch.nn.functional.pad(filled, (0, -length % BLOCK))
    blocks = filled.reshape(rows, -1, BLOCK)
    largest, most = blocks.abs().amax(dim=-1, keepdim=True), torch.finfo(dtype).max
    exponent = ((largest.view(torch.int32) >> _MANTISSA) - _TOP[dtype]).clamp(min=0)  # of the scale, with e8m0's bias
    factor = ((2 * _BIAS - exponent) << _MANTISSA).view(torch.float32)  # 1 / scale: a power of two, and exact
    finite = largest.isfinite()
    values = torch.where(finite, (blocks * factor).clamp(-most, most), torch.nan).reshape(rows, -1)
    scale = torch.where(finite, exponent, _NAN).to(torch.uint8).squeeze(-1)
    made = Scaled(values.to(dtype), scale, "block", 1)
    return made if axis == 1 else made.turned()


def multiply(left: Scaled, right: Scaled, dtype: torch.dtype, fast: bool) -> torch.Tensor:
    """Return the product of two matrices, added up in fp32 and rounded to ``dtype``.

    Args:
        left: summed over its dimension 1.
        right: summed over its dimension 0.
        dtype: that of the result.
        fast: the device may add up with fewer digits, as some do a third faster.
    """
    if left.scaling == "block":
        if not _found("block", left):
            return torch.mm(left.wide(), right.wide()).to(dtype)
        one, other = (tiled(each).view(torch.float8_e8m0fnu) for each in (left.scale, right.scale.t()))
        return _torchs(left, right, one, other, dtype, fast)
    by_row = "row" in (left.scaling, right.scaling)
    in_kernel = not by_row or fast
    inverse = left.scale.reciprocal(), right.scale.reciprocal()
    if not _found("row" if by_row and in_kernel else "tensor", left):
        return (torch.mm(left.values.float(), right.values.float()) * (inverse[0] * inverse[1])).to(dtype)
    if in_kernel:
        return _torchs(left, right, *inverse, dtype, fast)
    # Where sums are exact, the kernel with a scale for each row is slow on the cards that have it.
    unit = torch.ones_like(left.scale[0, 0])
    return _torchs(left, right, unit, unit, dtype, fast).mul_(inverse[0] * inverse[1])


def _torchs(left: Scaled, right: Scaled, one: Any, other: Any, dtype: torch.dtype, fast: bool) -> torch.Tensor:
    """Call torch's product, which wants the left operand in rows, the right in columns, and even dimensions."""
    step = BLOCK if left.scaling == "block" else 1 if runs(left.values.device.type, "uneven") else _STEP
    missing = -left.values.shape[1] % step
    return fp8.scaled_mm(
        _filled(left.values, missing).contiguous(),
        _filled(right.values.t(), missing).contiguous().t(),
        scale_a=one,
        scale_b=other,
        out_dtype=dtype,
        use_fast_accum=fast,
    )


def _filled(values: torch.Tensor, missing: int) -> torch.Tensor:
    """Append columns of zeros."""
    if not missing:
        return values
    return torch.nn.functional.pad(values.view(torch.uint8), (0, missing)).view(values.dtype)


def tiled(scale: torch.Tensor) -> torch.Tensor:
    """Return scales (rows, blocks) in the order of the cards that have such a product: tiles of 128 by 4.

    In a tile the scale of row r and block c stands at 16 * (r % 32) + 4 * (r // 32) + c.
    """
    rows, blocks = scale.shape
    whole = torch.nn.functional.pad(scale, (0, -blocks % 4, 0, -rows % 128))
    tiles = whole.reshape(-(-rows // 128), 4, 32, -(-blocks // 4), 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


# --- where torch has a product

_runs: dict[tuple[str, str], bool] = {}
_strict = threading.local()


def runs(device_type: str, scaling: str) -> bool:
    """Whether torch was found to multiply such matrices on such a device.

    Args:
        device_type: the device.
        scaling: ``"tensor"``, ``"row"``, ``"block"``; ``"uneven"``: sums over lengths that are no multiples of 16.
    """
    return _runs.get((device_type, scaling), False)


def _found(scaling: str, operand: Scaled) -> bool:
    """Whether torch multiplies so on the device of ``operand``; raises in a block of :func:`only_torchs` if not."""
    found = runs(operand.values.device.type, scaling)
    if not found and getattr(_strict, "on", False):
        raise NotImplementedError(f"torch has no product in fp8 there with scales by {scaling}")
    return found


@contextlib.contextmanager
def only_torchs() -> Iterator[None]:
    """A block in which :func:`multiply` raises a NotImplementedError where it would multiply in fp32."""
    _strict.on = True
    try:
        yield
    finally:
        _strict.on = False


def tried(device: torch.device, formats: Mapping[str, str] = FORMATS) -> dict[str, bool]:
    """Try torch's products on ``device``, and remember for its type which are right and of use; see :func:`runs`."""
    kinds = [dtype_of(formats[kind]) for kind in ("e4m3", "e5m2")]
    found = {}
    by_reference = device.type == "cpu" and fp8.has_amx()  # by a kernel of oneDNN that takes 1.7 s for 256**3
    for name, scaling, length in _TRIALS:
        _runs[device.type, name] = True
        try:
            with only_torchs():
                right = not by_reference and all(_is_right(device, kind, kinds[0], scaling, length) for kind in kinds)
        except (RuntimeError, TypeError, ValueError, NotImplementedError):  # what a device without it raises
            right = False
        found[name] = _runs[device.type, name] = right
    return found


_STEP = 16  # of the lengths over which every device sums
_TRIALS = (("tensor", "tensor", 32), ("row", "row", 32), ("block", "block", 64), ("uneven", "tensor", 24))


def _is_right(device: torch.device, one: torch.dtype, other: torch.dtype, scaling: str, length: int) -> bool:
    if scaling == "block" and one is not other:
        return True  # no recipe has e5m2 in blocks
    numbers = (torch.arange(32 * length, device=device, dtype=torch.float32) * 7 % 5 - 2).reshape(32, length)
    left, right = quantise(numbers, one, scaling, 1), quantise(numbers.flip(0).t(), other, scaling, 0)
    product = multiply(left, right, torch.bfloat16, scaling == "row")
    return bool((product.float() - left.wide() @ right.wide()).abs().max() <= 0.5)
