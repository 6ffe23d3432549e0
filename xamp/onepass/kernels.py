"""The kernels. Imported when the first plan is built, since Triton is imported here.

Arithmetic is in fp32, that of a step's numbers in fp64, once for each tensor. bf16 goes through integers: widened right
after it is loaded and rounded by :func:`rounded`, the same on each device and in Triton's interpreter.

Most functions serve two forms, by ``WIDE``: one launch over all tensors, whose pointers stand in tables as integers, and
one launch for each tensor with its pointers as arguments. The second form keeps to what compilers without fp64, unsigned
numbers and pointers made of integers have. ``tables`` says what the columns of the tables are.
"""

import triton
import triton.language as tl

NONE = tl.constexpr(3)  # a dtype's code: there is no tensor. 0 is fp32, 1 fp16, 2 bf16
WIDTH = tl.constexpr(12)  # numbers of a tensor, see rules.numbers


@triton.jit
def widened(bits):
    """Return bf16, given as int16, in fp32."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def rounded(x):
    """Return fp32 as bf16, in int16: to the nearest, ties to even; each nan is torch's, 0x7FC0."""
    bits = x.to(tl.int32, bitcast=True)
    near = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x != x, 0x7FC0, near).to(tl.int16)


@triton.jit
def _read(at, i, k, code, WIDE: tl.constexpr):
    if WIDE:
        if code == 0:
            x = tl.load(at.to(tl.pointer_type(tl.float32)) + i, mask=k, other=0.0)
        elif code == 1:
            x = tl.load(at.to(tl.pointer_type(tl.float16)) + i, mask=k, other=0.0).to(tl.float32)
        else:
            x = widened(tl.load(at.to(tl.pointer_type(tl.int16)) + i, mask=k, other=0))
    else:
        x = tl.load(at + i, mask=k, other=0)
        if at.dtype.element_ty == tl.int16:
            x = widened(x)
        else:
            x = x.to(tl.float32)
    return x


@triton.jit
def _write(at, i, k, code, x, WIDE: tl.constexpr):
    if WIDE:
        if code == 0:
            tl.store(at.to(tl.pointer_type(tl.float32)) + i, x, mask=k)
        elif code == 1:
            tl.store(at.to(tl.pointer_type(tl.float16)) + i, x.to(tl.float16), mask=k)
        elif code == 2:
            tl.store(at.to(tl.pointer_type(tl.int16)) + i, rounded(x), mask=k)
    elif code != NONE:
        if at.dtype.element_ty == tl.int16:
            tl.store(at + i, rounded(x), mask=k)
        else:
            tl.store(at + i, x.to(at.dtype.element_ty), mask=k)


@triton.jit
def _over_root(x, square, eps, WIDE: tl.constexpr):
    """Return ``x / (sqrt(square) + eps)``, each operation rounded to the nearest where the compiler has that."""
    if WIDE:
        y = tl.div_rn(x, tl.sqrt_rn(square) + eps)
    else:
        y = x / (tl.sqrt(square) + eps)
    return y


@triton.jit
def _unit(largest):
    """Return a power of two near ``largest``, from 2**-100 to 2**100: squares of what is divided by it are finite."""
    unit = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.minimum(tl.maximum(unit, 7.888609052210118e-31), 1.2676506002282294e30)


@triton.jit
def _sums(x, power, KIND: tl.constexpr):
    """Return the largest magnitude, nan left out, and the sum of powers in units of :func:`_unit`: nan if one is."""
    size = tl.abs(x)
    largest = tl.max(tl.where(size == size, size, 0.0), 0)
    size = size * (1.0 / _unit(largest))
    if KIND == 2:
        size = size * size
    elif KIND == 3:
        size = tl.where(size == 0.0, 0.0, tl.exp2(power * tl.log2(tl.where(size == 0.0, 1.0, size))))
    return largest, tl.sum(size, 0)


@triton.jit
def _norm(largests, totals, first, count, power, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Return the norm of ``count`` blocks, as two factors: a unit and the norm in it. ``KIND`` 0: the largest."""
    top = tl.zeros((BLOCK,), tl.float32)
    lost = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, count, BLOCK):
        j = start + tl.arange(0, BLOCK)
        top = tl.maximum(top, tl.load(largests + first + j, mask=j < count, other=0.0))
    largest = tl.max(top, 0)
    unit = _unit(largest)
    for start in range(0, count, BLOCK):
        j = start + tl.arange(0, BLOCK)
        k = j < count
        total = tl.load(totals + first + j, mask=k, other=0.0)
        part = _unit(tl.load(largests + first + j, mask=k, other=0.0)) * (1.0 / unit)
        if KIND == 0:
            lost += tl.where(total != total, total, 0.0)
        elif KIND == 1:
            lost += total * part
        elif KIND == 2:
            lost += total * part * part
        else:
            lost += total * tl.exp2(power * tl.log2(part))
    found = tl.sum(lost, 0)
    if KIND == 0:
        found = found + largest
        unit = unit * 0.0 + 1.0
    elif KIND == 2:
        found = tl.sqrt(found)
    elif KIND == 3:
        found = tl.where(found > 0.0, tl.exp2(tl.log2(tl.where(found > 0.0, found, 1.0)) / power), found)
    return unit, found


@triton.jit
def _check(at, i, k, code, b, found, largests, totals, power, FLAG: tl.constexpr, KIND: tl.constexpr, WIDE: tl.constexpr):
    largest, total = _sums(_read(at, i, k, code, WIDE), power, KIND)
    tl.store(largests + b, largest)
    tl.store(totals + b, total)
    if FLAG:
        if (total != total) | (largest == float("inf")):
            tl.store(found, 1.0)


@triton.jit
def check_rows(
    rows, sent, ids, offsets, found, largests, totals, power, n,
    FLAG: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write for each block of the gradients what :func:`_sums` says; raise ``found`` at inf and nan if ``FLAG``."""
    b = tl.program_id(0)
    t = tl.load(ids + b)
    code = tl.load(sent + n + t)
    if code == NONE:
        tl.store(largests + b, 0.0)
        tl.store(totals + b, 0.0)
    else:
        i = tl.load(offsets + b) + tl.arange(0, BLOCK)
        k = i < tl.load(rows + 6 * n + t)
        _check(tl.load(sent + t), i, k, code, b, found, largests, totals, power, FLAG, KIND, True)


@triton.jit
def check_one(
    grad, found, largests, totals, power, numel, FLAG: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    """Do as :func:`check_rows` for one tensor; ``largests`` and ``totals`` begin at its first block."""
    for b in range(tl.program_id(0), tl.cdiv(numel, BLOCK), tl.num_programs(0)):
        i = (tl.zeros((BLOCK,), tl.int64) + b) * BLOCK + tl.arange(0, BLOCK)
        _check(grad, i, i < numel, 0, b, found, largests, totals, power, FLAG, KIND, False)


@triton.jit
def finish(largests, totals, inv_scale, out, count, power, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Write the norm over all blocks, times ``inv_scale``. One program."""
    unit, found = _norm(largests, totals, 0, count, power, KIND, BLOCK)
    tl.store(out, unit * tl.load(inv_scale) * found)


@triton.jit
def clip(norm, out, limit, eps):
    """Write ``min(1, limit / (norm + eps))``; nan stays."""
    factor = limit / (tl.load(norm) + eps)
    tl.store(out, tl.where(factor > 1.0, 1.0, factor))


@triton.jit
def _power(base, exponent):
    result = base * 0.0 + 1.0
    for _ in range(31):
        result = tl.where((exponent & 1) != 0, result * base, result)
        base = base * base
        exponent = exponent >> 1
    return result


@triton.jit
def _number(record, j, live):
    return tl.load(record + j, mask=live, other=0).to(tl.float64, bitcast=True)


@triton.jit
def numbers(rows, sent, coefs, found, inv_scale, clip, n, RULE: tl.constexpr, BLOCK: tl.constexpr):
    """Count the step, and write what it multiplies by, computed in fp64: the twin of ``rules.numbers``."""
    if tl.load(found) == 0.0:
        t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        live = t < n
        live = live & (tl.load(sent + n + t, mask=live, other=NONE) != NONE)
        record = sent + 2 * n + 10 * tl.load(rows + 8 * n + t, mask=live, other=0)
        flags = tl.load(record + 7, mask=live, other=0)
        lr, wd, b1, b2 = _number(record, 0, live), _number(record, 1, live), _number(record, 2, live), _number(record, 3, live)
        eps, step = _number(record, 4, live), _number(record, 5, live)
        at = tl.load(record + 8, mask=live, other=0)
        given = tl.load(at.to(tl.pointer_type(tl.float32)), mask=at != 0, other=0.0)
        lr = tl.where(at != 0, given.to(tl.float64), lr)
        at = tl.load(record + 9, mask=live, other=0)
        given = tl.load(at.to(tl.pointer_type(tl.int32)), mask=at != 0, other=0)
        count = tl.where((flags & 2048) != 0, given.to(tl.float64), given.to(tl.float32, bitcast=True).to(tl.float64))
        step = tl.where(at != 0, count, step)
        at = tl.load(rows + 5 * n + t, mask=live, other=0)
        own = at.to(tl.pointer_type(tl.float32))
        before = tl.load(own, mask=at != 0, other=0.0)
        tl.store(own, before + 1.0, mask=at != 0)
        step = tl.where(at != 0, (before + 1.0).to(tl.float64), step)
        first = tl.where(at != 0, before == 0.0, (flags & 64) != 0)
        scale = tl.load(inv_scale).to(tl.float64) * tl.load(clip).to(tl.float64)
        scale = tl.where((flags & 1) != 0, -scale, scale)
        inside = tl.where((flags & 8) != 0, 0.0, wd)
        outside, new, keep, weight, size, extra = wd - inside, 1.0 - b1, b2, 1.0 - b2, lr, 1.0 - lr * (wd - inside)
        kind = tl.where((flags & 4) != 0, 1, 0)
        if RULE == "sgd":
            outside = tl.where((flags & 256) != 0, wd, 0.0)
            inside = wd - outside
            new, keep = tl.where(first, 1.0, 1.0 - b2), tl.where(first, 0.0, b1)
            weight = tl.where((flags & 2) != 0, b1, 0.0)
        elif RULE == "adagrad":
            outside, size = extra, lr / (1.0 + (step - 1.0) * _number(record, 6, live))
        else:
            corrects = (flags & 16) != 0
            c1 = tl.where(corrects, 1.0 - _power(b1, step.to(tl.int32)), 1.0)
            root = tl.sqrt(tl.where(corrects, 1.0 - _power(b2, step.to(tl.int32)), 1.0))
            if RULE == "adam":
                outside, size, eps = extra, lr * root / c1, eps * root
            else:
                new = tl.where((flags & 32) != 0, new, 1.0)
                if RULE == "lamb":
                    size, eps = root / c1, eps * root
                    kind = tl.where(((flags & 128) != 0) | (wd != 0.0), 1, 0)
                else:
                    size, extra = 1.0 / c1, root
                    kind = tl.where(first & ((flags & 512) == 0), 1, 0) + tl.where((flags & 1024) != 0, 2, 0)
                    kind = kind + tl.where((flags & 8) == 0, 4, 0)
        to = coefs + t * WIDTH
        tl.store(to, scale.to(tl.float32), mask=live)
        tl.store(to + 1, inside.to(tl.float32), mask=live)
        tl.store(to + 2, outside.to(tl.float32), mask=live)
        tl.store(to + 3, new.to(tl.float32), mask=live)
        tl.store(to + 4, keep.to(tl.float32), mask=live)
        tl.store(to + 5, weight.to(tl.float32), mask=live)
        tl.store(to + 6, size.to(tl.float32), mask=live)
        tl.store(to + 7, eps.to(tl.float32), mask=live)
        tl.store(to + 8, b1.to(tl.float32), mask=live)
        tl.store(to + 9, lr.to(tl.float32), mask=live)
        tl.store(to + 10, extra.to(tl.float32), mask=live)
        tl.store(to + 11, kind.to(tl.float32), mask=live)


@triton.jit
def _with_decay(g, p, decay):
    return tl.where(decay != 0.0, g + decay * p, g)


@triton.jit
def _update(
    at_g, at_p, at_low, at_a, at_b, at_c, i, k, code, codes, c, sums, b, blocks, ratio,
    RULE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Step one block, or one of the two passes of LAMB (the second: ``lamb apply``) over it."""
    code_p, code_low, code_s = codes & 3, (codes >> 2) & 3, (codes >> 4) & 3
    p = _read(at_p, i, k, code_p, WIDE)
    if RULE == "lamb apply":
        m = _read(at_a, i, k, code_s, WIDE)
        v = _read(at_b, i, k, code_s, WIDE)
        update = _over_root(m * tl.load(c + 6), v, tl.load(c + 7), WIDE)
        p = p - tl.load(ratio) * _with_decay(update, p, tl.load(c + 2))
    else:
        g = _read(at_g, i, k, code, WIDE) * tl.load(c)
        if RULE != "novograd":
            g = _with_decay(g, p, tl.load(c + 1))
        if RULE == "sgd":
            if tl.load(c + 8) != 0.0:
                keep, ahead = tl.load(c + 4), tl.load(c + 5)
                m = _read(at_a, i, k, code_s, WIDE)
                m = tl.where(keep != 0.0, keep * m, 0.0) + tl.load(c + 3) * g
                _write(at_a, i, k, code_s, m, WIDE)
                g = tl.where(ahead != 0.0, g + ahead * m, m)
            p = p - tl.load(c + 6) * _with_decay(g, p, tl.load(c + 2))
        elif RULE == "adagrad":
            v = _read(at_a, i, k, code_s, WIDE) + g * g
            _write(at_a, i, k, code_s, v, WIDE)
            p = tl.load(c + 2) * p - tl.load(c + 6) * _over_root(g, v, tl.load(c + 7), WIDE)
        elif RULE == "novograd":
            inside = (tl.load(c + 11).to(tl.int32) & 4) != 0
            scale = tl.load(ratio)
            g = _with_decay(g / tl.where(inside, scale, 1.0), p, tl.load(c + 1))
            m = tl.load(c + 8) * _read(at_a, i, k, code_s, WIDE) + tl.load(c + 3) * g
            _write(at_a, i, k, code_s, m, WIDE)
            update = m * tl.load(c + 6) / tl.where(inside, 1.0, scale)
            p = p - tl.load(c + 9) * _with_decay(update, p, tl.load(c + 2))
        else:
            m = _read(at_a, i, k, code_s, WIDE)
            v = tl.load(c + 4) * _read(at_b, i, k, code_s, WIDE) + tl.load(c + 5) * g * g
            if RULE == "adam":
                m = m + tl.load(c + 3) * (g - m)
            else:
                m = tl.load(c + 8) * m + tl.load(c + 3) * g
            _write(at_a, i, k, code_s, m, WIDE)
            _write(at_b, i, k, code_s, v, WIDE)
            if RULE == "adam":
                if tl.load(c + 11) != 0.0:
                    top = _read(at_c, i, k, code_s, WIDE)
                    v = tl.where((top >= v) | (top != top), top, v)
                    _write(at_c, i, k, code_s, v, WIDE)
                p = tl.load(c + 2) * p - tl.load(c + 6) * _over_root(m, v, tl.load(c + 7), WIDE)
            else:
                update = _with_decay(_over_root(m * tl.load(c + 6), v, tl.load(c + 7), WIDE), p, tl.load(c + 2))
                largest, total = _sums(p, 2.0, 2)
                tl.store(sums + b, largest)
                tl.store(sums + blocks + b, total)
                largest, total = _sums(tl.where(k, update, 0.0), 2.0, 2)
                tl.store(sums + 2 * blocks + b, largest)
                tl.store(sums + 3 * blocks + b, total)
    if RULE != "lamb":
        _write(at_p, i, k, code_p, p, WIDE)
        _write(at_low, i, k, code_low, p, WIDE)


@triton.jit
def step_rows(
    rows, sent, ids, offsets, coefs, found, sums, ratios, blocks, n, RULE: tl.constexpr, BLOCK: tl.constexpr
):
    """Step all tensors that have a gradient, unless ``found`` is raised."""
    if tl.load(found) == 0.0:
        b = tl.program_id(0)
        t = tl.load(ids + b)
        code = tl.load(sent + n + t)
        if code != NONE:
            i = tl.load(offsets + b) + tl.arange(0, BLOCK)
            k = i < tl.load(rows + 6 * n + t)
            _update(
                tl.load(sent + t), tl.load(rows + t), tl.load(rows + n + t), tl.load(rows + 2 * n + t),
                tl.load(rows + 3 * n + t), tl.load(rows + 4 * n + t), i, k, code, tl.load(rows + 7 * n + t),
                coefs + t * WIDTH, sums, b, blocks, ratios + t, RULE, True,
            )  # fmt: skip


@triton.jit
def step_one(
    grad, param, low, a, b, c, codes, coefs, sums, ratio, blocks, numel, RULE: tl.constexpr, BLOCK: tl.constexpr
):
    """Step one tensor. ``sums`` begins at its first block, and has ``blocks`` numbers of each kind."""
    for j in range(tl.program_id(0), tl.cdiv(numel, BLOCK), tl.num_programs(0)):
        i = (tl.zeros((BLOCK,), tl.int64) + j) * BLOCK + tl.arange(0, BLOCK)
        _update(grad, param, low, a, b, c, i, i < numel, 0, codes, coefs, sums, j, blocks, ratio, RULE, False)


@triton.jit
def ratio_rows(rows, sent, coefs, found, sums, ratios, blocks, n, RULE: tl.constexpr, BLOCK: tl.constexpr):
    """Write for each tensor by what LAMB multiplies its update, or by what NovoGrad divides, whose norm it moves."""
    if tl.load(found) == 0.0:
        t = tl.program_id(0)
        if tl.load(sent + n + t) != NONE:
            first = tl.load(rows + 9 * n + t)
            count = tl.load(rows + 10 * n + t).to(tl.int32)
            c = coefs + t * WIDTH
            unit, norm = _norm(sums, sums + blocks, first, count, 2.0, 2, BLOCK)
            if RULE == "lamb":
                other, update = _norm(sums + 2 * blocks, sums + 3 * blocks, first, count, 2.0, 2, BLOCK)
                rate = tl.load(c + 9)
                norm = unit.to(tl.float64) * norm
                update = other.to(tl.float64) * update
                trusts = (tl.load(c + 11) != 0.0) & (norm != 0.0) & (update != 0.0)
                ratio = tl.where(trusts, rate * norm / tl.where(trusts, update, 1.0), rate)
            else:
                kind = tl.load(c + 11).to(tl.int32)
                scale = tl.abs(tl.load(c)).to(tl.float64)
                if (kind & 2) != 0:
                    unit, norm = _norm(sums, sums + blocks, first, count, 2.0, 0, BLOCK)
                size = unit * scale * norm
                at = tl.load(rows + 3 * n + t).to(tl.pointer_type(tl.float32))
                old = tl.load(at).to(tl.float64)
                keep, new = tl.load(c + 4).to(tl.float64), tl.load(c + 5).to(tl.float64)
                if (kind & 1) == 0:
                    if (kind & 2) != 0:
                        size = keep * old + new * size
                    else:
                        size = tl.sqrt(keep * old * old + new * size * size)
                tl.store(at, size.to(tl.float32))
                ratio = size / tl.load(c + 10) + tl.load(c + 7)
            tl.store(ratios + t, ratio.to(tl.float32))
