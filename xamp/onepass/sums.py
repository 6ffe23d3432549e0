"""The kernels that read gradients: the check, norms, and the factor of clipping. One program takes one block."""

from __future__ import annotations

import triton
import triton.language as tl

from xamp.onepass.elements import (
    FIRST_SUM,
    FP16,
    FP32,
    ROW,
    SIZE,
    WHOLE,
    located,
    pointer,
    read,
    wide,
    write,
)


@triton.jit
def summed(x, KIND: tl.constexpr, ORDER):
    """Return what a norm sums of a block, in the dtype of ``x``: squares, magnitudes, powers, or the largest."""
    size = tl.abs(x)
    if KIND == "2":
        total = tl.sum(size * size, 0)
    elif KIND == "inf":
        total = largest(size)
    else:
        total = tl.sum(tl.where(size == 0.0, 0.0, tl.exp2(tl.log2(tl.where(size == 0.0, 1.0, size)) * ORDER)), 0)
    return total


@triton.jit
def largest(sizes):
    """Return the largest of fp64 magnitudes, and nan where one is: as whole numbers their bits have this order."""
    return tl.max(sizes.to(tl.int64, bitcast=True), 0).to(tl.float64, bitcast=True)


@triton.jit
def joined(total, KIND: tl.constexpr):
    """Return what summands of :func:`summed` make together."""
    if KIND == "inf":
        return largest(total)
    return tl.sum(total, 0)


@triton.jit
def finished(total, KIND: tl.constexpr, ORDER):
    """Return the norm of which ``total`` is the sum."""
    if KIND == "2":
        return tl.sqrt(total)
    elif KIND == "inf":
        return total
    else:
        return tl.where(total == 0.0, 0.0, tl.exp2(tl.log2(tl.where(total == 0.0, 1.0, total)) / ORDER))


@triton.jit
def block_sum(
    at, found, inverse, clip, order, left, GRADS: tl.constexpr, IN_PLACE: tl.constexpr, KIND: tl.constexpr,
    CHECKS: tl.constexpr, SCALED: tl.constexpr, CLIPPED: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the sum of a block, fp64; see :func:`sums`."""
    p, i = pointer(at, GRADS, FULL), tl.arange(0, BLOCK)
    x = wide(read(p, i, left, FULL), GRADS)
    if CHECKS:
        if SCALED and IN_PLACE:
            write(p, i, left, x * tl.load(inverse), GRADS, FULL)
        # Squares of fp16 are finite in fp32, those of others in fp64.
        total = summed(x if GRADS == FP16 else x.to(tl.float64), KIND, order).to(tl.float64)
        if total - total != 0.0:
            tl.store(found, 1.0)
    else:
        y = x.to(tl.float64)
        if SCALED and not IN_PLACE:
            y = y * tl.load(inverse).to(tl.float64)
        if CLIPPED and not IN_PLACE:
            y = y * tl.load(clip).to(tl.float64)
        total = summed(y, KIND, order)
    return total


@triton.jit(do_not_specialize=["rows", "given", "blocks", "found", "inverse", "clip", "out", "order"])
def sums(
    rows, given, blocks, found, inverse, clip, out, order, GRADS: tl.constexpr, IN_PLACE: tl.constexpr,
    KIND: tl.constexpr, CHECKS: tl.constexpr, SCALED: tl.constexpr, CLIPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum each block of the gradients into ``out``. Rows ``IN_PLACE`` hold them unscaled and clipped already.

    Where ``CHECKS``, nothing is unscaled yet: what is not finite raises ``found``, for then the sum of squares is not
    finite either, and rows ``IN_PLACE`` are unscaled.
    """
    t, start = located(tl.load(blocks + tl.program_id(0)), BLOCK)
    row = rows + t * ROW
    at, size = tl.load(given + t), tl.load(row + SIZE)
    whole, first = tl.load(row + WHOLE), tl.load(row + FIRST_SUM)
    total = tl.zeros([], tl.float64)
    if at != 0:
        at = at + start * (4 if GRADS == FP32 else 2)
        if (start + BLOCK <= whole) & ((at & 15) == 0):
            total = block_sum(
                at, found, inverse, clip, order, BLOCK, GRADS, IN_PLACE, KIND, CHECKS, SCALED, CLIPPED, True, BLOCK
            )
        else:
            total = block_sum(
                at, found, inverse, clip, order, size - start, GRADS, IN_PLACE, KIND, CHECKS, SCALED, CLIPPED, False,
                BLOCK,
            )  # fmt: skip
    tl.store(out + first + start // BLOCK, total)


@triton.jit(do_not_specialize=["parts", "count", "inverse", "out", "order"])
def total(parts, count, inverse, out, order, KIND: tl.constexpr, SCALED: tl.constexpr, CHUNK: tl.constexpr):
    """Make one norm of the sums of all blocks; one program."""
    whole = tl.zeros([CHUNK], tl.float64)
    for start in range(0, count, CHUNK):
        i = start + tl.arange(0, CHUNK)
        part = tl.load(parts + i, mask=i < count, other=0.0)
        whole = tl.where((part != part) | (part > whole), part, whole) if KIND == "inf" else whole + part
    norm = finished(joined(whole, KIND), KIND, order)
    if SCALED:
        norm = norm * tl.load(inverse).to(tl.float64)
    tl.store(out, norm.to(tl.float32))


@triton.jit
def multiply(at, left, factor, GRADS: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr):
    """Multiply a block."""
    p, i = pointer(at, GRADS, FULL), tl.arange(0, BLOCK)
    write(p, i, left, wide(read(p, i, left, FULL), GRADS) * factor, GRADS, FULL)


@triton.jit(do_not_specialize=["norm", "limit", "eps", "out", "rows", "given", "blocks"])
def clip_factor(
    norm, limit, eps, out, rows, given, blocks, GRADS: tl.constexpr, MULTIPLIES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write ``min(1, limit / (norm + eps))``; nan stays nan. Multiply the gradients of ``blocks``."""
    x = tl.load(norm).to(tl.float64)
    factor = tl.where(limit / (x + eps) > 1.0, 1.0, limit / (x + eps)).to(tl.float32)
    if tl.program_id(0) == 0:
        tl.store(out, factor)
    if MULTIPLIES:
        t, start = located(tl.load(blocks + tl.program_id(0)), BLOCK)
        at = tl.load(given + t)
        if at != 0:
            at = at + start * (4 if GRADS == FP32 else 2)
            if (start + BLOCK <= tl.load(rows + t * ROW + WHOLE)) & ((at & 15) == 0):
                multiply(at, BLOCK, factor, GRADS, True, BLOCK)
            else:
                multiply(at, tl.load(rows + t * ROW + SIZE) - start, factor, GRADS, False, BLOCK)
