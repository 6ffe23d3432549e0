"""Launches of each tensor's own, for compilers without pointers made of integers and without fp64 (Ascend's).

The host reads flag, counts and factors at each step, and computes the numbers in fp64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from xamp.onepass.rules import Row, Rule, numbers
from xamp.onepass.tables import NUMBERS, Tables, codes

__all__ = ["Singles"]

_PROGRAMS = 48  # about as many as a device has vector cores; a launch may have 65,535


class Singles(Tables):
    """Tables that stay on the host: they are written into the arguments of each tensor's launches."""

    def _start(self, rows: Sequence[Row]) -> None:
        self._rows, self._ratios = rows, torch.ones(len(rows), device=self._lane.device)
        self._one = torch.ones(1, device=self._lane.device)
        self._grads: dict[int, torch.Tensor] = {}
        self._records: list[int] = []

    def send(self, grads: Sequence[torch.Tensor | None], records: list[int] | None, hyper: Any) -> None:
        """Keep what the next launches are about, until they are done."""
        self._grads = {j: grad for j, grad in enumerate(grads) if grad is not None}
        self._records, self._hyper = self._records if records is None else records, hyper

    def used(self) -> None:
        """Let go of the gradients."""
        self._grads, self._hyper = {}, None

    def _grid(self, j: int) -> int:
        return min(_PROGRAMS, self.parts[j].stop - self.parts[j].start)

    def sum(self, found: torch.Tensor, into: torch.Tensor, kind: int, order: float, flag: bool) -> None:
        """See :class:`Tables`."""
        into.zero_()
        for j, grad in self._grads.items():
            heads = (_flat(grad), found, *into[:2, self.parts[j]], order, grad.numel())
            self.launch("check_one", self._grid(j), *heads, FLAG=flag, KIND=kind, BLOCK=self._block)

    def numbers(self, found: torch.Tensor, inv_scale: torch.Tensor, clip: torch.Tensor) -> None:
        """See :class:`Tables`. Where ``found`` is raised nothing is left to step."""
        if bool(found):
            self.used()
        scale = float(inv_scale) * float(clip)
        table = torch.zeros(len(self._rows), NUMBERS)
        for j in self._grads:
            row = self._rows[j]
            options, record = self._hyper[row.group], self._records[10 * row.group :][:10]
            if row.step is not None:
                row.step.add_(1.0)
            taken = float(options.get("step", 0) if row.step is None else row.step)
            first = bool(options.get("first")) if row.step is None else taken == 1.0
            table[j] = torch.tensor(numbers(Rule(self._rule), record, float(options["lr"]), taken, first, scale))
        self._coefs = table.to(self._lane.device)

    def _norms(self, sums: torch.Tensor, kind: int) -> torch.Tensor:
        norms = torch.zeros_like(self._ratios)
        for j in self._grads:
            part = sums[:, self.parts[j]]
            heads = (part[0], part[1], self._one, norms[j:], part.shape[1], 2.0)
            self.launch("finish", 1, *heads, KIND=kind, BLOCK=1024)
        return norms

    def ratios(self, found: torch.Tensor, sums: torch.Tensor) -> None:
        """See :class:`Tables`."""
        c = self._coefs.t()
        kinds, norms = c[11].int(), self._norms(sums, 2)
        if self._rule == "lamb":
            updates = self._norms(sums[2:], 2)
            trusts = (kinds != 0) & (norms != 0.0) & (updates != 0.0)
            self._ratios = torch.where(trusts, c[9] * (norms / updates), c[9])
            return
        size = torch.where((kinds & 2) != 0, self._norms(sums, 0), norms) * c[0].abs()
        for j in self._grads:
            old = self._rows[j].states[1].reshape(())
            if not kinds[j] & 1:
                squares = (c[4][j] * old**2 + c[5][j] * size[j] ** 2).sqrt()
                size[j] = c[4][j] * old + c[5][j] * size[j] if kinds[j] & 2 else squares
            old.copy_(size[j])
        self._ratios = size / c[10] + c[7]

    def step(self, rule: str, found: torch.Tensor, sums: torch.Tensor) -> None:
        """See :class:`Tables`."""
        for j, grad in self._grads.items():
            row = self._rows[j]
            param = row.param if row.low is None else row.low
            a, b, c = (*row.states, *[row.param] * 3)[:3]  # what is not there is not read, by codes and numbers
            tensors = map(_flat, (grad, row.param, param, a, b, c))
            sizes = (sums[0, self.parts[j].start :], self._ratios[j:], self.blocks, grad.numel())
            heads = (*tensors, codes(row), self._coefs[j], *sizes)
            self.launch("step_one", self._grid(j), *heads, RULE=rule, BLOCK=self._block)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return what a kernel takes for a tensor: bf16 as int16."""
    return tensor.detach().view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor.detach()
