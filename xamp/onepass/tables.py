"""One launch for all tensors: their pointers stand in tables, those of gradients in one that is sent at each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from xamp.onepass.ring import Lane, PointerRing
from xamp.onepass.rules import CODES, NONE, Row, Rule

__all__ = ["Tables"]

_EACH = 128  # tensors of one program that computes numbers
_FINISH = 1024  # blocks that a program adds at a time


class Tables:
    """The tables of a plan, and its launches, which it counts.

    ``rows``, int64, has a column for each tensor: pointers to parameter, lower weight, three states and count, elements,
    dtypes, group, first block, number of blocks. ``ids`` and ``offsets`` say for each block which tensor it is of, and
    at which element it begins. What is sent has pointers and dtypes of gradients and the groups' options.
    """

    def __init__(self, rule: Rule, rows: Sequence[Row], block: int, lane: Lane) -> None:
        from xamp.onepass import kernels

        self._kernels: Any = kernels
        self._rule, self._block, self._lane = rule, block, lane
        self._warps = max(1, min(8, block // 256))
        device = lane.device
        counts = [-(-row.param.numel() // block) for row in rows]
        firsts = [sum(counts[:0])]
        for count in counts:
            firsts.append(firsts[-1] + count)
        columns = [
            [*_pointers(row), row.param.numel(), _codes(row), row.group, first, count]
            for row, first, count in zip(rows, firsts, counts, strict=False)
        ]
        self.rows = torch.tensor(columns, dtype=torch.int64).t().contiguous().to(device)
        blocks = torch.arange(firsts[-1], dtype=torch.int64)
        self.ids = torch.repeat_interleave(torch.tensor(counts, dtype=torch.int64)).to(torch.int32)
        self.offsets = ((blocks - torch.tensor(firsts)[self.ids.long()]) * block).to(device)
        self.ids = self.ids.to(device)
        self._count = len(rows)
        room = {"lamb": 4, "novograd": 2}.get(rule.name, 1)
        self._checked, self._normed = (torch.zeros(2, firsts[-1], device=device) for _ in range(2))
        self._sums = torch.zeros(room, firsts[-1], device=device)  # of the rule alone: no norm writes here
        self._ratios, self._coefs = torch.zeros(len(rows), device=device), torch.zeros(len(rows), 12, device=device)
        groups = 1 + max(row.group for row in rows)
        self._ring = PointerRing(2 * len(rows) + 10 * groups, device, lane)
        self._held: tuple[list[int], bool] = ([], False)
        self._sent = self.rows
        self._records = [0] * 10 * groups
        self.launches = 0

    def send(self, grads: Sequence[torch.Tensor | None], records: list[int] | None) -> None:
        """Send pointers and options, unless they are those on the device. ``records`` None: the last ones."""
        self._records = self._records if records is None else records
        pointers = [0 if grad is None else grad.data_ptr() for grad in grads]
        codes = [NONE if grad is None else CODES[grad.dtype] for grad in grads]
        held = ([*pointers, *codes, *self._records], self._lane.capturing())
        if held != self._held:
            self._sent, self._held = self._ring.send(held[0]), held
            self.launches += 1

    def check(self, found: torch.Tensor) -> None:
        """Raise ``found``, and sum the squares by block."""
        self._sum(found, self._checked, 2, 2.0, True)
        self._ring.used()

    def checked_norm(self, inv_scale: torch.Tensor, out: torch.Tensor) -> None:
        """Write the norm that the last check summed."""
        self._finish(self._checked, inv_scale, out, 2, 2.0)

    def norm(self, inv_scale: torch.Tensor, out: torch.Tensor, order: float, sums: int, finish: int) -> None:
        """Write a norm of the gradients sent."""
        self._sum(inv_scale, self._normed, sums, order, False)
        self._finish(self._normed, inv_scale, out, finish, order)
        self._ring.used()

    def clip(self, norm: torch.Tensor, out: torch.Tensor, limit: float, eps: float) -> None:
        """Write by what gradients are multiplied to be clipped."""
        self._kernels.clip[(1,)](norm, out, limit, eps)
        self.launches += 1

    def _sum(self, found: torch.Tensor, into: torch.Tensor, kind: int, order: float, flag: bool) -> None:
        if len(self.ids):
            self._kernels.check_rows[(len(self.ids),)](
                self.rows, self._sent, self.ids, self.offsets, found, into[0], into[1], order, self._count,
                FLAG=flag, KIND=kind, BLOCK=self._block, num_warps=self._warps,
            )  # fmt: skip
            self.launches += 1

    def _finish(self, of: torch.Tensor, inv_scale: torch.Tensor, out: torch.Tensor, kind: int, order: float) -> None:
        self._kernels.finish[(1,)](of[0], of[1], inv_scale, out, of.shape[1], order, KIND=kind, BLOCK=_FINISH)
        self.launches += 1

    def step(self, options: Any, found: torch.Tensor, inv_scale: torch.Tensor, clip: torch.Tensor) -> None:
        """Step all tensors whose gradient was sent."""
        rule, n = self._rule.name, self._count
        self._kernels.numbers[(-(-n // _EACH),)](
            self.rows, self._sent, self._coefs, found, inv_scale, clip, n, RULE=rule, BLOCK=_EACH
        )
        self.launches += 1
        if rule == "lamb":
            self._step("lamb", found)
        elif rule == "novograd":
            self._sum(found, self._sums, 2, 2.0, False)
        if rule in ("lamb", "novograd"):
            self._kernels.ratio_rows[(n,)](
                self.rows, self._sent, self._coefs, found, self._sums, self._ratios, self._sums.shape[1], n,
                RULE=rule, BLOCK=_FINISH,
            )  # fmt: skip
            self.launches += 1
        self._step("lamb apply" if rule == "lamb" else rule, found)
        self._ring.used()

    def _step(self, rule: str, found: torch.Tensor) -> None:
        if len(self.ids):
            self._kernels.step_rows[(len(self.ids),)](
                self.rows, self._sent, self.ids, self.offsets, self._coefs, found, self._sums, self._ratios,
                self._sums.shape[1], self._count, RULE=rule, BLOCK=self._block, num_warps=self._warps,
            )  # fmt: skip
            self.launches += 1


def _pointers(row: Row) -> list[int]:
    """Return where parameter, lower weight, three states and count lie; 0 for what is not there."""
    states = (*row.states, None, None, None)[:3]
    return [0 if t is None else t.data_ptr() for t in (row.param, row.low, *states, row.step)]


def _codes(row: Row) -> int:
    low = NONE if row.low is None else CODES[row.low.dtype]
    return CODES[row.param.dtype] | low << 2 | (CODES[row.states[0].dtype] if row.states else 0) << 4
