"""What the modules of one run returned, and how it differs from another run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from xamp.debug.ranges import dense, is_finite
from xamp.scaling.optimizer import managed_by

__all__ = ["Measured", "Record", "Row", "relative_error", "rows_of"]


@dataclasses.dataclass(eq=False)
class Record:
    """One call of a module.

    Attributes:
        kind: the name of its class.
        entry: the name of the module that had returned last when this one was called.
        output: a copy of its first result.
        loss_scale: by which its gradient is scaled.
        gradient: the gradient of that result, scaled; None where it has none.
    """

    kind: str
    entry: str | None
    output: torch.Tensor
    loss_scale: float
    gradient: torch.Tensor | None = None

    def take(self, gradient: torch.Tensor) -> None:
        """Keep the gradient of the result."""
        self.gradient = next(dense(gradient)).clone()

    @property
    def unscaled(self) -> torch.Tensor | None:
        """The gradient divided by the loss scale, fp64."""
        return None if self.gradient is None else _exact(self.gradient) / self.loss_scale


@dataclasses.dataclass(eq=False)
class Measured:
    """One run of a batch.

    Attributes:
        level: the level; empty for a run without xamp.
        loss_scale: the loss scale in use.
        dynamic, floor, backoff: how it would move.
        loss: the loss.
        output: the floating tensors of the output.
        records: the calls of each module.
        gradients: by parameter, unscaled.
    """

    level: str = ""
    loss_scale: float = 1.0
    dynamic: bool = False
    floor: float = 1.0
    backoff: float = 0.5
    loss: float = math.nan
    output: list[torch.Tensor] = dataclasses.field(default_factory=list)
    records: dict[str, list[Record]] = dataclasses.field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, session: Any) -> Measured:
        """Return an empty run of a model in ``session``; None: of a plain model."""
        if session is None:
            return cls()
        policy, scaler = session.policy, session.engine.scalers[0]
        scale = scaler.host_scale if policy.scales else 1.0
        return cls(policy.level, scale, policy.dynamic, scaler.rules.floor, policy.backoff_factor)

    def take_gradients(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Keep the gradients of the parameters, or of their masters, by qualified name."""
        named = list(model.named_parameters())
        if optimizer is not None:
            stepped = [param for group in optimizer.param_groups for param in group["params"]]
            if (found := managed_by(optimizer)) is not None:
                found.state.gradients.move_held()
                named = list(zip(found.engine.models.names_of(stepped), stepped, strict=True))
        self.gradients = {name: next(dense(p.grad)) for name, p in named if p.grad is not None}

    def all_gradients(self) -> list[torch.Tensor]:
        """Return the gradients of all parameters, in the order of their names."""
        return [self.gradients[name] for name in sorted(self.gradients)]

    @property
    def steps_to_floor(self) -> int:
        """How many overflows bring the loss scale to its floor."""
        return max(1, math.ceil(math.log(self.loss_scale / self.floor) / -math.log(self.backoff) - 1e-9))

    @property
    def all_finite(self) -> bool:
        """Whether a smaller loss scale would change nothing: backward is finite, or the forward is not."""
        if not math.isfinite(self.loss):
            return True
        inner = [record.gradient for calls in self.records.values() for record in calls if record.gradient is not None]
        return all(map(is_finite, (*self.gradients.values(), *inner)))


@dataclasses.dataclass(frozen=True)
class Row:
    """One module at the level against the reference.

    Attributes:
        module: qualified name; empty for the model itself.
        kind: the name of its class.
        calls: how often it was called.
        dtype: the dtype of its result at the level.
        error: relative error of its results: the norm of the difference over the norm of the reference. inf where a
            result is not finite.
        fp32_error: the same of the fp32 run; 0.0 where fp32 is the reference.
        underflow: the share of the results that are zero, and are not in the reference.
        overflow: the share of the results that are inf or nan, and are finite in the reference.
        smallest, largest: the smallest absolute value above zero, and the largest, of the reference.
        gradient_error, gradient_underflow, gradient_overflow: the same of the gradients of its results, as scaled by
            the loss scale; nan where there are none.
        gradient_smallest, gradient_largest: of the reference, times the loss scale.
        own: how much of error and loss this module adds to what reaches it, in forward and in backward: a first-order
            estimate, by which modules are chosen for trying.
    """

    module: str
    kind: str
    calls: int
    dtype: str
    error: float
    fp32_error: float
    underflow: float
    overflow: float
    smallest: float
    largest: float
    gradient_error: float
    gradient_underflow: float
    gradient_overflow: float
    gradient_smallest: float
    gradient_largest: float
    own: float


def relative_error(found: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    """Return the norm of the difference over the norm of ``exact``; inf where ``found`` is not finite and it is."""
    if len(found) != len(exact) or not found:
        return math.nan
    wrong = size = 0.0
    for one, other in zip(map(_exact, found), map(_exact, exact), strict=True):
        if one.shape != other.shape:
            return math.nan
        usable = other.isfinite()
        one, other = one[usable], other[usable]
        if not bool(one.isfinite().all()):
            return math.inf
        wrong += float((one - other).abs().square().sum())
        size += float(other.abs().square().sum())
    return math.sqrt(wrong / size) if size else (0.0 if wrong == 0.0 else math.inf)


def rows_of(low: Measured, exact: Measured, single: Measured) -> list[Row]:
    """Compare run ``low`` with ``exact``, module by module, in the order in which modules were first entered."""
    rows = {name: _row(name, low, exact, single) for name in low.records if name in exact.records}
    found: dict[str, Row] = {}
    for name, row in rows.items():  # modules inside come before those that hold them
        entry = rows.get(low.records[name][0].entry or "")
        inside = sum(other.own for other in found.values() if not name or other.module.startswith(name + "."))
        found[name] = dataclasses.replace(row, own=max(0.0, _added(row, entry) - inside))
    order = list(exact.records)
    return sorted(found.values(), key=lambda row: order.index(row.module))


def _row(name: str, low: Measured, exact: Measured, single: Measured) -> Row:
    calls, references = low.records[name], exact.records[name]
    pairs = list(zip(calls, references, strict=False))
    outputs = [(record.output, reference.output) for record, reference in pairs]
    gradients = [
        (record.gradient, reference.gradient * low.loss_scale)
        for record, reference in pairs
        if record.gradient is not None and reference.gradient is not None
    ]
    under, over = _lost(outputs)
    gradient_under, gradient_over = _lost(gradients)
    return Row(
        module=name,
        kind=calls[0].kind,
        calls=len(calls),
        dtype=str(calls[0].output.dtype).removeprefix("torch."),
        error=relative_error(*_columns(outputs)),
        fp32_error=_error_of(single, exact, name),
        underflow=under,
        overflow=over,
        smallest=_smallest(outputs),
        largest=_largest(outputs),
        gradient_error=relative_error(*_columns(gradients)),
        gradient_underflow=gradient_under,
        gradient_overflow=gradient_over,
        gradient_smallest=_smallest(gradients),
        gradient_largest=_largest(gradients),
        own=0.0,
    )


def _error_of(single: Measured, exact: Measured, name: str) -> float:
    calls = zip(single.records.get(name, ()), exact.records[name], strict=False)
    return 0.0 if single is exact else relative_error(*_columns([(one.output, other.output) for one, other in calls]))


def _added(row: Row, entry: Row | None) -> float:
    """Return what a module adds to the errors that reach it: its results' in forward, its argument's in backward."""
    if entry is None:
        return _capped(row.error) + row.underflow + row.overflow
    forward = [(row.error, entry.error), (row.underflow, entry.underflow), (row.overflow, entry.overflow)]
    backward = [
        (entry.gradient_error, row.gradient_error),
        (entry.gradient_underflow, row.gradient_underflow),
        (entry.gradient_overflow, row.gradient_overflow),
    ]
    return sum(max(0.0, _capped(more) - _capped(less)) for more, less in (*forward, *backward))


def _capped(value: float) -> float:
    return 0.0 if math.isnan(value) else min(value, 2.0)


_Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]


def _columns(pairs: _Pairs) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return [one for one, _ in pairs], [other for _, other in pairs]


def _lost(pairs: _Pairs) -> tuple[float, float]:
    """Return the shares of the elements that became zero and that became inf or nan; nan where there are none."""
    zeros = infinite = total = 0
    for one, other in pairs:
        if one.shape == other.shape:
            one, other = one.detach().cpu(), other.detach().cpu()
            zeros += int(((one == 0) & (other != 0)).sum())
            infinite += int((~one.isfinite() & other.isfinite()).sum())
            total += one.numel()
    return (zeros / total, infinite / total) if total else (math.nan, math.nan)


def _smallest(pairs: _Pairs) -> float:
    found = [above.min() for _, other in pairs if (above := (size := _exact(other).abs())[size > 0]).numel()]
    return float(min(found)) if found else 0.0


def _largest(pairs: _Pairs) -> float:
    found = [size.max() for _, other in pairs if (size := _exact(other).abs()).numel()]
    return float(max(found)) if found else 0.0


def _exact(value: torch.Tensor) -> torch.Tensor:
    value = value.detach().cpu()
    return value.to(torch.complex128) if value.is_complex() else value.double()
