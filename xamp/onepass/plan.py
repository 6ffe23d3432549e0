"""The plan of an optimizer's step: tables of pointers, built once, and the launches."""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from xamp.onepass.ring import PointerRing
from xamp.onepass.rules import CODES, STATES, Row, Rule, by_largest, dtype_of_work, is_like, options_of

__all__ = ["Grads", "Hyper", "Plan", "Scalar", "on_device"]

Scalar = torch.Tensor | None
Grads = Sequence[Scalar]
Hyper = Sequence[Mapping[str, Any]]


class Plan:
    """The tensors of one optimizer on one device, in tables on that device. Launches go to the current stream.

    Gradients are given at each call, in the order of the rows: fp16, bf16 or fp32, of the row's shape and order in
    memory; None for a row that has none, which is then left alone, its count of steps too.

    Args:
        rule: what a step computes.
        rows: what it steps, with ``group`` as index into ``hyper``.
        tables: makes what sends tables that change, from their length, device and dtype.
        block: elements that a program takes, a power of two. With 1024 and 8 warps fp64 needs 79 registers a thread.

    Attributes:
        launches: kernels and copies since the last :meth:`check` began. SGD, Adam, Adagrad: at most 4 without, 6 with
            clipping, if the options given to the check are still those of the step; LAMB and NovoGrad two more.
        tensors: all tensors of the rows.
        tables: sends tables that change.

    Raises:
        ValueError: no rows, or one that does not suit: the message says which and why (see :func:`takes`).
    """

    launches: int
    tables: PointerRing

    def __init__(
        self, rule: Rule, rows: Sequence[Row], tables: Callable[..., PointerRing] = PointerRing, *, block: int = 1024
    ) -> None:
        self.rule, self.rows, self._new_tables, self._block = rule, list(rows), tables, block
        self._check_rows(rows)
        self.launches = 0
        self.device = rows[0].param.device
        self.tensors = [tensor for row in self.rows for tensor in row.tensors]
        self._places = [*map(torch.Tensor.data_ptr, self.tensors)]
        self._layouts = [(row.param.shape, row.param.stride()) for row in self.rows]
        self._work = dtype_of_work(self.device)
        self._groups = max(row.group for row in rows) + 1
        self._make_tables()

    def _check_rows(self, rows: Sequence[Row]) -> None:
        if not rows:
            raise ValueError("Plan: no rows")
        if [row.in_place for row in rows] != sorted(row.in_place for row in rows):
            raise ValueError("Plan: rows whose gradients change in place come last")
        device = rows[0].param.device
        for number, row in enumerate(rows):
            vectors = row.states[:1] if self.rule.name == "novograd" else row.states  # its norm has one element
            known = len(row.states) in STATES[self.rule.name] and len({state.dtype for state in vectors}) < 2
            known = known and row.param.device == device
            for tensor in (row.param, *vectors, *([] if row.low is None else [row.low])):
                if not known or not is_like(tensor, row.param):
                    raise ValueError(
                        f"Plan: row {number} has a tensor {tensor.dtype}, strides {tensor.stride()} on {tensor.device} "
                        f"beside a parameter of {tuple(row.param.shape)}, strides {row.param.stride()}: kernels take "
                        "fp32, fp16 and bf16 that fill their memory alike"
                    )
            count = row.param.new_zeros((), dtype=torch.float32) if row.step is None else row.step
            if count.dtype is not torch.float32 or count.numel() != 1 or count.device != device:
                raise ValueError(f"Plan: the count of row {number} is not fp32 with one element on {device}")

    def _make_tables(self) -> None:
        words: list[int] = []
        tensors: list[int] = []
        for number, row in enumerate(self.rows):
            states = [state.data_ptr() for state in row.states] + [0] * (3 - len(row.states))
            blocks = -(-row.param.numel() // self._block)
            low = (0, 0) if row.low is None else (row.low.data_ptr(), CODES[row.low.dtype])
            words += [row.param.data_ptr(), low[0], *states, 0 if row.step is None else row.step.data_ptr()]
            words += [row.param.numel(), row.group, CODES[row.param.dtype], low[1]]
            words += [CODES[row.states[0].dtype] if row.states else 0, len(tensors), blocks, row.in_place]
            tensors += [number] * blocks
        self._blocks = len(tensors)
        self._in_place = sum(self.rows[number].in_place for number in tensors)  # the blocks of these rows, the last
        self._rows = torch.tensor(words, dtype=torch.int64, device=self.device)
        self._ids = torch.tensor(tensors, dtype=torch.int32, device=self.device)
        count = 3 if self.rule.name in ("lamb", "novograd") else 2
        sums = torch.zeros((count, max(1, self._blocks)), dtype=torch.float64, device=self.device)
        self._checked, self._first, self._second = sums[0], sums[1], sums[-1]  # what was checked stays until the next
        self._factors = torch.zeros((len(self.rows), 16), dtype=torch.float64, device=self.device)
        self._one = torch.ones((), dtype=torch.float32, device=self.device)
        self.tables = self._new_tables(2 * len(self.rows) + self._groups * 21, self.device, torch.int64)

    def moved(self) -> bool:
        """Whether a tensor of a row lies elsewhere than when the plan was built: then build another."""
        return [*map(torch.Tensor.data_ptr, self.tensors)] != self._places

    def suits(self, grads: Grads) -> bool:
        """Whether all gradients have a dtype, device, shape and order in memory that the kernels take."""
        for row, layout, grad in zip(self.rows, self._layouts, grads, strict=True):
            if grad is None:
                continue
            known = grad.layout is torch.strided and (grad.shape, grad.stride()) == layout  # the usual case, first
            known = known and grad.dtype in CODES and grad.device == self.device and not grad.is_neg()
            if not known and not is_like(grad, row.param):
                return False
        return True

    def check(
        self, grads: Grads, found_inf: torch.Tensor, hyper: Hyper | None = None, inv_scale: Scalar = None
    ) -> None:
        """Read the gradients once: raise ``found_inf`` at an inf or nan, and sum the squares by block.

        Args:
            grads: one for each row, or None. Those of rows ``in_place`` are multiplied by ``inv_scale`` here.
            found_inf: fp32, one element; becomes 1 where something is found and keeps what it holds otherwise.
            hyper: the options of each group as they are now, which saves a copy if the step has the same.
            inv_scale: see :meth:`step`.
        """
        self.launches = 0
        self._sum(self._send(grads, hyper), found_inf, inv_scale, None, self._checked, "2", 2.0)

    def checked_norm(self, inv_scale: torch.Tensor | None = None) -> torch.Tensor:
        """Return the L2 norm of ``grads * inv_scale`` at the last check, fp32, shape ``[]``, finite where fp64's is."""
        return self._total(self._checked, inv_scale, "2", 2.0)

    def norm(self, grads: Grads, inv_scale: Scalar = None, kind: float = 2.0, clip: Scalar = None) -> torch.Tensor:
        """Return the norm of order ``kind`` (above 0) of what a step takes, fp32, shape ``[]``, by its own pass."""
        name = {2.0: "2", math.inf: "inf"}.get(float(kind), "p")
        order = float(kind) if name == "p" else 2.0
        self._sum(self._send(grads, None), None, inv_scale, clip, self._first, name, order)
        return self._total(self._first, None, name, order)

    def clip_factor(self, grads: Grads, norm: torch.Tensor, limit: float, eps: float = 1e-6) -> torch.Tensor:
        """Return ``min(1, limit / (norm + eps))``, fp32, shape ``[]``; nan stays nan. Apex's LAMB has ``eps`` 0.

        Gradients of rows ``in_place`` are multiplied by it; the others when the step reads them.
        """
        out, tables = torch.empty_like(self._one), (self._rows, self._send(grads, None), self._ids)
        given, many = (norm, float(limit), float(eps), out, *tables, self._blocks - self._in_place), self._in_place > 0
        self._run("clip_factor", (max(1, self._in_place),), *given, MULTIPLIES=many, BLOCK=self._block)
        self.tables.note_launch()
        return out

    def step(
        self, grads: Grads, hyper: Hyper, found_inf: Scalar = None, inv_scale: Scalar = None, clip: Scalar = None
    ) -> None:
        """Step all rows that have a gradient. Where ``found_inf`` is raised no bit changes.

        ``hyper`` has the options of each group, see :class:`Rule`; the tensors are fp32 with one element, read on the
        device, and gradients are multiplied by the last two, those of rows ``in_place`` excepted. Versions that
        autograd keeps of tensors are not raised.
        """
        table = self._send(grads, hyper)
        flags, scaled = {"SKIPS": found_inf is not None}, {"SCALED": inv_scale is not None, "CLIPPED": clip is not None}
        found, inverse, factor = (self._one if given is None else given for given in (found_inf, inv_scale, clip))
        name, options, rows = self.rule.name, table[2 * len(self.rows) :], (len(self.rows),)
        these = self._rows, table, options, found
        self._run("factors", rows, *these, inverse, factor, self._factors, RULE=name, **flags, **scaled)
        by_row = *these, self._first, self._second, self._factors
        over = {"RULE": name, "NVLAMB": self.rule.use_nvlamb, "CHUNK": 256, **flags}
        if name == "novograd":
            kinds = {("inf", self._second) if by_largest(group) else ("2", self._first) for group in hyper}
            for kind, out in kinds:
                self._sum(table, None, None, None, out, kind, 2.0)
            self._run("by_row", rows, *by_row, **over)
        if name == "lamb":
            self._step(table, found, 1, flags)
            self._run("by_row", rows, *by_row, **over)
        self._step(table, found, 2, flags)
        self.tables.note_launch()

    # ---------------------------------------------------------------- launches

    def _step(self, given: torch.Tensor, found: torch.Tensor, phase: int, flags: Mapping[str, bool]) -> None:
        rule = {"RULE": self.rule.name, "DECOUPLED": self.rule.decoupled, "LATE": self.rule.wd_after_momentum}
        blocks = self._rows, given, self._ids, found, self._factors, self._first, self._second
        self._run("step", (self._blocks,), *blocks, **rule, **flags, PHASE=phase, BLOCK=self._block, WORK=self._work)

    def _sum(
        self, given: torch.Tensor, found: Scalar, inverse: Scalar, clip: Scalar, out: torch.Tensor, kind: str, p: float
    ) -> None:
        flags = {"CHECKS": found is not None, "SCALED": inverse is not None, "CLIPPED": clip is not None}
        numbers = [self._one if number is None else number for number in (found, inverse, clip)]
        blocks = self._rows, given, self._ids, *numbers, out, p
        self._run("sums", (self._blocks,), *blocks, KIND=kind, BLOCK=self._block, **flags)
        self.tables.note_launch()

    def _total(self, parts: torch.Tensor, inverse: torch.Tensor | None, kind: str, order: float) -> torch.Tensor:
        out, given = torch.empty_like(self._one), (parts, self._blocks, self._one if inverse is None else inverse)
        self._run("total", (1,), *given, out, order, KIND=kind, SCALED=inverse is not None, CHUNK=1024)
        return out

    def _run(self, name: str, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        from xamp.onepass import kernels  # Triton is imported there

        self.tables.before_launch((name, *constants.values()))
        if grid[0]:
            with on_device(self.device):
                getattr(kernels, name)[grid](*args, **constants, num_warps=8)
        self.launches += 1

    def _send(self, grads: Grads, hyper: Hyper | None) -> torch.Tensor:
        """Return the table of gradients and options on the device; the one that is there, if it has all of it."""
        words: list[int] = []
        for grad in grads:
            words += (0, 0) if grad is None else (grad.data_ptr(), CODES[grad.dtype])
        if hyper is not None:
            for group in hyper[: self._groups]:
                numbers, places = options_of(group, self.device)
                words += struct.unpack(f"{len(numbers)}q", struct.pack(f"{len(numbers)}d", *numbers))
                words += places
        sent, table = self.tables.sent, self.tables.send(words)
        self.launches += self.tables.sent - sent
        return table


def on_device(device: torch.device) -> Any:
    """Return what makes ``device`` the current one."""
    return contextlib.nullcontext() if device.type == "cpu" else torch.get_device_module(device).device(device)
