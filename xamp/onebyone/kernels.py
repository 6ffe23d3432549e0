"""The kernels of :mod:`xamp.onebyone.plan`. A launch takes one tensor, a program blocks of it in turn.

Only fp32, fp16, int16 and int32 are computed with, and int64 in scalars. What a skipped step leaves alone is masked:
no branch depends on what is in memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from xamp.onepass.kernels import FACTOR, RATIO, from_bf16, lamb_update, moments, of, stepped, to_bf16

COUNT, NORM = tl.constexpr(15), tl.constexpr(16)
"""Words of a row's factors after those of ``onepass.kernels``: its count and NovoGrad's norm after the step."""

TINY, LARGEST = tl.constexpr(2.0**-126), tl.constexpr(3.4028234663852886e38)
"""The smallest and the largest normal number of fp32."""


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


@triton.jit
def squared(x, unit, squares):
    """Add elements to sums of squares, lane by lane. These are in units of ``unit``, the largest finite magnitude."""
    size = tl.abs(x)
    most = tl.maximum(unit, tl.where(size <= LARGEST, size, 0.0))
    scale, x = unit / most, x / most
    return most, tl.where(squares <= LARGEST, squares * scale * scale, squares) + x * x  # the scale may be 0


@triton.jit
def leave(part, unit, squares):
    """Write what a program has summed: the largest finite magnitude, and the squares in units of it."""
    most = tl.max(unit, 0)
    scale = unit / most
    tl.store(part, most)
    tl.store(part + 1, tl.sum(tl.where(squares <= LARGEST, squares * scale * scale, squares), 0))


@triton.jit(do_not_specialize=["size", "first"])
def check(grad, size, parts, first, BLOCK: tl.constexpr):
    """Sum the squares of one tensor: each program leaves a part. The sum is finite where all elements are."""
    i = tl.arange(0, BLOCK)
    unit = tl.full([BLOCK], TINY, tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for turn in range(turns(size, BLOCK)):
        block = tl.program_id(0).to(tl.int64) + turn * tl.num_programs(0)
        start = block * BLOCK
        unit, squares = squared(read(grad + start, i, i < within(start, size, BLOCK)), unit, squares)
    leave(parts + (first + tl.program_id(0)) * 2, unit, squares)


@triton.jit(do_not_specialize=["size", "t", "first"])
def move(
    param, grad, m_at, v_at, size, found, cs, t, weights, updates, first, DECOUPLED: tl.constexpr,
    SKIPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Move the moments of LAMB, and sum the squares of the weights and of the updates, as :func:`check` does."""
    i, c = tl.arange(0, BLOCK), cs + t * WIDTH
    keep = 1
    if SKIPS:
        keep = (tl.load(found) == 0.0).to(tl.int32)
    p_unit = tl.full([BLOCK], TINY, tl.float32)
    u_unit = p_unit
    p_squares = tl.zeros([BLOCK], tl.float32)
    u_squares = p_squares
    for turn in range(turns(size, BLOCK)):
        block = tl.program_id(0).to(tl.int64) + turn * tl.num_programs(0)
        start = block * BLOCK
        mask = i < within(start, size, BLOCK) * keep
        p = read(param + start, i, mask)
        g = read(grad + start, i, mask) * of(c, FACTOR, p)
        m, v = moments(p, g, read(m_at + start, i, mask), read(v_at + start, i, mask), c, DECOUPLED)
        write(m_at + start, i, mask, m)
        write(v_at + start, i, mask, v)
        p_unit, p_squares = squared(p, p_unit, p_squares)
        u_unit, u_squares = squared(tl.where(mask, lamb_update(p, m, v, c, DECOUPLED), 0.0), u_unit, u_squares)
    part = (first + tl.program_id(0)) * 2
    leave(weights + part, p_unit, p_squares)
    leave(updates + part, u_unit, u_squares)


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
        m = tl.zeros([BLOCK], tl.float32)
        v = m
        w = m
        if STATES > 0:
            m = read(m_at + start, i, mask)
        if STATES > 1:
            v = read(v_at + start, i, mask)
        if STATES > 2:
            w = read(w_at + start, i, mask)
        if RULE == "lamb":  # its moments have moved
            p = p - of(c, RATIO, p) * lamb_update(p, m, v, c, DECOUPLED)
        else:
            g = read(grad + start, i, mask) * of(c, FACTOR, p)
            p, m, v, w = stepped(p, g, m, v, w, c, RULE, DECOUPLED, LATE)
            if STATES > 0:
                write(m_at + start, i, mask, m)
            if STATES > 1:
                write(v_at + start, i, mask, v)
            if STATES > 2:
                write(w_at + start, i, mask, w)
        write(param + start, i, mask, p)
        if LOW:
            write(low + start, i, mask, p)
    if COUNTS:
        tl.store(count, tl.load(c + COUNT))  # each program the same
    if RULE == "novograd":
        tl.store(v_at, tl.load(c + NORM))
