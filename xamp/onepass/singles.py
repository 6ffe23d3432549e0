"""Launches of each tensor's own, for compilers without pointers made of integers and without fp64 (Ascend's).

The host reads flag, counts and factors at each step, and computes the numbers in fp64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from xamp.onepass.ring import Lane
from xamp.onepass.rules import Row, Rule, numbers

__all__ = ["Singles"]

_PROGRAMS = 48  # more than one device has vector cores, and far below the 65,535 programs that a launch may have
_FINISH = 1024


class Singles:
    """Stands in for :class:`~xamp.onepass.tables.Tables`, with the same methods."""

    def __init__(self, rule: Rule, rows: Sequence[Row], block: int, lane: Lane) -> None:
        from xamp.onepass import kernels

        self._kernels: Any = kernels
        self._rule, self._rows, self._block, self._device = rule, rows, block, lane.device
        counts = [-(-row.param.numel() // block) for row in rows]
        self._parts = [slice(sum(counts[:j]), sum(counts[: j + 1])) for j in range(len(counts))]
        self._checked, self._normed = (torch.zeros(2, sum(counts), device=lane.device) for _ in range(2))
        self._sums = torch.zeros(4, sum(counts), device=lane.device)
        self._ratios = torch.ones(len(rows), device=lane.device)
        self._one = torch.ones(1, device=lane.device)
        self._grads: Sequence[torch.Tensor | None] = ()
        self._records: list[int] = []
        self.launches = 0

    def send(self, grads: Sequence[torch.Tensor | None], records: list[int] | None) -> None:
        """Keep what the next launches are about, until they are done."""
        self._grads, self._records = grads, self._records if records is None else records

    def check(self, found: torch.Tensor) -> None:
        """Raise ``found``, and sum the squares by block."""
        self._sum(found, self._checked, 2, 2.0, True)
        self._grads = ()

    def checked_norm(self, inv_scale: torch.Tensor, out: torch.Tensor) -> None:
        """Write the norm that the last check summed."""
        self._finish(self._checked, inv_scale, out, 2, 2.0)

    def norm(self, inv_scale: torch.Tensor, out: torch.Tensor, order: float, sums: int, finish: int) -> None:
        """Write a norm of the gradients sent."""
        self._sum(inv_scale, self._normed, sums, order, False)
        self._finish(self._normed, inv_scale, out, finish, order)
        self._grads = ()

    def _live(self) -> list[int]:
        return [j for j, grad in enumerate(self._grads) if grad is not None]

    def _grid(self, j: int) -> tuple[int]:
        return (min(_PROGRAMS, self._parts[j].stop - self._parts[j].start),)

    def clip(self, norm: torch.Tensor, out: torch.Tensor, limit: float, eps: float) -> None:
        """Write by what gradients are multiplied to be clipped."""
        self._kernels.clip[(1,)](norm, out, limit, eps)
        self.launches += 1

    def _sum(self, found: torch.Tensor, into: torch.Tensor, kind: int, order: float, flag: bool) -> None:
        into.zero_()
        for j in self._live():
            if self._rows[j].param.numel():
                part = into[:, self._parts[j]]
                grad = _flat(self._grads[j])
                self._kernels.check_one[self._grid(j)](
                    grad, found, part[0], part[1], order, grad.numel(), FLAG=flag, KIND=kind, BLOCK=self._block
                )
                self.launches += 1

    def _finish(self, of: torch.Tensor, inv_scale: torch.Tensor, out: torch.Tensor, kind: int, order: float) -> None:
        self._kernels.finish[(1,)](of[0], of[1], inv_scale, out, of.shape[1], order, KIND=kind, BLOCK=_FINISH)
        self.launches += 1

    def step(
        self, options: Sequence[Mapping[str, Any]], found: torch.Tensor, inv_scale: torch.Tensor, clip: torch.Tensor
    ) -> None:
        """Step all tensors whose gradient was sent."""
        live = self._live() if not bool(found) else []
        if live:
            coefs = self._numbers(live, options, float(inv_scale) * float(clip))
            rule = self._rule.name
            if rule == "lamb":
                self._step("lamb", live, coefs)
                self._trust(live, coefs)
            elif rule == "novograd":
                self._move(live, coefs)
            self._step("lamb apply" if rule == "lamb" else rule, live, coefs)
        self._grads = ()

    def _numbers(self, live: Sequence[int], options: Sequence[Mapping[str, Any]], scale: float) -> torch.Tensor:
        """Count the step and return the numbers of each tensor on the device, shape ``[rows, 12]``."""
        steps = [self._rows[j].step for j in live]
        own = [step.reshape(()) for step in steps if step is not None]
        before = iter(torch.stack(own).tolist() if own else ())
        table = torch.zeros(len(self._rows), 12, dtype=torch.float32)
        for j, step in zip(live, steps, strict=True):
            group = self._rows[j].group
            given = options[group]
            taken = float(given.get("step", 0)) if step is None else next(before) + 1.0
            first = bool(given.get("first")) if step is None else taken == 1.0
            record = self._records[10 * group : 10 * group + 10]
            table[j] = torch.tensor(numbers(self._rule, record, float(given["lr"]), taken, first, scale))
            if step is not None:
                step.add_(1.0)
        return table.to(self._device)

    def _step(self, rule: str, live: Sequence[int], coefs: torch.Tensor) -> None:
        for j in live:
            row, part = self._rows[j], self._parts[j]
            if row.param.numel():
                a, b, c = (*map(_flat, row.states), None, None, None)[:3]
                self._kernels.step_one[self._grid(j)](
                    _flat(self._grads[j]), _flat(row.param), None if row.low is None else _flat(row.low),
                    a, None if rule == "novograd" else b, c, coefs[j], self._sums[0, part.start :],
                    self._ratios[j:], self._sums.shape[1], row.param.numel(), RULE=rule, BLOCK=self._block,
                )  # fmt: skip
                self.launches += 1

    def _norms(self, live: Sequence[int], sums: torch.Tensor, kind: int) -> torch.Tensor:
        found = torch.zeros(len(self._rows), device=self._device)
        for j in live:
            self._finish(sums[:, self._parts[j]], self._one, found[j:], kind, 2.0)
        return found

    def _trust(self, live: Sequence[int], coefs: torch.Tensor) -> None:
        norms, updates = self._norms(live, self._sums[:2], 2), self._norms(live, self._sums[2:], 2)
        trusts = (coefs[:, 10] != 0.0) & (norms != 0.0) & (updates != 0.0)
        self._ratios = torch.where(trusts, coefs[:, 9] * (norms / updates), coefs[:, 9])

    def _move(self, live: Sequence[int], coefs: torch.Tensor) -> None:
        self._sum(self._one, self._sums[:2], 2, 2.0, False)
        kinds = coefs[:, 11].int()
        size = torch.where((kinds & 2) != 0, self._norms(live, self._sums, 0), self._norms(live, self._sums, 2))
        size, keep, new = size * coefs[:, 0].abs(), coefs[:, 4], coefs[:, 5]
        old = torch.zeros_like(size)
        for j in live:
            old[j] = self._rows[j].states[1].reshape(())
        moved = torch.where((kinds & 2) != 0, keep * old + new * size, (keep * old**2 + new * size**2).sqrt())
        size = torch.where((kinds & 1) != 0, size, moved)
        for j in live:
            self._rows[j].states[1].fill_(size[j])
        self._ratios = size / coefs[:, 10] + coefs[:, 7]


def _flat(tensor: torch.Tensor | None) -> Any:
    """Return what a kernel takes for a tensor: bf16 as int16."""
    if tensor is None or tensor.dtype != torch.bfloat16:
        return None if tensor is None else tensor.detach()
    return tensor.detach().view(torch.int16)
