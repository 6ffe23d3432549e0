"""The kernels of a step: one program takes a row for its factors, or a block of one tensor for its elements."""

from __future__ import annotations

import triton
import triton.language as tl

from xamp.onepass.elements import (  # isort: skip
    ADD1, ADD2, AMSGRAD, AVERAGES, BETA1, BETA2, BLOCKS, BY_LARGEST, CORRECTS, COUNT, COUNT_AT, COUNT_CODE, DAMPENING,
    DECAY, EPS, FACTOR, FACTORS, FIRST, FIRST_BLOCK, FIRST_SUM, FROM_ZERO, GROUP, HAT1, HAT2, INTERPRETED, IN_PLACE,
    IS_FIRST, KEEP1, KEEP2, LOW, LR, LR_AT, LR_CODE, LR_DECAY, MAXIMIZE, MOMENTUM, NESTEROV, NOTHING, OPTIONS, PARAM,
    PUSH, RATE, RATIO, ROW, SHRUNK, SIZE, SMALL, STATE, STEP, SUMS, WEIGHT_DECAY, WHOLE, WIDEST, located, number, of,
    pointer, read, wide, write,
)  # fmt: skip
from xamp.onepass.sums import clip_factor, joined, sums, total

__all__ = ["by_row", "clip_factor", "factors", "step", "sums", "total"]


def lanes() -> int:
    """Return how many threads a warp has on the current device."""
    return 32 if INTERPRETED else int(triton.runtime.driver.active.get_current_target().warp_size)


@triton.jit
def power(base, count):
    """Return ``base ** count``, fp64, for a base of 0 to 1 and a count above 0."""
    return tl.exp2(tl.log2(base) * count)


@triton.jit
def put(c, word, x):
    """Keep a factor, fp32."""
    tl.store(c + word, x.to(tl.float32))


@triton.jit(do_not_specialize=["rows", "given", "count", "found", "inverse", "clip", "out"])
def factors(
    rows, given, count, found, inverse, clip, out, RULE: tl.constexpr, SKIPS: tl.constexpr, SCALED: tl.constexpr,
    CLIPPED: tl.constexpr,
):  # fmt: skip
    """Count a row's step, and compute in fp64 what its elements are multiplied by; for each of ``count``."""
    t = tl.program_id(0).to(tl.int64)
    steps = tl.load(given + t) != 0
    if SKIPS:
        steps = steps & (tl.load(found) == 0.0)
    if steps:
        group, c = given + count + tl.load(rows + t * ROW + GROUP) * OPTIONS, out + t * FACTORS
        numbers, at = group.to(tl.pointer_type(tl.float64)), tl.load(rows + t * ROW + STEP)
        taken, first = tl.load(numbers + COUNT), tl.load(numbers + IS_FIRST) != 0.0
        if at != 0:
            own = tl.load(at.to(tl.pointer_type(tl.float32))) + 1.0
            tl.store(at.to(tl.pointer_type(tl.float32)), own)
            taken = own.to(tl.float64)
            first = own == 1.0
        elif tl.load(group + COUNT_CODE) != 0:
            taken = number(tl.load(group + COUNT_AT), tl.load(group + COUNT_CODE))
        lr = tl.load(numbers + LR)
        if tl.load(group + LR_CODE) != 0:
            lr = number(tl.load(group + LR_AT), tl.load(group + LR_CODE))
        sign = tl.where(tl.load(numbers + MAXIMIZE) != 0.0, -1.0, 1.0).to(tl.float64)
        factor = sign
        if SCALED:
            factor = factor * tl.load(inverse).to(tl.float64)
        if CLIPPED:
            factor = factor * tl.load(clip).to(tl.float64)
        factor = tl.where(tl.load(rows + t * ROW + IN_PLACE) != 0, sign, factor)
        beta1, beta2, eps = tl.load(numbers + BETA1), tl.load(numbers + BETA2), tl.load(numbers + EPS)
        decay, corrects = tl.load(numbers + DECAY), (tl.load(numbers + CORRECTS) != 0.0) & (taken > 0.0)
        keep1, add1 = beta1, tl.where(tl.load(numbers + AVERAGES) != 0.0, 1.0 - beta1, 1.0)
        push = tl.load(numbers + NESTEROV)
        if RULE == "sgd":
            keep1 = tl.load(numbers + MOMENTUM)
            add1 = tl.where(keep1 == 0.0, 1.0, 1.0 - tl.load(numbers + DAMPENING))
            push = tl.where(keep1 == 0.0, 0.0, push)
        hat1 = 1.0 / tl.where(corrects, 1.0 - power(beta1, taken), 1.0)
        rate = lr
        if RULE == "adagrad":
            rate = lr / (1.0 + (taken - 1.0) * tl.load(numbers + LR_DECAY))
        elif RULE == "adam":
            rate = lr * hat1
        put(c, FACTOR, factor)
        put(c, RATE, rate)
        put(c, SHRUNK, lr * decay)
        put(c, KEEP1, keep1)
        put(c, ADD1, add1)
        put(c, KEEP2, beta2)
        put(c, ADD2, 1.0 - beta2)
        put(c, SMALL, eps)
        put(c, HAT1, hat1)
        put(c, HAT2, 1.0 / tl.sqrt(tl.where(corrects, 1.0 - power(beta2, taken), 1.0)))
        put(c, PUSH, push)
        put(c, WIDEST, tl.load(numbers + AMSGRAD))
        put(c, FIRST, tl.where(first, 1.0, 0.0))
        put(c, RATIO, lr)
        put(c, WEIGHT_DECAY, decay)
        put(c, NOTHING, 0.0 / eps)


@triton.jit
def over_root(x, square, hat, small, nothing):
    """Return ``x / (hat * sqrt(square) + small)``.

    Roots and quotients of zeros would take the slow paths of both, and an embedding is full of rows that never had a
    gradient: for those 1 is computed, and ``nothing`` returned, which is ``0 / small``.
    """
    still = (x == 0.0) & (square == 0.0)
    size = tl.sqrt_rn(tl.where(still, 1.0, square)) * hat + small
    return tl.where(still, nothing, tl.div_rn(tl.where(still, 1.0, x), size))


@triton.jit
def moments(p, g, m, v, c, DECOUPLED: tl.constexpr):
    """Return the next moments of Adam and LAMB. Names: parameter, gradient, first and second moment, factors."""
    if not DECOUPLED:
        g = g + of(c, WEIGHT_DECAY) * p
    m = of(c, KEEP1) * m + of(c, ADD1) * g
    v = of(c, KEEP2) * v + of(c, ADD2) * (g * g)
    return m, v


@triton.jit
def lamb_update(p, m, v, c, DECOUPLED: tl.constexpr):
    """Return the direction of LAMB, before the ratio of norms."""
    update = of(c, HAT1) * over_root(m, v, of(c, HAT2), of(c, SMALL), of(c, NOTHING))
    if DECOUPLED:
        update = update + of(c, WEIGHT_DECAY) * p
    return update


@triton.jit
def stepped(p, g, m, v, w, c, RULE: tl.constexpr, DECOUPLED: tl.constexpr, LATE: tl.constexpr, STATES: tl.constexpr):
    """Return parameter and states after a step. ``LATE``: SGD adds the decay to the update; see ``factors`` for it."""
    if RULE == "sgd":
        decay = of(c, WEIGHT_DECAY)
        if not LATE:
            g = g + decay * p
        if STATES == 1:
            m = tl.where(of(c, FIRST) != 0.0, g, of(c, KEEP1) * m + of(c, ADD1) * g)
            g = tl.where(of(c, PUSH) != 0.0, g + of(c, KEEP1) * m, m)
        if LATE:
            g = g + decay * p
        p = p - of(c, RATE) * g
    elif RULE == "adam":
        m, v = moments(p, g, m, v, c, DECOUPLED)
        if DECOUPLED:
            p = p - of(c, SHRUNK) * p
        second = v
        if STATES == 3:
            w = tl.where((v > w) | (v != v), v, w)
            second = tl.where(of(c, WIDEST) != 0.0, w, v)
        p = p - of(c, RATE) * over_root(m, second, of(c, HAT2), of(c, SMALL), of(c, NOTHING))
    elif RULE == "adagrad":
        if not DECOUPLED:
            g = g + of(c, WEIGHT_DECAY) * p
        m = m + g * g
        update = over_root(g, m, 1.0, of(c, SMALL), of(c, NOTHING))
        if DECOUPLED:
            update = update + of(c, WEIGHT_DECAY) * p
        p = p - of(c, RATE) * update
    else:  # NovoGrad; the ratio is 1 / (its norm of this tensor + eps)
        decay = of(c, WEIGHT_DECAY)
        if not DECOUPLED:
            g = g * of(c, RATIO) + decay * p
        m = of(c, KEEP1) * m + of(c, ADD1) * g
        update = m * of(c, HAT1)
        if DECOUPLED:
            update = update * of(c, RATIO) + decay * p
        p = p - of(c, RATE) * update
    return p, m, v, w


@triton.jit
def step_block(
    g_at, p_at, l_at, m_at, v_at, w_at, c, start, left, first, second, RULE: tl.constexpr, DECOUPLED: tl.constexpr,
    LATE: tl.constexpr, PHASE: tl.constexpr, PARAMS: tl.constexpr, LOWS: tl.constexpr, STATE_CODE: tl.constexpr,
    STATES: tl.constexpr, GRADS: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Step one block: all elements are read before any is used; last those of the gradient, which are used first."""
    i = tl.arange(0, BLOCK)
    p_to = pointer(p_at, PARAMS, FULL) + start
    p_is = read(p_to, i, left, FULL)
    g_is, m_is, v_is, w_is = p_is, p_is, p_is, p_is
    if STATES > 0:
        m_to = pointer(m_at, STATE_CODE, FULL) + start
        m_is = read(m_to, i, left, FULL)
    if STATES > 1:
        v_to = pointer(v_at, STATE_CODE, FULL) + start
        v_is = read(v_to, i, left, FULL)
    if STATES > 2:
        w_to = pointer(w_at, STATE_CODE, FULL) + start
        w_is = read(w_to, i, left, FULL)
    if PHASE == 1 or RULE != "lamb":
        g_is = read(pointer(g_at, GRADS, FULL) + start, i, left, FULL)
    if FULL and (RULE == "sgd" or (STATES == 3 or PHASE == 1)):
        tl.debug_barrier()  # without it NVIDIA's assembler saves registers: a state waits for the gradient
    p, m, v, w = wide(p_is, PARAMS), wide(m_is, STATE_CODE), wide(v_is, STATE_CODE), wide(w_is, STATE_CODE)
    if RULE == "lamb":
        if PHASE == 1:
            m, v = moments(p, wide(g_is, GRADS) * of(c, FACTOR), m, v, c, DECOUPLED)
        update = lamb_update(p, m, v, c, DECOUPLED)
        if PHASE == 1:
            if not FULL:
                update = tl.where(i < left, update, 0.0)
            tl.store(first, tl.sum(p * p, 0).to(tl.float64))
            tl.store(second, tl.sum(update * update, 0).to(tl.float64))
        else:
            p = p - of(c, RATIO) * update
    else:
        p, m, v, w = stepped(p, wide(g_is, GRADS) * of(c, FACTOR), m, v, w, c, RULE, DECOUPLED, LATE, STATES)
    if PHASE == 2:
        write(p_to, i, left, p, PARAMS, FULL)
        if LOWS != 0:
            write(pointer(l_at, LOWS, FULL) + start, i, left, p, LOWS, FULL)
    if PHASE == 1 or RULE != "lamb":
        if STATES > 0:
            write(m_to, i, left, m, STATE_CODE, FULL)
        if STATES > 1:
            write(v_to, i, left, v, STATE_CODE, FULL)
        if STATES > 2:
            write(w_to, i, left, w, STATE_CODE, FULL)


@triton.jit(do_not_specialize=["rows", "given", "blocks", "found", "cs", "first", "second"])
def step(
    rows, given, blocks, found, cs, first, second, RULE: tl.constexpr, DECOUPLED: tl.constexpr, LATE: tl.constexpr,
    SKIPS: tl.constexpr, PHASE: tl.constexpr, PARAMS: tl.constexpr, LOWS: tl.constexpr, STATE_CODE: tl.constexpr,
    STATES: tl.constexpr, GRADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Step a block in fp32: ``PHASE`` 1 of LAMB moves moments and sums squares, 2 moves the weights.

    ``PARAMS``, ``LOWS``, ``STATE_CODE`` and ``GRADS`` are the dtypes of all rows of ``blocks``, which have ``STATES``
    states with elements.
    """
    t, start = located(tl.load(blocks + tl.program_id(0)), BLOCK)
    row, c = rows + t * ROW, cs + t * FACTORS
    g_at = tl.load(given + t)
    p_at, l_at = tl.load(row + PARAM), tl.load(row + LOW)
    m_at, v_at, w_at = tl.load(row + STATE), tl.load(row + STATE + 1), tl.load(row + STATE + 2)
    size, whole = tl.load(row + SIZE), tl.load(row + WHOLE)
    if PHASE == 1:
        b = tl.load(row + FIRST_BLOCK) + start // BLOCK
        first, second = first + b, second + b
    steps = g_at != 0
    if SKIPS:
        steps = steps & (tl.load(found) == 0.0)
    if steps:
        if (start + BLOCK <= whole) & ((g_at & 15) == 0):
            step_block(
                g_at, p_at, l_at, m_at, v_at, w_at, c, start, BLOCK, first, second, RULE, DECOUPLED, LATE, PHASE,
                PARAMS, LOWS, STATE_CODE, STATES, GRADS, True, BLOCK,
            )  # fmt: skip
        else:
            step_block(
                g_at, p_at, l_at, m_at, v_at, w_at, c, start, size - start, first, second, RULE, DECOUPLED, LATE, PHASE,
                PARAMS, LOWS, STATE_CODE, STATES, GRADS, False, BLOCK,
            )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "given", "count", "found", "first", "second", "cs"])
def by_row(
    rows, given, count, found, first, second, cs, RULE: tl.constexpr, SKIPS: tl.constexpr, NVLAMB: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Make of the sums of a row's blocks the ratio of LAMB, or the moving norm of NovoGrad; for each of ``count``."""
    t = tl.program_id(0).to(tl.int64)
    steps = tl.load(given + t) != 0
    if SKIPS:
        steps = steps & (tl.load(found) == 0.0)
    if steps:
        row, c = rows + t * ROW, cs + t * FACTORS
        start, many = tl.load(row + FIRST_SUM), tl.load(row + SUMS)
        if RULE == "lamb":
            start, many = tl.load(row + FIRST_BLOCK), tl.load(row + BLOCKS)
        zeros = tl.zeros([CHUNK], tl.float64)
        one, other, largest = zeros, zeros, zeros
        for begin in range(0, many, CHUNK):
            i = begin + tl.arange(0, CHUNK)
            part = tl.load(first + start + i, mask=i < many, other=0.0)
            one += part
            if RULE == "lamb":
                other += tl.load(second + start + i, mask=i < many, other=0.0)
            else:
                most = tl.load(second + start + i, mask=i < many, other=0.0)
                largest = tl.where((most != most) | (most > largest), most, largest)
        if RULE == "lamb":
            weight, update = tl.sqrt(tl.sum(one, 0)), tl.sqrt(tl.sum(other, 0))
            lr = of(c, RATE).to(tl.float64)
            scaled = (weight != 0.0) & (update != 0.0)
            if not NVLAMB:
                scaled = scaled & (of(c, WEIGHT_DECAY) != 0.0)
            put(c, RATIO, tl.where(scaled, lr * weight / tl.where(scaled, update, 1.0), lr))
        else:
            numbers = (given + count + tl.load(row + GROUP) * OPTIONS).to(tl.pointer_type(tl.float64))
            at = tl.load(row + STATE + 1).to(tl.pointer_type(tl.float32))
            size, keep, old = tl.abs(of(c, FACTOR)).to(tl.float64), tl.load(numbers + BETA2), tl.load(at).to(tl.float64)
            fresh = (of(c, FIRST) != 0.0) & (tl.load(numbers + FROM_ZERO) == 0.0)
            if tl.load(numbers + BY_LARGEST) != 0.0:
                norm = joined(largest, "inf") * size
                new = tl.where(fresh, norm, keep * old + (1.0 - keep) * norm)
            else:
                norm = tl.sqrt(tl.sum(one, 0)) * size
                new = tl.where(fresh, norm, tl.sqrt(keep * old * old + (1.0 - keep) * norm * norm))
            kept = new.to(tl.float32)
            tl.store(at, kept)
            put(c, RATIO, 1.0 / (kept.to(tl.float64) * of(c, HAT2) + of(c, SMALL)))
