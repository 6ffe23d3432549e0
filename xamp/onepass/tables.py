"""One launch for all tensors: their pointers stand in tables, those of gradients in one that is sent at each step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from xamp.onepass.ring import Lane, PointerRing
from xamp.onepass.rules import CODES, NONE, Row, Rule

__all__ = ["NUMBERS", "Tables", "codes"]

NUMBERS = 12
"""A step multiplies by so many numbers of each tensor; see ``rules.numbers``."""
_EACH = 128  # tensors of one program that computes numbers


class Tables:
    """The tables of a plan, and its launches, which it counts.

    ``rows``, int64, has for each tensor pointers to parameter, lower weight, three states and count; its elements,
    dtypes, group, first block, number of blocks. ``ids`` and ``offsets`` say for each block which tensor it is of, and
    at which element it begins. What is sent has pointers and dtypes of gradients and the groups' options.
    """

    def __init__(self, rule: str, rows: Sequence[Row], block: int, lane: Lane) -> None:
        from xamp.onepass import kernels

        self.kernels: Any = kernels
        self._rule, self._block, self._lane = rule, block, lane
        counts = [-(-row.param.numel() // block) for row in rows]
        firsts = list(itertools.accumulate(counts, initial=0))
        self.parts = [slice(*ends) for ends in itertools.pairwise(firsts)]
        self.blocks, self.launches = firsts[-1], 0
        self._start(rows)

    def _start(self, rows: Sequence[Row]) -> None:
        device, parts = self._lane.device, self.parts
        columns = [
            [*_pointers(row), row.param.numel(), codes(row), row.group, part.start, part.stop - part.start]
            for row, part in zip(rows, parts, strict=True)
        ]
        self.rows = torch.tensor(columns, dtype=torch.int64).t().contiguous().to(device)
        ids = torch.repeat_interleave(self.rows[10].cpu())
        offsets = (torch.arange(self.blocks) - self.rows[9].cpu()[ids]) * self._block
        self.ids, self.offsets = ids.to(device, torch.int32), offsets.to(device)
        self._ratios, self._coefs = torch.zeros(len(rows), device=device), torch.zeros(len(rows), NUMBERS, device=device)
        self._records = [0] * 10 * (1 + max(row.group for row in rows))
        self._ring = PointerRing(2 * len(rows) + len(self._records), device, self._lane)
        self._sent, self._held = self.rows, (self._records, False)

    def send(self, grads: Sequence[torch.Tensor | None], records: list[int] | None, hyper: Any) -> None:
        """Send pointers and options, unless they are those on the device. ``records`` None: the last ones."""
        self._records = self._records if records is None else records
        pointers = [0 if grad is None else grad.data_ptr() for grad in grads]
        dtypes = [NONE if grad is None else CODES[grad.dtype] for grad in grads]
        held = ([*pointers, *dtypes, *self._records], self._lane.capturing())
        if held != self._held:
            self._sent, self._held = self._ring.send(held[0]), held
            self.launches += 1

    def used(self) -> None:
        """Note that all launches that read what was sent are queued."""
        self._ring.used()

    def launch(self, kernel: str, grid: int, *arguments: Any, **constants: Any) -> None:
        """Launch a kernel, and count it; nothing where there is nothing to do."""
        if grid:
            warps = max(1, min(8, constants.get("BLOCK", 256) // 256))
            getattr(self.kernels, kernel)[(grid,)](*arguments, **constants, num_warps=warps)
            self.launches += 1

    def sum(self, found: torch.Tensor, into: torch.Tensor, kind: int, order: float, flag: bool) -> None:
        """Add powers of the gradients by block, and raise ``found`` if ``flag``."""
        heads = (self.rows, self._sent, self.ids, self.offsets, found, into[0], into[1], order, len(self._ratios))
        self.launch("check_rows", len(self.ids), *heads, FLAG=flag, KIND=kind, BLOCK=self._block)

    def numbers(self, found: torch.Tensor, inv_scale: torch.Tensor, clip: torch.Tensor) -> None:
        """Count the step, and compute what it multiplies by."""
        n = len(self._ratios)
        heads = (self.rows, self._sent, self._coefs, found, inv_scale, clip, n)
        self.launch("numbers", -(-n // _EACH), *heads, RULE=self._rule, BLOCK=_EACH)

    def ratios(self, found: torch.Tensor, sums: torch.Tensor) -> None:
        """Compute LAMB's ratios of norms, or NovoGrad's moving norms."""
        n = len(self._ratios)
        heads = (self.rows, self._sent, self._coefs, found, sums, self._ratios, self.blocks, n)
        self.launch("ratio_rows", n, *heads, RULE=self._rule, BLOCK=1024)

    def step(self, rule: str, found: torch.Tensor, sums: torch.Tensor) -> None:
        """Step all tensors whose gradient was sent, or take one of LAMB's passes."""
        tables = (self.rows, self._sent, self.ids, self.offsets, self._coefs)
        sizes = (found, sums, self._ratios, self.blocks, len(self._ratios))
        self.launch("step_rows", len(self.ids), *tables, *sizes, RULE=rule, BLOCK=self._block)


def _pointers(row: Row) -> list[int]:
    states = (*row.states, None, None, None)[:3]
    return [0 if t is None else t.data_ptr() for t in (row.param, row.low, *states, row.step)]


def codes(row: Row) -> int:
    """Return the dtypes of parameter, lower weight and states, two bits each."""
    low = NONE if row.low is None else CODES[row.low.dtype]
    return CODES[row.param.dtype] | low << 2 | (CODES[row.states[0].dtype] if row.states else 0) << 4
