"""The kernels. One program takes one block of one tensor; addresses, sizes and dtypes come from tables of int64.

Sums, factors and corrections are in fp64, the elements of a step where chips have fp64 at a good rate. A bf16 value is
widened by its bits and rounded by its bits, to the nearest, ties to even, since Triton's interpreter truncates.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Words of a row in the table of rows.
PARAM, LOW, STATE, STEP = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(5)
SIZE, GROUP, PARAM_CODE, LOW_CODE, STATE_CODE = (tl.constexpr(word) for word in range(6, 11))
FIRST_BLOCK, BLOCKS, IN_PLACE, ROW = (tl.constexpr(word) for word in range(11, 15))

# Words of a group in the table of options: fp64 numbers, then addresses and codes.
LR, DECAY, BETA1, BETA2, EPS, MOMENTUM, DAMPENING, NESTEROV = (tl.constexpr(word) for word in range(8))
MAXIMIZE, AMSGRAD, CORRECTS, AVERAGES, LR_DECAY, FROM_ZERO, IS_FIRST = (tl.constexpr(word) for word in range(8, 15))
BY_LARGEST, COUNT, LR_AT, LR_CODE, COUNT_AT, COUNT_CODE = (tl.constexpr(word) for word in range(15, 21))
OPTIONS = tl.constexpr(21)

# Factors of a row, which the step reads: computed on the device, once a step.
FACTOR, RATE, SHRINK, KEEP1, ADD1, KEEP2, ADD2, SMALL = (tl.constexpr(word) for word in range(8))
HAT1, HAT2, PUSH, WIDEST, FIRST, RATIO, WEIGHT_DECAY, FACTORS = (tl.constexpr(word) for word in range(8, 16))

# Codes of dtypes; 0: there is no tensor.
FP32, FP16, BF16, FP64, INT32 = (tl.constexpr(code) for code in range(1, 6))


@triton.jit
def from_bf16(bits):
    """Return the fp32 values of bf16 patterns, int16."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def to_bf16(x):
    """Return the bf16 patterns nearest to fp32 values, int16; nan is torch's."""
    bits = x.to(tl.int32, bitcast=True)
    near = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x != x, 0x7FC0, near).to(tl.int16)


@triton.jit
def load(at, code, i, mask, BLOCK: tl.constexpr):
    """Return elements ``i`` of a tensor at an address, fp32; zeros where ``code`` says that there is none."""
    x = tl.zeros([BLOCK], tl.float32)
    if code == FP32:
        x = tl.load(at.to(tl.pointer_type(tl.float32)) + i, mask=mask, other=0.0)
    elif code == FP16:
        x = tl.load(at.to(tl.pointer_type(tl.float16)) + i, mask=mask, other=0.0).to(tl.float32)
    elif code == BF16:
        x = from_bf16(tl.load(at.to(tl.pointer_type(tl.int16)) + i, mask=mask, other=0))
    return x


@triton.jit
def store(at, code, i, mask, x):
    """Write fp32 ``x``, rounded to the dtype of ``code``."""
    if code == FP32:
        tl.store(at.to(tl.pointer_type(tl.float32)) + i, x, mask=mask)
    elif code == FP16:
        tl.store(at.to(tl.pointer_type(tl.float16)) + i, x.to(tl.float16), mask=mask)
    elif code == BF16:
        tl.store(at.to(tl.pointer_type(tl.int16)) + i, to_bf16(x), mask=mask)


@triton.jit
def number(at, code):
    """Return a scalar at an address, fp64."""
    x = at.to(tl.float64) * 0.0
    if code == FP32:
        x = tl.load(at.to(tl.pointer_type(tl.float32))).to(tl.float64)
    elif code == FP64:
        x = tl.load(at.to(tl.pointer_type(tl.float64)))
    elif code == INT32:
        x = tl.load(at.to(tl.pointer_type(tl.int32))).to(tl.float64)
    return x


@triton.jit
def power(base, count):
    """Return ``base ** count``, fp64, for a whole ``count`` below 2**32: by squares, so to some 2**-48."""
    n = count.to(tl.int64)
    result = base * 0.0 + 1.0
    for _ in range(32):
        result = tl.where((n & 1) != 0, result * base, result)
        base = base * base
        n = n >> 1
    return result


@triton.jit
def summed(x, KIND: tl.constexpr, ORDER):
    """Return what a norm sums of a block, in the dtype of ``x``: squares, magnitudes, powers, or the largest."""
    size = tl.abs(x)
    if KIND == "2":
        total = tl.sum(size * size, 0)
    elif KIND == "inf":
        total = tl.max(tl.where(x != x, 0.0, size), 0) + tl.sum(tl.where(x != x, x, 0.0), 0)  # nan stays
    else:
        total = tl.sum(tl.where(size == 0.0, 0.0, tl.exp2(tl.log2(tl.where(size == 0.0, 1.0, size)) * ORDER)), 0)
    return total


@triton.jit
def joined(total, KIND: tl.constexpr):
    """Return what summands of :func:`summed` make together."""
    if KIND == "inf":
        return tl.max(tl.where(total != total, 0.0, total), 0) + tl.sum(tl.where(total != total, total, 0.0), 0)
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
def sums(
    rows, given, ids, found, inverse, clip, out, order, KIND: tl.constexpr, CHECKS: tl.constexpr, SCALED: tl.constexpr,
    CLIPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum each block of the gradients into ``out``. A row ``IN_PLACE`` holds them unscaled and clipped already.

    Where ``CHECKS``, nothing is unscaled yet: what is not finite raises ``found``, and rows ``IN_PLACE`` are unscaled.
    """
    b = tl.program_id(0)
    t = tl.load(ids + b).to(tl.int64)
    row = rows + t * ROW
    at, code, in_place = tl.load(given + 2 * t), tl.load(given + 2 * t + 1), tl.load(row + IN_PLACE) != 0
    i = (b - tl.load(row + FIRST_BLOCK)) * BLOCK + tl.arange(0, BLOCK)
    mask = i < tl.load(row + SIZE)
    x = load(at, code, i, mask, BLOCK)
    factor = tl.full([], 1.0, tl.float64)
    if SCALED:
        factor = factor * tl.load(inverse).to(tl.float64)
    if CHECKS:
        bad = tl.max(((x != x) | (tl.abs(x) == float("inf"))).to(tl.int32), 0)
        if bad > 0:
            tl.store(found, 1.0)
        if SCALED and in_place:
            store(at, code, i, mask, (x.to(tl.float64) * factor).to(tl.float32))
        tl.store(out + b, summed(x.to(tl.float64), KIND, order))
    else:
        if CLIPPED:
            factor = factor * tl.load(clip).to(tl.float64)
        tl.store(out + b, summed(x.to(tl.float64) * tl.where(in_place, 1.0, factor), KIND, order))


@triton.jit
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
def clip_factor(norm, limit, eps, out, rows, given, ids, start, MULTIPLIES: tl.constexpr, BLOCK: tl.constexpr):
    """Write ``min(1, limit / (norm + eps))``; nan stays nan. Multiply gradients ``IN_PLACE``, from block ``start``."""
    x = tl.load(norm).to(tl.float64)
    factor = tl.where(limit / (x + eps) > 1.0, 1.0, limit / (x + eps)).to(tl.float32)
    if tl.program_id(0) == 0:
        tl.store(out, factor)
    if MULTIPLIES:
        b = tl.program_id(0) + start
        t = tl.load(ids + b).to(tl.int64)
        i = (b - tl.load(rows + t * ROW + FIRST_BLOCK)) * BLOCK + tl.arange(0, BLOCK)
        mask = i < tl.load(rows + t * ROW + SIZE)
        at, code = tl.load(given + 2 * t), tl.load(given + 2 * t + 1)
        store(at, code, i, mask, load(at, code, i, mask, BLOCK) * factor)


@triton.jit
def factors(
    rows, given, groups, found, inverse, clip, out, RULE: tl.constexpr, SKIPS: tl.constexpr, SCALED: tl.constexpr,
    CLIPPED: tl.constexpr,
):  # fmt: skip
    """Count a row's step, and compute what its elements are multiplied by; one program a row."""
    t = tl.program_id(0).to(tl.int64)
    steps = tl.load(given + 2 * t + 1) != 0
    if SKIPS:
        steps = steps & (tl.load(found) == 0.0)
    if steps:
        group, c = groups + tl.load(rows + t * ROW + GROUP) * OPTIONS, out + t * FACTORS
        numbers, at = group.to(tl.pointer_type(tl.float64)), tl.load(rows + t * ROW + STEP)
        count, first = tl.load(numbers + COUNT), tl.load(numbers + IS_FIRST) != 0.0
        if at != 0:
            own = tl.load(at.to(tl.pointer_type(tl.float32))) + 1.0
            tl.store(at.to(tl.pointer_type(tl.float32)), own)
            count = own.to(tl.float64)
            first = own == 1.0
        elif tl.load(group + COUNT_CODE) != 0:
            count = number(tl.load(group + COUNT_AT), tl.load(group + COUNT_CODE))
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
        beta1, beta2 = tl.load(numbers + BETA1), tl.load(numbers + BETA2)
        decay, corrects = tl.load(numbers + DECAY), (tl.load(numbers + CORRECTS) != 0.0) & (count > 0.0)
        keep1, add1 = beta1, tl.where(tl.load(numbers + AVERAGES) != 0.0, 1.0 - beta1, 1.0)
        push = tl.load(numbers + NESTEROV)
        if RULE == "sgd":
            keep1 = tl.load(numbers + MOMENTUM)
            add1 = tl.where(keep1 == 0.0, 1.0, 1.0 - tl.load(numbers + DAMPENING))
            push = tl.where(keep1 == 0.0, 0.0, push)
        tl.store(c + FACTOR, factor)
        tl.store(c + RATE, lr)
        if RULE == "adagrad":
            tl.store(c + RATE, lr / (1.0 + (count - 1.0) * tl.load(numbers + LR_DECAY)))
        tl.store(c + SHRINK, 1.0 - lr * decay)
        tl.store(c + KEEP1, keep1)
        tl.store(c + ADD1, add1)
        tl.store(c + KEEP2, beta2)
        tl.store(c + ADD2, 1.0 - beta2)
        tl.store(c + SMALL, tl.load(numbers + EPS))
        tl.store(c + HAT1, 1.0 / tl.where(corrects, 1.0 - power(beta1, count), 1.0))
        tl.store(c + HAT2, 1.0 / tl.where(corrects, 1.0 - power(beta2, count), 1.0))
        tl.store(c + PUSH, push)
        tl.store(c + WIDEST, tl.load(numbers + AMSGRAD))
        tl.store(c + FIRST, tl.where(first, 1.0, 0.0).to(tl.float64))
        tl.store(c + RATIO, lr)
        tl.store(c + WEIGHT_DECAY, decay)


@triton.jit
def of(c, word, x):
    """Return a factor of the row in the dtype in which ``x`` is computed."""
    return tl.load(c + word).to(x.dtype)


@triton.jit
def rounded(x):
    """Return ``x`` as fp32 keeps it, in the dtype of ``x``: what a later pass reads."""
    return x.to(tl.float32).to(x.dtype)


@triton.jit
def moments(p, g, m, v, c, DECOUPLED: tl.constexpr):
    """Return the next moments of Adam and LAMB. Names: parameter, gradient, first and second moment, factors."""
    if not DECOUPLED:
        g = g + of(c, WEIGHT_DECAY, p) * p
    m = of(c, KEEP1, p) * m + of(c, ADD1, p) * g
    v = of(c, KEEP2, p) * v + of(c, ADD2, p) * g * g
    return m, v


@triton.jit
def lamb_update(p, m, v, c, DECOUPLED: tl.constexpr):
    """Return the direction of LAMB, before the ratio of norms."""
    update = m * of(c, HAT1, m) / (tl.sqrt(v * of(c, HAT2, m)) + of(c, SMALL, m))
    if DECOUPLED:
        update = update + of(c, WEIGHT_DECAY, m) * p
    return update


@triton.jit
def stepped(p, g, m, v, w, c, RULE: tl.constexpr, DECOUPLED: tl.constexpr, LATE: tl.constexpr):
    """Return parameter and states after a step. ``LATE``: SGD adds the decay to the update; see ``factors`` for it."""
    decay = of(c, WEIGHT_DECAY, p)
    if RULE == "sgd":
        if not LATE:
            g = g + decay * p
        m = tl.where(of(c, FIRST, p) != 0.0, g, of(c, KEEP1, p) * m + of(c, ADD1, p) * g)
        g = tl.where(of(c, PUSH, p) != 0.0, g + of(c, KEEP1, p) * m, m)
        if LATE:
            g = g + decay * p
        p = p - of(c, RATE, p) * g
    elif RULE == "adam":
        m, v = moments(p, g, m, v, c, DECOUPLED)
        if DECOUPLED:
            p = p * of(c, SHRINK, p)
        w = tl.where((v > w) | (v != v), v, w)
        second = tl.where(of(c, WIDEST, p) != 0.0, w, v)
        size = tl.sqrt(second * of(c, HAT2, p)) + of(c, SMALL, p)
        p = p - of(c, RATE, p) * of(c, HAT1, p) * m / size
    elif RULE == "adagrad":
        if not DECOUPLED:
            g = g + decay * p
        m = m + g * g
        update = g / (tl.sqrt(m) + of(c, SMALL, p))
        if DECOUPLED:
            update = update + decay * p
        p = p - of(c, RATE, p) * update
    else:  # NovoGrad; the ratio is 1 / (its norm of this tensor + eps)
        if not DECOUPLED:
            g = g * of(c, RATIO, p) + decay * p
        m = of(c, KEEP1, p) * m + of(c, ADD1, p) * g
        update = m * of(c, HAT1, p)
        if DECOUPLED:
            update = update * of(c, RATIO, p) + decay * p
        p = p - of(c, RATE, p) * update
    return p, m, v, w


@triton.jit
def step(
    rows, given, ids, found, cs, first, second, RULE: tl.constexpr, DECOUPLED: tl.constexpr, LATE: tl.constexpr,
    SKIPS: tl.constexpr, PHASE: tl.constexpr, BLOCK: tl.constexpr, WORK: tl.constexpr,
):  # fmt: skip
    """Step a block in the dtype ``WORK``: ``PHASE`` 1 of LAMB moves moments and sums squares, 2 moves the weights."""
    b = tl.program_id(0)
    t = tl.load(ids + b).to(tl.int64)
    grad_code = tl.load(given + 2 * t + 1)
    steps = grad_code != 0
    if SKIPS:
        steps = steps & (tl.load(found) == 0.0)
    if steps:
        row, c = rows + t * ROW, cs + t * FACTORS
        i = (b - tl.load(row + FIRST_BLOCK)) * BLOCK + tl.arange(0, BLOCK)
        mask = i < tl.load(row + SIZE)
        p_at, p_code = tl.load(row + PARAM), tl.load(row + PARAM_CODE)
        m_at, v_at, w_at = tl.load(row + STATE), tl.load(row + STATE + 1), tl.load(row + STATE + 2)
        code = tl.load(row + STATE_CODE)
        m_code, v_code = tl.where(m_at != 0, code, 0), tl.where(v_at != 0, code, 0)
        w_code = tl.where(w_at != 0, code, 0)
        p = load(p_at, p_code, i, mask, BLOCK).to(WORK)
        m = load(m_at, m_code, i, mask, BLOCK).to(WORK)
        if RULE == "lamb":
            v = load(v_at, v_code, i, mask, BLOCK).to(WORK)
            if PHASE == 1:
                g = load(tl.load(given + 2 * t), grad_code, i, mask, BLOCK).to(WORK) * of(c, FACTOR, p)
                m, v = moments(p, g, m, v, c, DECOUPLED)
                m, v = rounded(m), rounded(v)
                store(m_at, m_code, i, mask, m.to(tl.float32))
                store(v_at, v_code, i, mask, v.to(tl.float32))
            update = tl.where(mask, lamb_update(p, m, v, c, DECOUPLED), 0.0)
            if PHASE == 1:
                tl.store(first + b, tl.sum(p.to(tl.float64) * p.to(tl.float64), 0))
                tl.store(second + b, tl.sum(update.to(tl.float64) * update.to(tl.float64), 0))
            else:
                x = (p - of(c, RATIO, p) * update).to(tl.float32)
                store(p_at, p_code, i, mask, x)
                store(tl.load(row + LOW), tl.load(row + LOW_CODE), i, mask, x)
        else:
            g = load(tl.load(given + 2 * t), grad_code, i, mask, BLOCK).to(WORK) * of(c, FACTOR, p)
            v, w = p, p
            if RULE == "adam":
                v = load(v_at, v_code, i, mask, BLOCK).to(WORK)
                w = load(w_at, w_code, i, mask, BLOCK).to(WORK)
            p, m, v, w = stepped(p, g, m, v, w, c, RULE, DECOUPLED, LATE)
            x = p.to(tl.float32)
            store(p_at, p_code, i, mask, x)
            store(tl.load(row + LOW), tl.load(row + LOW_CODE), i, mask, x)
            store(m_at, m_code, i, mask, m.to(tl.float32))
            if RULE == "adam":
                store(v_at, v_code, i, mask, v.to(tl.float32))
                store(w_at, w_code, i, mask, w.to(tl.float32))


@triton.jit
def by_row(
    rows, given, groups, found, first, second, cs, RULE: tl.constexpr, SKIPS: tl.constexpr, NVLAMB: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Make of the sums of a row's blocks the ratio of LAMB, or the moving norm of NovoGrad; one program a row."""
    t = tl.program_id(0).to(tl.int64)
    steps = tl.load(given + 2 * t + 1) != 0
    if SKIPS:
        steps = steps & (tl.load(found) == 0.0)
    if steps:
        row, c = rows + t * ROW, cs + t * FACTORS
        start, count = tl.load(row + FIRST_BLOCK), tl.load(row + BLOCKS)
        zeros = tl.zeros([CHUNK], tl.float64)
        one, other, largest = zeros, zeros, zeros
        for begin in range(0, count, CHUNK):
            i = begin + tl.arange(0, CHUNK)
            part = tl.load(first + start + i, mask=i < count, other=0.0)
            one += part
            if RULE == "lamb":
                other += tl.load(second + start + i, mask=i < count, other=0.0)
            else:
                most = tl.load(second + start + i, mask=i < count, other=0.0)
                largest = tl.where((most != most) | (most > largest), most, largest)
        if RULE == "lamb":
            weight, update, lr = tl.sqrt(tl.sum(one, 0)), tl.sqrt(tl.sum(other, 0)), tl.load(c + RATE)
            scaled = (weight != 0.0) & (update != 0.0)
            if not NVLAMB:
                scaled = scaled & (tl.load(c + WEIGHT_DECAY) != 0.0)
            tl.store(c + RATIO, tl.where(scaled, lr * weight / tl.where(scaled, update, 1.0), lr))
        else:
            numbers = (groups + tl.load(row + GROUP) * OPTIONS).to(tl.pointer_type(tl.float64))
            at = tl.load(row + STATE + 1).to(tl.pointer_type(tl.float32))
            size, keep, old = tl.abs(tl.load(c + FACTOR)), tl.load(c + KEEP2), tl.load(at).to(tl.float64)
            fresh = (tl.load(c + FIRST) != 0.0) & (tl.load(numbers + FROM_ZERO) == 0.0)
            if tl.load(numbers + BY_LARGEST) != 0.0:
                norm = joined(largest, "inf") * size
                new = tl.where(fresh, norm, keep * old + (1.0 - keep) * norm)
            else:
                norm = tl.sqrt(tl.sum(one, 0)) * size
                new = tl.where(fresh, norm, tl.sqrt(keep * old * old + (1.0 - keep) * norm * norm))
            new = rounded(new)
            tl.store(at, new.to(tl.float32))
            tl.store(c + RATIO, 1.0 / (new * tl.sqrt(tl.load(c + HAT2)) + tl.load(c + SMALL)))
