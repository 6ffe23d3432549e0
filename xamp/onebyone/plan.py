"""The plan for compilers without fp64, unsigned integers and pointers made of integers: a launch for each tensor.

Tensors are ordinary arguments of the kernels. ``xamp.onebyone.kernels`` steps by the rules of ``xamp.onepass.kernels``,
in fp32, by factors that ``xamp.onebyone.factors`` makes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from xamp.onebyone.factors import TINY, WIDTH, Factors, joined
from xamp.onepass.plan import Grads, Hyper, Plan, Scalar, on_device

__all__ = ["OneByOne"]

_PROGRAMS = 256  # at most, in a launch: several for each core of chips that have few and start each program by itself
_NORMS = {"lamb": 2, "novograd": 1}  # of each row, that a step takes by itself


class OneByOne(Plan):
    """A :class:`Plan` with a launch of the check and one of the step for each tensor.

    A step by LAMB or NovoGrad has one more for each tensor, which takes norms, and counts one for what joins their
    parts.

    Raises:
        ValueError: as a plan does.
    """

    def _make_tables(self) -> None:
        blocks = [-(-row.param.numel() // self._block) for row in self.rows]
        self._programs = [max(1, min(many, _PROGRAMS)) for many in blocks]
        # Each program leaves a part of a norm: the largest magnitude, and squares in units of it.
        shape = 1 + _NORMS.get(self.rule.name, 0), len(blocks), max(self._programs), 2
        parts = torch.zeros(shape, dtype=torch.float32, device=self.device)
        self._checked, self._norms = parts[0], parts[1:]
        self._read = [
            (_bits(row.param), _bits(row.param if row.low is None else row.low), [_bits(t) for t in row.states])
            for row in self.rows
        ]
        self._one = torch.ones((), dtype=torch.float32, device=self.device)
        self.tables = self._new_tables(self._groups * WIDTH, self.device, torch.float32)
        self._multipliers = Factors(self.rule, self.rows, self.device, self.tables)

    @torch.no_grad()
    def check(self, grads: Grads, found_inf: torch.Tensor, hyper: Any = None, inv_scale: Scalar = None) -> None:
        """See :meth:`Plan.check`; ``hyper`` is not needed."""
        del hyper
        self.launches = 0
        self._checked.zero_()
        for t, grad in enumerate(grads):
            if grad is not None:
                self._launch_check(t, grad, self._checked)
        found_inf.copy_(torch.maximum(found_inf, (~self._checked[..., 1].isfinite()).any().float()))
        if inv_scale is not None:
            self._multiply(grads, inv_scale)

    def checked_norm(self, inv_scale: torch.Tensor | None = None) -> torch.Tensor:
        """See :meth:`Plan.checked_norm`."""
        largest, squares = joined(self._checked.reshape(-1, 2))
        return squares.sqrt() * (largest if inv_scale is None else largest * inv_scale.reshape(()))

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
        table = self._multipliers.of(hyper, found_inf, [t for t in (inv_scale, clip) if t is not None])
        flags = {"DECOUPLED": self.rule.decoupled, "SKIPS": found_inf is not None, "WIDTH": WIDTH, "BLOCK": self._block}
        found = self._one if found_inf is None else found_inf
        given = [(t, grad) for t, grad in enumerate(grads) if grad is not None]
        todo: list[Callable[[], None]] = []
        if len(self._norms):
            todo += [functools.partial(self._launch_norms, t, grad, found, table, flags) for t, grad in given]
            todo.append(functools.partial(self._join, table, found_inf))
        todo += [functools.partial(self._launch_step, t, grad, found, table, flags) for t, grad in given]
        self._todo, self._base = todo, self.launches

    # ---------------------------------------------------------------- launches

    def _launch_norms(
        self, t: int, grad: torch.Tensor, found: torch.Tensor, table: torch.Tensor, flags: dict[str, Any]
    ) -> None:
        """Take the norms of row ``t``; LAMB's are those of moments that have moved."""
        if self.rule.name == "novograd":
            self._launch_check(t, grad, self._norms[0])
            return
        (param, _, states), first = self._read[t], t * self._norms.shape[2]
        given = param, _bits(grad), *states, param.numel(), found, table, t, *self._norms, first
        self._launch("move", self._programs[t], *given, **flags)

    def _launch_check(self, t: int, grad: torch.Tensor, parts: torch.Tensor) -> None:
        given = _bits(grad), grad.numel(), parts, t * parts.shape[1]
        self._launch("check", self._programs[t], *given, BLOCK=self._block)

    @torch.no_grad()
    def _join(self, table: torch.Tensor, found: Scalar) -> None:
        self._multipliers.take_norms(table, self._norms, found)
        self.launches += 1

    def _launch_step(
        self, t: int, grad: torch.Tensor, found: torch.Tensor, table: torch.Tensor, flags: dict[str, Any]
    ) -> None:
        row, (param, low, states) = self.rows[t], self._read[t]
        held = [*states, *[param] * (3 - len(states))]
        count = param if row.step is None else row.step
        names: dict[str, Any] = {"LOW": row.low is not None, "COUNTS": row.step is not None}
        names |= {
            "RULE": self.rule.name,
            "LATE": self.rule.wd_after_momentum,
            "STATES": 1 if self.rule.name == "novograd" else len(states),
        }
        given = param, low, _bits(grad), *held, count, param.numel(), found, table, t
        self._launch("step", self._programs[t], *given, **names, **flags)

    def _launch(self, name: str, programs: int, *args: Any, **constants: Any) -> None:
        from xamp.onebyone import kernels  # Triton is imported there

        self.tables.before_launch((name, *constants.values()))
        with on_device(self.device):
            getattr(kernels, name)[(programs,)](*args, **constants)
        self.launches += 1


def _norm(values: torch.Tensor, kind: float, factors: Sequence[torch.Tensor] = ()) -> torch.Tensor:
    """Return the norm of ``values`` times ``factors``, finite where that is: the largest is taken out of it."""
    wide = values.detach().float()
    largest = wide.abs().amax().clamp(min=TINY, max=torch.finfo(torch.float32).max)
    norm: torch.Tensor = torch.linalg.vector_norm(wide / largest, kind)
    for factor in factors:
        largest = largest * factor.reshape(())
    return norm * largest


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as the kernels read it: bf16 as its patterns."""
    return tensor.detach().view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor.detach()
