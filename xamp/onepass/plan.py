"""The plan of an optimizer's step: tables of pointers, built once, and the launches."""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import operator
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from xamp.onepass.parts import Parts, cut, row_words
from xamp.onepass.ring import PointerRing
from xamp.onepass.rules import CODES, STATES, Row, Rule, by_largest, is_like, options_of, vectors_of

__all__ = ["Grads", "Hyper", "Plan", "Scalar"]

Scalar = torch.Tensor | None
Grads = Sequence[Scalar]
Hyper = Sequence[Mapping[str, Any]]

_TENSOR: Any = torch.Tensor  # whose methods raise a TypeError where a gradient is None
_ADDRESS, _IS_DENSE = _TENSOR.data_ptr, _TENSOR.is_contiguous
_DTYPE, _DEVICE = operator.attrgetter("dtype"), operator.attrgetter("device")
_THREADS = {"by_row": 512, "factors": 32, "total": 512}
"""Of a program, by kernel; 256 for others: of 1024 elements each thread has 16 bytes of fp32."""


class Plan:
    """The tensors of one optimizer on one device, in tables on that device. Launches go to the current stream.

    Gradients are given at each call, in the order of the rows: fp16, bf16 or fp32, of the row's shape and order in
    memory; None for a row that has none, which is then left alone, its count of steps too.

    Args:
        rule: what a step computes.
        rows: what it steps, with ``group`` as index into ``hyper``.
        tables: makes what sends tables that change, from their length and device.
        block: elements that a program of a step takes, a power of two. A sum takes four times as many.

    Attributes:
        launches: kernels and copies since the last :meth:`check` began. SGD, Adam, Adagrad: at most 4 without, 6 with
            clipping, if the options given to the check are still those of the step; LAMB and NovoGrad two more; and two
            more for each further combination of dtypes.
        tensors: all tensors of the rows.
        tables: sends tables that change.

    Raises:
        ValueError: no rows, or one that does not suit: the message says which and why (see :func:`takes`).
    """

    def __init__(
        self, rule: Rule, rows: Sequence[Row], tables: Callable[..., PointerRing] = PointerRing, *, block: int = 1024
    ) -> None:
        self.rule, self.rows, self._new_tables, self._block = rule, list(rows), tables, block
        self._check_rows(rows)
        self.launches = 0
        self.device = device = rows[0].param.device
        self.tensors = [tensor for row in self.rows for tensor in row.tensors]
        self._places = [*map(_ADDRESS, self.tensors)]
        params = [row.param for row in self.rows]
        self._layouts = [param.shape for param in params], [param.stride() for param in params]
        self._is_dense = all(map(_IS_DENSE, params))
        self._packed: tuple[Hyper | None, list[int]] = None, []  # options, and their words
        is_host = device.type == "cpu"
        self._there: Any = contextlib.nullcontext() if is_host else torch.get_device_module(device).device(device)
        self._groups = max(row.group for row in rows) + 1
        self._make_tables()

    def _check_rows(self, rows: Sequence[Row]) -> None:
        if not rows:
            raise ValueError("Plan: no rows")
        if [row.in_place for row in rows] != sorted(row.in_place for row in rows):
            raise ValueError("Plan: rows whose gradients change in place come last")
        device = rows[0].param.device
        for number, row in enumerate(rows):
            vectors = vectors_of(self.rule.name, row)
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
        words, blocks, self._sums = row_words(self.rule.name, self.rows, self._block, 4 * self._block)
        self._rows = torch.tensor(words, dtype=torch.int64, device=self.device)
        count = 3 if self.rule.name in ("lamb", "novograd") else 2
        parts = torch.zeros((count, max(1, blocks)), dtype=torch.float64, device=self.device)
        self._checked, self._first, self._second = parts[0], parts[1], parts[-1]  # the first stays until the next check
        self._factors = torch.zeros((len(self.rows), 16), dtype=torch.float32, device=self.device)
        self._one = torch.ones((), dtype=torch.float32, device=self.device)
        self._empty = [number for number, row in enumerate(self.rows) if not row.param.numel()]
        self.tables = self._new_tables(len(self.rows) + self._groups * 21, self.device)
        self._all_parts: dict[tuple[torch.dtype, ...], Parts] = {}  # none is let go: graphs read them
        self._dtypes = [(row.low if row.low is not None else row.param).dtype for row in self.rows]
        self._parts = self._parts_of(self._dtypes)

    def _parts_of(self, dtypes: Sequence[torch.dtype]) -> Parts:
        """Return the parts for gradients of ``dtypes``, which are made outside of captures only."""
        key = tuple(dtypes)
        if key not in self._all_parts:
            self.tables.before_launch(("step", key))
            self._all_parts[key] = cut(self.rule.name, self.rows, key, self._block, 4 * self._block)
        return self._all_parts[key]

    def moved(self) -> bool:
        """Whether a tensor of a row lies elsewhere than when the plan was built: then build another."""
        return [*map(_ADDRESS, self.tensors)] != self._places

    def suits(self, grads: Grads, *, of_params: bool = False) -> bool:
        """Whether all gradients have a dtype, device, shape and order in memory that the kernels take.

        ``of_params``: they are the ``.grad`` of tensors like the rows' parameters, for which torch sees to the shape
        and the device.
        """
        if self._are_usual(grads, of_params):
            return True
        pairs = zip(self.rows, grads, strict=True)
        return all(grad is None or is_like(grad, row.param) for row, grad in pairs)

    def _are_usual(self, grads: Grads, of_params: bool) -> bool:
        """Whether there are all gradients, in the very order of the parameters: told by few calls a tensor."""
        shapes, strides = self._layouts
        try:
            alike = all(map(_IS_DENSE, grads)) if self._is_dense else [*map(_TENSOR.stride, grads)] == strides
            if not alike or not {*map(_DTYPE, grads)} <= CODES.keys():
                return False
            if not of_params and ([*map(_TENSOR.size, grads)], {*map(_DEVICE, grads)}) != (shapes, {self.device}):
                return False
        except (AttributeError, TypeError, RuntimeError):  # one is None, or not strided
            return False
        return not any(map(_TENSOR.is_neg, grads))

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
        out, table = torch.empty_like(self._one), self._send(grads, None)
        given, size = (norm, float(limit), float(eps), out, self._rows, table), {"BLOCK": 4 * self._block}
        changed = [part for part in self._parts.sums if part.constants["IN_PLACE"]]
        for part in changed:
            codes = {"GRADS": part.constants["GRADS"], "MULTIPLIES": True}
            self._run("clip_factor", len(part.entries), *given, part.entries, **codes, **size)
        if not changed:
            self._run("clip_factor", 1, *given, self._rows, GRADS=1, MULTIPLIES=False, **size)
        self.tables.note_launch()
        return out

    def step(
        self, grads: Grads, hyper: Hyper, found_inf: Scalar = None, inv_scale: Scalar = None, clip: Scalar = None
    ) -> None:
        """Step all rows that have a gradient. Where ``found_inf`` is raised no bit changes.

        ``hyper`` has the options of each group, see :class:`Rule`. A tuple of them is read once: nobody changes it. The
        tensors are fp32 with one element, read on the device, and gradients are multiplied by the last two, those of
        rows ``in_place`` excepted. Versions that autograd keeps of tensors are not raised.
        """
        table = self._send(grads, hyper)
        flags, scaled = {"SKIPS": found_inf is not None}, {"SCALED": inv_scale is not None, "CLIPPED": clip is not None}
        found, inverse, factor = (self._one if given is None else given for given in (found_inf, inv_scale, clip))
        name, rows = self.rule.name, len(self.rows)
        these = self._rows, table, rows, found
        self._run("factors", rows, *these, inverse, factor, self._factors, RULE=name, **flags, **scaled)
        by_row = *these, self._first, self._second, self._factors
        over = {"RULE": name, "NVLAMB": self.rule.use_nvlamb, "CHUNK": 2048, **flags}
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
        shared = found, self._factors, self._first, self._second
        for part in self._parts.steps:
            constants = {**rule, **flags, "PHASE": phase, **part.constants, "BLOCK": self._block}
            self._run("step", len(part.entries), self._rows, given, part.entries, *shared, **constants)

    def _sum(
        self, given: torch.Tensor, found: Scalar, inverse: Scalar, clip: Scalar, out: torch.Tensor, kind: str, p: float
    ) -> None:
        flags = {"CHECKS": found is not None, "SCALED": inverse is not None, "CLIPPED": clip is not None}
        numbers = [self._one if number is None else number for number in (found, inverse, clip)]
        for part in self._parts.sums:
            constants = {**part.constants, "KIND": kind, **flags, "BLOCK": 4 * self._block}
            self._run("sums", len(part.entries), self._rows, given, part.entries, *numbers, out, p, **constants)
        self.tables.note_launch()

    def _total(self, parts: torch.Tensor, inverse: torch.Tensor | None, kind: str, order: float) -> torch.Tensor:
        out, given = torch.empty_like(self._one), (parts, self._sums, self._one if inverse is None else inverse)
        self._run("total", 1, *given, out, order, KIND=kind, SCALED=inverse is not None, CHUNK=8192)
        return out

    def _run(self, name: str, programs: int, *args: Any, **constants: Any) -> None:
        self.tables.before_launch((name, *constants.values()))
        with self._there:
            warps = max(1, _THREADS.get(name, 256) // _kernels().lanes())
            getattr(_kernels(), name)[(programs,)](*args, **constants, num_warps=warps)
        self.launches += 1

    def _send(self, grads: Grads, hyper: Hyper | None) -> torch.Tensor:
        """Return the table of gradients and options on the device; the one that is there, if it has all of it."""
        try:
            words, dtypes = [*map(_ADDRESS, grads)], [*map(_DTYPE, grads)]
        except (AttributeError, TypeError):  # some are None
            words = [0 if grad is None else grad.data_ptr() for grad in grads]
            dtypes = [known if grad is None else grad.dtype for grad, known in zip(grads, self._dtypes, strict=True)]
        if dtypes != self._dtypes:
            self._parts, self._dtypes = self._parts_of(dtypes), dtypes
        for number in self._empty:  # what has no elements has no address, and counts its steps
            words[number] = int(grads[number] is not None)
        if hyper is not None:
            words += self._words_of(hyper)
        sent, table = self.tables.sent, self.tables.send(words)
        self.launches += self.tables.sent - sent
        return table

    def _words_of(self, hyper: Hyper) -> list[int]:
        """Return the words of options; those of a tuple, which nobody changes, once."""
        if hyper is self._packed[0]:
            return self._packed[1]
        words: list[int] = []
        for group in hyper[: self._groups]:
            numbers, places = options_of(group, self.device)
            words += struct.unpack(f"{len(numbers)}q", struct.pack(f"{len(numbers)}d", *numbers))
            words += places
        self._packed = hyper if isinstance(hyper, tuple) else None, words
        return words


@functools.cache
def _kernels() -> Any:
    return importlib.import_module("xamp.onepass.kernels")  # Triton is imported there
