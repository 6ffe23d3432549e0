"""The kernels of :mod:`xamp.onebyone.plan`. A launch takes one tensor, a program blocks of it in turn.

Only fp32, fp16, int16 and int32 are computed with, and int64 in scalars. What a skipped step leaves alone is masked:
no branch depends on what is in memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from xamp.onepass.kernels import FACTOR, from_bf16, of, stepped, to_bf16

COUNT = tl.constexpr(15)
"""The word of a row's factors after those of ``kernels``: its count after the step."""


@triton.jit
def read(at, i, mask):
    """Return elements as fp32; int16 are patterns of bf16."""
    if at.dtype.element_ty == tl.int16:
        x = from_bf16(tl.load(at + i, mask=mask, other=0))
    else:
        x = tl.load(at + i, mask=mask, other=0.0).to(tl.float32)
    return x


@triton.jit
def write(at, i, mask, x):
    """Write fp32 ``x``, rounded to the dtype that is there."""
    if at.dtype.element_ty == tl.int16:
        tl.store(at + i, to_bf16(x), mask=mask)
    else:
        tl.store(at + i, x.to(at.dtype.element_ty), mask=mask)


@triton.jit
def turns(size, BLOCK: tl.constexpr):
    """Return how many blocks this program takes."""
    return tl.cdiv(tl.cdiv(size, BLOCK) - tl.program_id(0), tl.num_programs(0))


@triton.jit
def within(start, size, BLOCK: tl.constexpr):
    """Return how many elements a block has, int32."""
    left = size - start
    return tl.minimum(left, BLOCK).to(tl.int32)


@triton.jit(do_not_specialize=["size", "first"])
def check(grad, size, parts, first, BLOCK: tl.constexpr):
    """Write for each block its largest finite magnitude, squares in units of it, and 1 if not all are finite."""
    i = tl.arange(0, BLOCK)
    for turn in range(turns(size, BLOCK)):
        block = tl.program_id(0).to(tl.int64) + turn * tl.num_programs(0)
        start = block * BLOCK
        x = read(grad + start, i, i < within(start, size, BLOCK))
        bad = (x != x) | (tl.abs(x) == float("inf"))
        most = tl.maximum(tl.max(tl.where(bad, 0.0, tl.abs(x)), 0), 1.1754943508222875e-38)
        x = x / most
        at = parts + (first + block) * 3
        tl.store(at, most)
        tl.store(at + 1, tl.sum(x * x, 0))
        tl.store(at + 2, tl.max(bad.to(tl.int32), 0).to(tl.float32))


@triton.jit(do_not_specialize=["size", "t"])
def step(
    param, low, grad, m_at, v_at, w_at, count, size, found, cs, t, RULE: tl.constexpr, DECOUPLED: tl.constexpr,
    LATE: tl.constexpr, STATES: tl.constexpr, LOW: tl.constexpr, COUNTS: tl.constexpr, SKIPS: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Step one tensor, of which ``cs`` has the factors in row ``t``. Arguments that are missing are not read."""
    i, c = tl.arange(0, BLOCK), cs + t * WIDTH
    keep = 1
    if SKIPS:
        keep = (tl.load(found) == 0.0).to(tl.int32)
    for turn in range(turns(size, BLOCK)):
        block = tl.program_id(0).to(tl.int64) + turn * tl.num_programs(0)
        start = block * BLOCK
        mask = i < within(start, size, BLOCK) * keep
        p = read(param + start, i, mask)
        g = read(grad + start, i, mask) * of(c, FACTOR, p)
        m = tl.zeros([BLOCK], tl.float32)
        v = m
        w = m
        if STATES > 0:
            m = read(m_at + start, i, mask)
        if STATES > 1:
            v = read(v_at + start, i, mask)
        if STATES > 2:
            w = read(w_at + start, i, mask)
        p, m, v, w = stepped(p, g, m, v, w, c, RULE, DECOUPLED, LATE)
        write(param + start, i, mask, p)
        if LOW:
            write(low + start, i, mask, p)
        if STATES > 0:
            write(m_at + start, i, mask, m)
        if STATES > 1:
            write(v_at + start, i, mask, v)
        if STATES > 2:
            write(w_at + start, i, mask, w)
    if COUNTS:
        tl.store(count, tl.load(c + COUNT))  # each program the same
