"""The plan for compilers without fp64, unsigned integers and pointers made of integers: a launch for each tensor.

Tensors are ordinary arguments of the kernels. All factors of a step are made before it by small operators of torch, in
fp32, on the device. ``xamp.onebyone.kernels`` steps by the rules of ``xamp.onepass.kernels``, in fp32.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from xamp.onepass.plan import Grads, Hyper, Plan, Scalar, on_device
from xamp.onepass.rules import Rule, lies_on, options_of

__all__ = ["OneByOne", "corrections", "logarithm"]

_RATE, _SHRINK, _HATS, _FIRST, _DECAY, _COUNT = 1, 2, slice(8, 10), 12, 14, 15  # words of a row: see `kernels`
_HIGH, _LOW, _CORRECTS, _WIDTH = slice(16, 18), slice(18, 20), 20, 21
_PROGRAMS = 256  # at most, in a launch: several for each core of chips that have few and start each program by itself
_TINY = 2.0**-126


class OneByOne(Plan):
    """A :class:`Plan` for SGD and Adam. ``launches`` counts one of the check and one of the step for each tensor.

    Raises:
        ValueError: as a plan does; another rule.
    """

    def _make_tables(self) -> None:
        if self.rule.name not in ("sgd", "adam"):
            raise ValueError(f"Plan: {self.rule.name} has no kernel with a launch for each tensor")
        blocks = [-(-row.param.numel() // self._block) for row in self.rows]
        self._parts = torch.zeros((max(1, sum(blocks)), 3), dtype=torch.float32, device=self.device)
        self._at = [(sum(blocks[:t]), max(1, min(blocks[t], _PROGRAMS))) for t in range(len(blocks))]
        self._in_place_rows = torch.tensor([row.in_place for row in self.rows], device=self.device)
        self._groups_of = torch.tensor([row.group for row in self.rows], device=self.device)
        counted = [t for t, row in enumerate(self.rows) if row.step is not None]
        self._counted = torch.tensor(counted, dtype=torch.int64, device=self.device)
        self._counts = [row.step.detach().reshape(()) for row in self.rows if row.step is not None]
        self._read = [[_bits(t) for t in (row.param, row.low, *row.states) if t is not None] for row in self.rows]
        self._one = torch.ones((), dtype=torch.float32, device=self.device)
        self.tables = self._new_tables(self._groups * _WIDTH, self.device, torch.float32)

    @torch.no_grad()
    def check(self, grads: Grads, found_inf: torch.Tensor, hyper: Any = None, inv_scale: Scalar = None) -> None:
        """See :meth:`Plan.check`; ``hyper`` is not needed."""
        del hyper
        self.launches = 0
        self._parts.zero_()
        for grad, (first, programs) in zip(grads, self._at, strict=True):
            if grad is not None:
                given = _bits(grad), grad.numel(), self._parts, first
                self._launch("check", programs, *given, BLOCK=self._block)
        found_inf.copy_(torch.maximum(found_inf, self._parts[:, 2].amax()))
        if inv_scale is not None:
            self._multiply(grads, inv_scale)

    def checked_norm(self, inv_scale: torch.Tensor | None = None) -> torch.Tensor:
        """See :meth:`Plan.checked_norm`. The squares of a block are in units of its largest value's."""
        sizes, squares, _ = self._parts.unbind(1)
        largest = sizes.amax().clamp(min=_TINY)
        # Before the ratio, which may be 0, meets an inf.
        total = torch.where(squares.isfinite(), squares * (sizes / largest).square(), squares).sum()
        return total.sqrt() * (largest if inv_scale is None else largest * inv_scale.reshape(()))

    @torch.no_grad()
    def norm(self, grads: Grads, inv_scale: Scalar = None, kind: float = 2.0, clip: Scalar = None) -> torch.Tensor:
        """See :meth:`Plan.norm`: by torch's operators, with a temporary of each gradient."""
        pairs = [(r, g) for r, g in zip(self.rows, grads, strict=True) if g is not None and g.numel()]
        factors = [factor for factor in (inv_scale, clip) if factor is not None]
        parts = [_norm(grad, kind, () if row.in_place else factors) for row, grad in pairs]
        return _norm(torch.stack(parts), kind) if parts else torch.zeros_like(self._one)

    @torch.no_grad()
    def clip_factor(self, grads: Grads, norm: torch.Tensor, limit: float, eps: float = 1e-6) -> torch.Tensor:
        """See :meth:`Plan.clip_factor`."""
        factor = torch.clamp(limit / (norm + eps), max=1.0)
        self._multiply(grads, factor)
        return factor

    def _multiply(self, grads: Grads, factor: torch.Tensor) -> None:
        for row, grad in zip(self.rows, grads, strict=True):
            if row.in_place and grad is not None:
                grad.detach().mul_(factor.reshape(()))

    @torch.no_grad()
    def prepare(
        self, grads: Grads, hyper: Hyper, found_inf: Scalar = None, inv_scale: Scalar = None, clip: Scalar = None
    ) -> None:
        """See :meth:`Plan.prepare`."""
        factors = self._factors_of(hyper, found_inf, [t for t in (inv_scale, clip) if t is not None])
        found = self._one if found_inf is None else found_inf
        rule = {"RULE": self.rule.name, "DECOUPLED": self.rule.decoupled, "LATE": self.rule.wd_after_momentum}
        self._todo, self._base = [], self.launches
        for t, (row, grad) in enumerate(zip(self.rows, grads, strict=True)):
            if grad is None:
                continue
            given, states = [*self._read[t]], len(row.states)
            param, low = given[0], given[1 if row.low is not None else 0]
            held = [*given[len(given) - states :], *[param] * (3 - states)]
            count = param if row.step is None else row.step
            names = {"STATES": states, "LOW": row.low is not None, "COUNTS": row.step is not None}
            flags = {**rule, **names, "SKIPS": found_inf is not None, "WIDTH": _WIDTH, "BLOCK": self._block}
            arguments = param, low, _bits(grad), *held, count, row.param.numel(), found, factors, t
            self._todo.append(functools.partial(self._launch, "step", self._at[t][1], *arguments, **flags))

    def _factors_of(
        self, hyper: Sequence[Mapping[str, Any]], found: torch.Tensor | None, factors: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Return the factors of each row, fp32: the words of ``kernels``, and the row's count after the step."""
        groups = self._numbers_of(hyper)
        rows = groups.index_select(0, self._groups_of)
        if self._counts:
            old = torch.stack(self._counts)
            new = old + 1.0
            rows[self._counted, _FIRST] = (new == 1.0).float()
            rows[self._counted, _COUNT] = new
        count = rows[:, _COUNT].clone()
        if self.rule.name == "adam":
            right = 1.0 / corrections(count[:, None], rows[:, _HIGH], rows[:, _LOW])
            corrects = (rows[:, _CORRECTS] != 0.0) & (count > 0.0)
            rows[:, _HATS] = torch.where(corrects[:, None], right, torch.ones_like(right))
        for factor in factors:
            rows[:, 0] *= torch.where(self._in_place_rows, self._one, factor.reshape(()))
        if self._counts and found is not None:  # a skipped step writes the count that is there
            rows[self._counted, _COUNT] = torch.where(found.reshape(()) == 0.0, new, old)
        return rows

    def _numbers_of(self, hyper: Sequence[Mapping[str, Any]]) -> torch.Tensor:
        """Return what each group's options say, on the device; a new tensor."""
        words = [word for group in hyper[: self._groups] for word in _words(self.rule, group, self.device)]
        groups = self.tables.send(words)[: len(words)].reshape(-1, _WIDTH).clone()
        for number, group in enumerate(hyper[: self._groups]):
            lr: Any = group.get("lr")
            count: Any = group.get("step")
            if lies_on(lr, self.device):
                groups[number, _RATE] = rate = lr.detach().reshape(()).float()
                groups[number, _SHRINK] = 1.0 - rate * groups[number, _DECAY]
            if lies_on(count, self.device):
                groups[number, _COUNT] = count.detach().reshape(()).float()
        return groups

    def _launch(self, name: str, programs: int, *args: Any, **constants: Any) -> None:
        from xamp.onebyone import kernels  # Triton is imported there

        with on_device(self.device):
            getattr(kernels, name)[(programs,)](*args, **constants)
        self.launches += 1


def _norm(values: torch.Tensor, kind: float, factors: Sequence[torch.Tensor] = ()) -> torch.Tensor:
    """Return the norm of ``values`` times ``factors``, finite where that is: the largest is taken out of it."""
    wide = values.detach().float()
    largest = wide.abs().amax().clamp(min=_TINY, max=torch.finfo(torch.float32).max)
    norm: torch.Tensor = torch.linalg.vector_norm(wide / largest, kind)
    for factor in factors:
        largest = largest * factor.reshape(())
    return norm * largest


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


def _words(rule: Rule, group: Mapping[str, Any], device: torch.device) -> list[float]:
    numbers, _ = options_of(group, device)
    lr, decay, beta1, beta2, eps, momentum, dampening, nesterov, maximize, amsgrad, corrects = numbers[:11]
    first, count = numbers[14], numbers[16]
    keep, add, push, logs = beta1, 1.0 - beta1, 0.0, [0.0] * 4
    if rule.name == "sgd":
        keep, add, push = momentum, 1.0 - dampening if momentum else 1.0, nesterov if momentum else 0.0
    else:
        logs = [part for pair in zip(logarithm(beta1), logarithm(beta2), strict=True) for part in pair]
    factors = [-1.0 if maximize else 1.0, lr, 1.0 - lr * decay, keep, add, beta2, 1.0 - beta2, eps, 1.0, 1.0, push]
    return [*factors, amsgrad, first, lr, decay, count, *logs, corrects]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as the kernels read it: bf16 as its patterns."""
    return tensor.detach().view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor.detach()
