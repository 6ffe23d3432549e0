"""The plan of an optimizer's step: what it is given is checked here, and launched by ``tables`` or by ``singles``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from xamp.onepass.ring import Lane
from xamp.onepass.rules import CODES, Row, Rule, fault, layout, record
from xamp.onepass.singles import Singles
from xamp.onepass.tables import Tables

__all__ = ["Plan", "bytes_moved"]

Grads = Sequence[torch.Tensor | None]
Options = Sequence[Mapping[str, Any]]


class Plan:
    """The tensors of one optimizer on one device, in tables on that device. Launches go to the current stream.

    Gradients are given at each call, in the order of the rows: fp16, bf16 or fp32, of the row's shape and order in
    memory; None for a row that has none, which is then left alone, its count of steps too.

    Args:
        rule: what a step computes.
        rows: what it steps, with ``group`` as index into ``hyper``.
        wide: False for compilers without pointers made of integers and without fp64 (Ascend's): each tensor has
            launches of its own, and the host reads flag, counts and factors, and computes the corrections.
        block: elements that a program takes, a power of two.

    Attributes:
        launches: kernels and copies since the last :meth:`check` began, or since the last :meth:`step` began if none
            came before it. SGD, Adam, Adagrad: at most 4 without, 6 with clipping, if the options given to the check
            are still those of the step (5 and 7 else); LAMB and NovoGrad two more.

    Raises:
        ValueError: no rows, or one that does not suit: the message says which and why (see :func:`takes`).
    """

    def __init__(self, rule: Rule, rows: Sequence[Row], *, wide: bool = True, block: int = 2048) -> None:
        if not rows:
            raise ValueError("a plan needs a row")
        self.rule, self.rows, self.device = rule, tuple(rows), rows[0].param.device
        for j, row in enumerate(self.rows):
            if why := fault(rule, row, self.device):
                raise ValueError(f"row {j}: {why}")
        self._lane = Lane(self.device)
        groups = range(1 + max(row.group for row in self.rows))
        self._groups = [[row for row in self.rows if row.group == group] for group in groups]
        with self._lane.guard():
            self._ways = (Tables if wide else Singles)(rule.name, self.rows, block, self._lane)
            self._one, self._zero = torch.ones(1, device=self.device), torch.zeros(1, device=self.device)
            # A norm of the caller's must overwrite neither what a check summed nor what a rule does.
            room = {"lamb": 4, "novograd": 2}.get(rule.name, 0)
            sums = torch.zeros(4 + room, self._ways.blocks, device=self.device)
            self._checked, self._normed, self._sums = sums[:2], sums[2:4], sums[4:] if room else sums[:1]
        self._places = self._pointers()
        self._layouts = [(row.param.shape, row.param.stride()) for row in self.rows]
        self._begins = True

    @property
    def launches(self) -> int:
        """See the class."""
        return self._ways.launches

    def _pointers(self) -> list[int]:
        tensors = ((row.param, row.low, *row.states, row.step) for row in self.rows)
        return [0 if tensor is None else tensor.data_ptr() for row in tensors for tensor in row]

    def moved(self) -> bool:
        """Whether a tensor of a row lies elsewhere than when the plan was built: then build another."""
        return self._pointers() != self._places

    def suits(self, grads: Grads) -> bool:
        """Whether all gradients have a dtype, device, shape and order in memory that the kernels take."""
        return len(grads) == len(self.rows) and all(map(self._suits, grads, self._layouts))

    def _suits(self, grad: torch.Tensor | None, place: tuple[torch.Size, tuple[int, ...]]) -> bool:
        if grad is None:
            return True
        if grad.layout != torch.strided or grad.dtype not in CODES or grad.device != self.device or grad.is_neg():
            return False
        shape, stride = place
        if grad.shape != shape:
            return False
        return grad.stride() == stride or layout(grad) == layout(torch.empty_strided(shape, stride, device="meta"))

    def _begin(self, *singles: torch.Tensor | None, anew: bool) -> None:
        for tensor in singles:
            if tensor is not None and not (
                tensor.dtype == torch.float32 and tensor.numel() == 1 and tensor.device == self.device
            ):
                raise ValueError(f"flag, scale, norm and factor are one fp32 number on {self.device}, not {tensor!r}")
        if anew:
            self._ways.launches = 0

    def _send(self, grads: Grads, hyper: Options | None) -> None:
        if not self.suits(grads):
            raise ValueError("gradients differ from their rows in number, device, shape or order, or in their dtypes")
        records = None
        if hyper is not None:
            records = [
                number
                for options, rows in zip(hyper, self._groups, strict=False)
                for number in record(self.rule, options, rows)
            ]
            if len(records) != 10 * len(self._groups):
                raise ValueError(f"options of {len(self._groups)} groups are needed, not of {len(hyper)}")
        self._ways.send(grads, records, hyper)

    def check(
        self,
        grads: Grads,
        found_inf: torch.Tensor,
        inv_scale: torch.Tensor | None = None,
        norm: torch.Tensor | None = None,
        hyper: Options | None = None,
    ) -> None:
        """Read the gradients once: raise ``found_inf`` at an inf or nan, and sum the squares by block.

        Args:
            grads: one for each row, or None.
            found_inf: fp32, one element; becomes 1 where something is found and keeps what it holds otherwise.
            inv_scale: fp32, one element; 1 divided by the loss scale, None for 1. The norm is of unscaled values.
            norm: fp32, one element: gets the L2 norm of ``grads * inv_scale``, finite where fp64's is; one launch more.
                :meth:`checked_norm` gives it later too.
            hyper: the options of each group as they are now, which saves a copy if the step has the same.
        """
        self._begin(found_inf, inv_scale, norm, anew=True)
        self._begins = False
        with self._lane.guard():
            self._send(grads, hyper)
            self._ways.sum(found_inf, self._checked, 2, 2.0, True)
            self._ways.used()
            if norm is not None:
                self._finish(self._checked, inv_scale, norm, 2, 2.0)

    def checked_norm(self, inv_scale: torch.Tensor | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the L2 norm that the last check's pass summed, fp32, shape ``[]``; one launch, no read of gradients."""
        self._begin(inv_scale, out, anew=False)
        with self._lane.guard():
            out = torch.empty((), device=self.device) if out is None else out
            self._finish(self._checked, inv_scale, out, 2, 2.0)
        return out

    def norm(self, grads: Grads, inv_scale: torch.Tensor | None = None, kind: float = 2.0) -> torch.Tensor:
        """Return the norm of ``grads * inv_scale``, fp32, shape ``[]``, by a pass of its own.

        Args:
            grads: as for :meth:`check`. What the last check summed stays.
            inv_scale: as for :meth:`check`.
            kind: the order, above 0; ``math.inf`` for the largest magnitude.
        """
        if not kind > 0:
            raise ValueError(f"a norm's order is above 0, not {kind}")
        self._begin(inv_scale, anew=False)
        sums, finish = {1.0: (1, 1), 2.0: (2, 2), math.inf: (2, 0)}.get(kind, (3, 3))
        with self._lane.guard():
            out = torch.empty((), device=self.device)
            self._send(grads, None)
            self._ways.sum(self._one, self._normed, sums, kind, False)
            self._ways.used()
            self._finish(self._normed, inv_scale, out, finish, kind)
        return out

    def clip_factor(self, norm: torch.Tensor, limit: float, eps: float = 1e-6) -> torch.Tensor:
        """Return ``min(1, limit / (norm + eps))``, fp32, shape ``[]``, on the device, in one launch.

        nan stays nan, as in ``torch.nn.utils.clip_grad_norm_``. Apex's LAMB has ``eps`` 0.
        """
        self._begin(norm, anew=False)
        with self._lane.guard():
            out = torch.empty((), device=self.device)
            self._ways.launch("clip", 1, norm, out, float(limit), float(eps))
        return out

    def step(
        self,
        grads: Grads,
        hyper: Options,
        found_inf: torch.Tensor | None = None,
        inv_scale: torch.Tensor | None = None,
        clip: torch.Tensor | None = None,
    ) -> None:
        """Step all rows that have a gradient. Where ``found_inf`` is raised no bit changes, counts neither.

        The kernels do not raise the versions that autograd keeps of the tensors.

        Args:
            grads: one for each row, or None.
            hyper: the options of each group; see :class:`Rule`.
            found_inf: fp32, one element, read on the device; None: step.
            inv_scale: fp32, one element, on the device: gradients are multiplied by it; None for 1.
            clip: fp32, one element, on the device: gradients are multiplied by it too; None for 1.
        """
        self._begin(found_inf, inv_scale, clip, anew=self._begins)
        self._begins = True
        found_inf = self._zero if found_inf is None else found_inf
        with self._lane.guard():
            self._send(grads, hyper)
            self._ways.numbers(found_inf, self._or_one(inv_scale), self._or_one(clip))
            name = self.rule.name
            if name == "lamb":
                self._ways.step("lamb", found_inf, self._sums)
            elif name == "novograd":
                self._ways.sum(self._one, self._sums, 2, 2.0, False)
            if name in ("lamb", "novograd"):
                self._ways.ratios(found_inf, self._sums)
            self._ways.step("lamb apply" if name == "lamb" else name, found_inf, self._sums)
            self._ways.used()

    def _or_one(self, factor: torch.Tensor | None) -> torch.Tensor:
        return self._one if factor is None else factor

    def _finish(self, of: torch.Tensor, inv_scale: torch.Tensor | None, out: torch.Tensor, kind: int, p: float) -> None:
        blocks = (of[0], of[1], self._or_one(inv_scale), out, of.shape[1], p)
        self._ways.launch("finish", 1, *blocks, KIND=kind, BLOCK=1024)


def bytes_moved(plan: Plan, grads: Grads) -> int:
    """Return the bytes that a check and a step read and write: each element of each tensor so often as kernels do.

    AdamW at O2, fp16 gradients and weights: 30 a parameter (2 by the check, 14 read and 14 written by the step).
    """
    total = 0
    for row, grad in zip(plan.rows, grads, strict=True):
        if grad is not None:
            states = row.states[:1] if plan.rule.name == "novograd" else row.states
            state = sum(tensor.element_size() for tensor in states)
            param, low = row.param.element_size(), 0 if row.low is None else row.low.element_size()
            each = 2 * grad.element_size() + 2 * param + 2 * state + low
            each += {"lamb": param + state, "novograd": grad.element_size()}.get(plan.rule.name, 0)
            total += each * grad.numel()
    return total
