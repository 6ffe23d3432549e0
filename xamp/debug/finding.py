"""What :func:`xamp.debug.find_nonfinite` found, and the text that says so."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import torch

from xamp.debug.places import Place
from xamp.debug.ranges import Range

__all__ = ["Finding", "Step"]

_CASTS = ("aten._to_copy.default", "aten.copy_.default")

Kind = Literal["operator", "loss scale", "input", "parameter", "buffer", "gradient"]


class Step(NamedTuple):
    """One operator before the one that was found."""

    place: Place
    operator: str
    range: Range

    def __str__(self) -> str:
        return f"{self.operator}, {self.place.phase}, {self.place}: {self.range}"


@dataclasses.dataclass(frozen=True)
class Finding:
    """The first inf or nan.

    Attributes:
        kind: what produced it. ``"operator"``: an operator made it from finite values. ``"loss scale"``: a backward
            operator made it, and its result would fit without the loss scale. ``"input"``, ``"parameter"``,
            ``"buffer"``, ``"gradient"``: it was there before the operator that read it.
        module: qualified name of the module in which it was made or first read; the empty string for the model itself,
            None outside of all modules.
        module_class: the name of the module's class; empty outside.
        operator: the operator that made it or first read it, such as ``"aten.exp.default"``.
        phase: ``"forward"``, ``"backward"`` or ``"step"`` (of an optimizer).
        call: how many calls of the module had begun.
        recomputed: it happened while activation checkpointing repeated a forward.
        tensor: qualified name of the parameter or buffer, for ``"gradient"`` of the parameter it belongs to; else
            empty.
        result: the range of what is not finite.
        operands: the ranges of the operator's floating arguments before it ran.
        loss_scale: the loss scale at that time; 1.0 where there is none.
        wide: the largest absolute value of the result, computed again in a wider dtype; None where it is not finite
            there either, or cannot be computed again.
        before: the operators before, oldest first.
    """

    kind: Kind
    module: str | None
    module_class: str
    operator: str
    phase: str
    call: int
    recomputed: bool
    tensor: str
    result: Range
    operands: tuple[Range, ...]
    loss_scale: float
    wide: float | None
    before: tuple[Step, ...]

    @property
    def place(self) -> Place:
        """The module and the phase."""
        return Place(self.module, self.module_class, self.phase, self.call, self.recomputed)

    def __str__(self) -> str:
        lines = [
            f"The first inf or nan: {self._source()}",
            f"  operator   {self.operator}, {self.phase}{', repeated by checkpointing' * self.recomputed}",
            f"  module     {self.place}" + (f", call {self.call}" if self.call > 1 else ""),
            f"  {'result' if self.kind in ('operator', 'loss scale') else 'value':<10} {self.result}",
        ]
        lines += [f"  operand {index}  {found}" for index, found in enumerate(self.operands)]
        if self.loss_scale != 1.0 and self.phase == "backward":
            lines.append(f"  loss scale {self.loss_scale:g}")
        lines += [f"  before     {step}" for step in self.before]
        return "\n".join([*lines, f"  what to do {self._advice()}"])

    def _source(self) -> str:
        where = self.place
        if self.kind == "operator":
            return f"{self.operator} in {where} made it in {self.phase} from finite values."
        if self.kind == "loss scale":
            return f"the loss scale: {self.operator} in {where} overflows in backward, and would not without the scale."
        if self.kind == "input":
            return f"a tensor that is no parameter of the model came in; {self.operator} in {where} reads it first."
        owned = "the gradient of " if self.kind == "gradient" else f"{self.kind} "
        return f"{owned}{self.tensor!r} held it already; {self.operator} in {where} reads it first."

    def _advice(self) -> str:
        if self.kind == "loss scale":
            return (
                f"nothing, where the scale is dynamic: it backs off. {self._reach()}; divided by the scale "
                f"{(self.wide or 0.0) / self.loss_scale:.3g}. Where it happens at every step, start lower (init_scale)."
            )
        if self.kind == "input":
            return "look at the batch: a missing value, a division by zero or a logarithm where the data is prepared."
        if self.kind in ("parameter", "buffer", "gradient"):
            cast = f", or it did not fit when it was cast to {self.result.dtype}" if self._is_lower else ""
            steps = "run the steps before in find_nonfinite, or lower the learning rate"
            return f"find the step that wrote it: {steps}{cast}."
        if self.wide is not None and self._is_lower:
            kept = f"keep_fp32=[{self.module!r}]" if self.module else "float32 for this operator"
            if self.module and self.operator in _CASTS:
                kept += " (not where it is there already: the result of such a module is cast after it)"
            return f"{self._reach()}: {kept}, a level with bf16, or smaller values."
        return "the operator gives inf or nan in a wider dtype too: look for a division, log, exp or square root of 0."

    @property
    def _is_lower(self) -> bool:
        return self.result.dtype in ("float16", "bfloat16")

    def _reach(self) -> str:
        limit = torch.finfo(getattr(torch, self.result.dtype)).max
        return f"the result reaches {self.wide:.3g}, and {self.result.dtype} ends at {limit:.5g}"
