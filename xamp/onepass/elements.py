"""What all kernels read: the words of their tables, and elements at an address, of a dtype that is known beforehand.

Arithmetic is in fp32, as in torch's own fused kernels. Addresses stand in tables, so only the device sees how they are
aligned. A block that is full and aligned is told apart there: it is read and written without a mask, 16 bytes at once.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

# Words of a row in the table of rows. WHOLE: its elements, if all its tensors are aligned to 16 bytes, else 0.
PARAM, LOW, STATE, STEP = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(5)
SIZE, WHOLE, GROUP, IN_PLACE = (tl.constexpr(word) for word in range(6, 10))
FIRST_BLOCK, BLOCKS, FIRST_SUM, SUMS, ROW = (tl.constexpr(word) for word in range(10, 15))

# Words of a group in the table of options: fp64 numbers, then addresses and codes.
LR, DECAY, BETA1, BETA2, EPS, MOMENTUM, DAMPENING, NESTEROV = (tl.constexpr(word) for word in range(8))
MAXIMIZE, AMSGRAD, CORRECTS, AVERAGES, LR_DECAY, FROM_ZERO, IS_FIRST = (tl.constexpr(word) for word in range(8, 15))
BY_LARGEST, COUNT, LR_AT, LR_CODE, COUNT_AT, COUNT_CODE = (tl.constexpr(word) for word in range(15, 21))
OPTIONS = tl.constexpr(21)

# Factors of a row, fp32, which the step reads: computed on the device, once a step. SHRUNK: learning rate times decay;
# HAT2 is of the root; NOTHING: what an element gets that was zero since the first step.
FACTOR, RATE, SHRUNK, KEEP1, ADD1, KEEP2, ADD2, SMALL = (tl.constexpr(word) for word in range(8))
HAT1, HAT2, PUSH, WIDEST, FIRST, RATIO, WEIGHT_DECAY, NOTHING = (tl.constexpr(word) for word in range(8, 16))
FACTORS = tl.constexpr(16)

# Codes of dtypes; 0: there is no tensor.
FP32, FP16, BF16, FP64, INT32 = (tl.constexpr(code) for code in range(1, 6))

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BY_BITS = tl.constexpr(INTERPRETED)
"""Whether bf16 is rounded by its bits, to the nearest, ties to even: Triton's interpreter truncates."""


@triton.jit
def located(entry, BLOCK: tl.constexpr):
    """Return the row of a block, and where it starts there: an entry has the row above 32 bits, and the block's number.

    Entries are read before anything else, so that all reads of tables are in flight together.
    """
    return entry >> 32, (entry & 0xFFFFFFFF) * BLOCK


@triton.jit
def pointer(at, CODE: tl.constexpr, FULL: tl.constexpr):
    """Return a pointer to elements of a dtype at an address, which is aligned to 16 bytes where ``FULL``.

    That is said of the pointer itself, here: Triton forgets what it knows of an address, or of what a function returns.
    """
    if CODE == FP32:
        p = at.to(tl.pointer_type(tl.float32))
    elif CODE == FP16:
        p = at.to(tl.pointer_type(tl.float16))
    elif BY_BITS:
        p = at.to(tl.pointer_type(tl.int16))
    else:
        p = at.to(tl.pointer_type(tl.bfloat16))
    if FULL:
        p = tl.multiple_of(p, 16)
    return p


@triton.jit
def read(p, i, left, FULL: tl.constexpr):
    """Return elements ``i``, as they lie in memory; zeros from ``left`` on."""
    if FULL:
        return tl.load(p + i)
    else:
        return tl.load(p + i, mask=i < left, other=0)


@triton.jit
def write(p, i, left, x, CODE: tl.constexpr, FULL: tl.constexpr):
    """Write fp32 ``x``, rounded to the dtype of ``CODE``, below ``left``."""
    if FULL:
        tl.store(p + i, narrow(x, CODE))
    else:
        tl.store(p + i, narrow(x, CODE), mask=i < left)


@triton.jit
def wide(x, CODE: tl.constexpr):
    """Return the fp32 values of elements."""
    if CODE == BF16 and BY_BITS:
        return (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def narrow(x, CODE: tl.constexpr):
    """Return fp32 ``x`` rounded to the dtype of ``CODE``; a nan by bits is torch's."""
    if CODE == FP32:
        return x
    elif CODE == FP16:
        return x.to(tl.float16)
    elif BY_BITS:
        bits = x.to(tl.int32, bitcast=True)
        near = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x != x, 0x7FC0, near).to(tl.int16)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def number(at, code):
    """Return a scalar at an address, fp64, of a dtype that only the device knows."""
    x = at.to(tl.float64) * 0.0
    if code == FP32:
        x = tl.load(at.to(tl.pointer_type(tl.float32))).to(tl.float64)
    elif code == FP64:
        x = tl.load(at.to(tl.pointer_type(tl.float64)))
    elif code == INT32:
        x = tl.load(at.to(tl.pointer_type(tl.int32))).to(tl.float64)
    return x


@triton.jit
def of(c, word):
    """Return a factor of the row, fp32."""
    return tl.load(c + word)
