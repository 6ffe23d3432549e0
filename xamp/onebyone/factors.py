"""What the elements of each tensor are multiplied by: made by small operators of torch, in fp32, on the device.

Nothing here waits for the device: the ratio of LAMB and the norm of NovoGrad go from the parts of norms, which kernels
leave, into the factors, which the next kernels read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from xamp.onepass.plan import Hyper
from xamp.onepass.ring import PointerRing
from xamp.onepass.rules import Row, Rule, lies_on, options_of

__all__ = ["TINY", "WIDTH", "Factors", "corrections", "joined", "logarithm"]

WIDTH = 25
"""Words of a row: those that the kernels read, then what these are made of."""

TINY, _LARGEST = 2.0**-126, torch.finfo(torch.float32).max

_FACTOR, _RATE, _SHRINK, _KEEP2, _ADD2, _SMALL, _HATS, _HAT2 = 0, 1, 2, 5, 6, 7, slice(8, 10), 9  # see `kernels`
_FIRST, _RATIO, _DECAY, _COUNT, _NORM = 12, 13, 14, 15, 16
_HIGH, _LOW, _CORRECTS, _LR_DECAY, _FROM_ZERO, _BY_LARGEST = slice(17, 19), slice(19, 21), 21, 22, 23, 24


class Factors:
    """The factors of the rows of a plan.

    Args:
        rule: what a step computes.
        rows: what it steps, all on ``device``.
        device: where the factors are made and read.
        ring: sends what groups' options say, ``WIDTH`` words for each.
    """

    def __init__(self, rule: Rule, rows: Sequence[Row], device: torch.device, ring: PointerRing) -> None:
        self._rule, self._device, self._ring = rule, device, ring
        self._many = max(row.group for row in rows) + 1
        self._in_place = torch.tensor([row.in_place for row in rows], device=device)
        self._groups = torch.tensor([row.group for row in rows], device=device)
        counted = [t for t, row in enumerate(rows) if row.step is not None]
        self._counted = torch.tensor(counted, dtype=torch.int64, device=device)
        self._counts = [row.step.detach().reshape(()) for row in rows if row.step is not None]
        self._norms = [row.states[1].detach().reshape(()) for row in rows] if rule.name == "novograd" else []
        self._one = torch.ones((), dtype=torch.float32, device=device)

    def of(self, hyper: Hyper, found: torch.Tensor | None, factors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the words of each row, fp32. Gradients are multiplied by ``factors``; see :meth:`Plan.prepare`."""
        rows = self._numbers_of(hyper).index_select(0, self._groups)
        if self._counts:
            old = torch.stack(self._counts)
            new = old + 1.0
            rows[self._counted, _FIRST] = (new == 1.0).float()
            rows[self._counted, _COUNT] = new
        count = rows[:, _COUNT].clone()
        if self._rule.name == "adagrad":
            rows[:, _RATE] /= 1.0 + (count - 1.0) * rows[:, _LR_DECAY]
        elif self._rule.name != "sgd":
            right = 1.0 / corrections(count[:, None], rows[:, _HIGH], rows[:, _LOW])
            corrects = (rows[:, _CORRECTS] != 0.0) & (count > 0.0)
            rows[:, _HATS] = torch.where(corrects[:, None], right, torch.ones_like(right))
        for factor in factors:
            rows[:, _FACTOR] *= torch.where(self._in_place, self._one, factor.reshape(()))
        if self._counts and found is not None:  # a skipped step writes the count that is there
            rows[self._counted, _COUNT] = torch.where(found.reshape(()) == 0.0, new, old)
        return rows

    def take_norms(self, rows: torch.Tensor, parts: torch.Tensor, found: torch.Tensor | None) -> None:
        """Make of the parts of norms LAMB's ratio, or NovoGrad's norm and the ratio by it, in the words of each row.

        Args:
            rows: what :meth:`of` returned.
            parts: shape ``[norms, rows, programs, 2]``: of weights and updates, or of gradients as they were given.
            found: see :meth:`Plan.prepare`.
        """
        if self._rule.name == "lamb":
            (unit, squares), (other, others) = map(joined, parts)
            scaled, rate = (squares != 0.0) & (others != 0.0), rows[:, _RATE]
            if not self._rule.use_nvlamb:
                scaled &= rows[:, _DECAY] != 0.0
            rows[:, _RATIO] = torch.where(scaled, rate * (unit / other) * (squares / others).sqrt(), rate)
            return
        old, largest = torch.stack(self._norms), rows[:, _BY_LARGEST] != 0.0
        norm = _norm(*joined(parts[0]), largest, rows[:, _FACTOR].abs())
        starts = (rows[:, _FIRST] != 0.0) & (rows[:, _FROM_ZERO] == 0.0)
        new = torch.where(starts, norm, _moved(old, norm, rows[:, _KEEP2], rows[:, _ADD2], largest))
        rows[:, _RATIO] = 1.0 / (new * rows[:, _HAT2].sqrt() + rows[:, _SMALL])
        rows[:, _NORM] = new if found is None else torch.where(found.reshape(()) == 0.0, new, old)

    def _numbers_of(self, hyper: Hyper) -> torch.Tensor:
        """Return what each group's options say, on the device; a new tensor."""
        words = [word for group in hyper[: self._many] for word in _words(self._rule, group, self._device)]
        groups = self._ring.send(words)[: len(words)].reshape(-1, WIDTH).clone()
        self._ring.used()
        for number, group in enumerate(hyper[: self._many]):
            lr: Any = group.get("lr")
            count: Any = group.get("step")
            if lies_on(lr, self._device):
                groups[number, _RATE] = rate = lr.detach().reshape(()).float()
                groups[number, _SHRINK] = 1.0 - rate * groups[number, _DECAY]
            if lies_on(count, self._device):
                groups[number, _COUNT] = count.detach().reshape(()).float()
        return groups


def _words(rule: Rule, group: Mapping[str, Any], device: torch.device) -> list[float]:
    numbers, _ = options_of(group, device)
    lr, decay, beta1, beta2, eps, momentum, dampening, nesterov, maximize, amsgrad, corrects = numbers[:11]
    averages, lr_decay, from_zero, first, by_largest, count = numbers[11:]
    keep, add, push, logs = beta1, 1.0 - beta1 if averages else 1.0, 0.0, [0.0] * 4
    if rule.name == "sgd":
        keep, add, push = momentum, 1.0 - dampening if momentum else 1.0, nesterov if momentum else 0.0
    else:
        logs = [part for pair in zip(logarithm(beta1), logarithm(beta2), strict=True) for part in pair]
    factors = [-1.0 if maximize else 1.0, lr, 1.0 - lr * decay, keep, add, beta2, 1.0 - beta2, eps, 1.0, 1.0, push]
    return [*factors, amsgrad, first, lr, decay, count, 0.0, *logs, corrects, lr_decay, from_zero, by_largest]


def logarithm(beta: float) -> tuple[float, float]:
    """Return ``log(beta)`` in two parts, of which the first has 12 bits: its products with small numbers are exact."""
    value = max(math.log(beta), -200.0) if beta > 0.0 else -200.0  # of 0: its powers are 0 in fp32
    fraction, exponent = math.frexp(value)
    high = math.ldexp(round(fraction * 4096.0) / 4096.0, exponent)
    return high, value - high


def corrections(count: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Return ``1 - beta ** count`` in fp32, within 1.3e-7 of it, for whole counts below 2**24; see :func:`logarithm`.

    The logarithm of the power is ``far + near + count * low``, where the two first are exact: rounded once, not thrice.
    """
    many = torch.floor(count / 4096.0) * 4096.0
    far, near = many * high, (count - many) * high
    whole = far + near
    rest = (far - whole) + near + count * low
    found = -torch.expm1(whole)
    return found - rest * (1.0 - found)


def joined(parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest finite magnitude, and the squares in units of it, of parts, shape ``[..., programs, 2]``."""
    sizes, squares = parts.unbind(-1)
    most = sizes.amax(-1, keepdim=True).clamp(min=TINY)
    # Before the ratio, which may be 0, meets an inf.
    total = torch.where(squares.isfinite(), squares * (sizes / most).square(), squares).sum(-1)
    return most.squeeze(-1), total


def _norm(unit: torch.Tensor, squares: torch.Tensor, largest: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return the L2 norm, or the largest magnitude, of what was summed times ``factor``; inf and nan stay."""
    most = torch.where(squares.isfinite() & (squares != 0.0), torch.ones_like(unit), squares)
    return (unit * factor) * torch.where(largest, most, squares.sqrt())


def _moved(
    old: torch.Tensor, norm: torch.Tensor, keep: torch.Tensor, add: torch.Tensor, largest: torch.Tensor
) -> torch.Tensor:
    """Return NovoGrad's moving norm: the squares are taken in units of the larger part, which has no overflow."""
    old_part, new_part = keep.sqrt() * old, add.sqrt() * norm
    most = torch.maximum(old_part, new_part).clamp(min=TINY, max=_LARGEST)
    root = most * ((old_part / most).square() + (new_part / most).square()).sqrt()
    return torch.where(largest, keep * old + add * norm, root)
