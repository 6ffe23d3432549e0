"""What ``compare`` answers: where the runs part, or turn to inf or nan, and in words what that means."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

from xamp.debug.series import Key, Series
from xamp.debug.trace_file import Run
from xamp.debug.turned import Turned

__all__ = ["Comparison", "Parting"]

_SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class Parting:
    """Where one series of the two runs parts.

    Attributes:
        key: the series.
        step: the first step.
        a, b: the two numbers there.
        difference: (b - a), relative to the larger one; inf where only one is finite.
        tolerance: what would count as noise.
    """

    key: Key
    step: int
    a: float
    b: float
    difference: float
    tolerance: float

    def __str__(self) -> str:
        return (
            f"{self.key}: {self.a:.5g} and {self.b:.5g}, {abs(self.difference):.2g} apart; noise {self.tolerance:.2g}"
        )


@dataclasses.dataclass
class Comparison:
    """What two runs come to.

    Attributes:
        a, b: the runs.
        noise: where the tolerance comes from.
        steps: the number of steps that both have.
        partings: for each series that parts, where; the first of all first.
        notes: what else differs.
        series_a, series_b: all series of the two runs.
        turned: where both have inf or nan for good; None where they have not.
        own: the same for run A and for run B alone.
    """

    a: Run
    b: Run
    noise: str
    steps: int
    partings: list[Parting]
    notes: list[str]
    series_a: Mapping[Key, Series]
    series_b: Mapping[Key, Series]
    turned: Turned | None = None
    own: tuple[Turned | None, Turned | None] = (None, None)

    @property
    def same(self) -> bool:
        """Whether the runs agree within noise, and could be compared to their end."""
        return not self.partings and self.turned is None

    @property
    def first(self) -> Parting | None:
        """The first parting: the first step, and there what a step computes first."""
        return self.partings[0] if self.partings else None

    @property
    def module(self) -> str | None:
        """The first module that parts at the step of the first parting; None where only the loss is known there."""
        found = next((p for p in self._at_first() if p.key.kind != "loss"), None)
        return None if found is None else found.key.module

    def _at_first(self) -> list[Parting]:
        return [p for p in self.partings if p.step == self.partings[0].step]

    @property
    def heading(self) -> str:
        """What the runs come to, in one line."""
        if self.first is not None:
            where = "" if self.module is None else f", module {self.module or 'the model itself'}"
            return f"They part at step {self.first.step}{where}"
        if self.turned is not None:
            return f"Both have inf or nan from step {self.turned.step} on{self.turned.place}"
        return "They are the same, within noise"

    @property
    def factor(self) -> float | None:
        """The ratio b / a, where the first gradients or updates to part all differ by the same factor; else None."""
        if self.first is None or self.first.key.kind not in ("gradient", "update"):
            return None
        alike = [p for p in self.partings if p.step == self.first.step and p.key.kind == self.first.key.kind]
        ratios = [p.b / p.a for p in alike if p.a and math.isfinite(p.a) and math.isfinite(p.b)]
        same = len(ratios) == len(alike) > 0 and max(ratios) - min(ratios) <= 0.05 * max(ratios)
        return sorted(ratios)[len(ratios) // 2] if same and min(ratios) > 0 else None

    def to_json(self) -> str:
        """Return the answer as JSON."""
        return json.dumps(
            {
                "what": "xamp compare",
                "schema": _SCHEMA,
                "same": self.same,
                "a": {"path": self.a.path, **self.a.header},
                "b": {"path": self.b.path, **self.b.header},
                "steps": self.steps,
                "noise": self.noise,
                "step": None if self.first is None else self.first.step,
                "module": self.module,
                "kind": None if self.first is None else self.first.key.kind,
                "factor": self.factor,
                "turned": None if self.turned is None else _plain_turned(self.turned),
                "meaning": self.meaning(),
                "partings": [_plain(parting) for parting in self.partings],
                "notes": self.notes,
            },
            indent=1,
        )

    def meaning(self) -> str:
        """Return one or two sentences on what the first parting means."""
        first = self.first
        if first is None:
            return self._agreement()
        factor = self.factor
        all_by = "" if factor is None else f" All part by the same factor, {factor:.4g}."
        if not (math.isfinite(first.a) and math.isfinite(first.b)):
            worse, found = ("A", self.own[0]) if not math.isfinite(first.a) else ("B", self.own[1])
            told = f"Only run {worse} has inf or nan there: run "
            if found is None or found.step > first.step:
                return told + "that step in xamp.debug.find_nonfinite."
            return f"{told}step {found.run} in xamp.debug.find_nonfinite. {found.origin}"
        alone = self.module is None
        return {
            "weights": "The weights differ before any step: other seeds, another checkpoint, another initialisation.",
            "activation": "The forward parts here first: another input, another operator, or lost precision: see "
            "xamp.debug.profile and keep_fp32.",
            "loss": "The loss parts between two samples: record with a smaller `every` to see the module."
            if alone
            else "The modules' results agree and the loss parts: another loss function, or another target.",
            "gradient": "The forward agrees and backward parts: underflow, overflow, or a loss that is scaled twice.",
            "update": "The gradients agree and the step parts: the optimizer's settings, its state, clipping, or a "
            "scale.",
        }[first.key.kind] + all_by

    def _agreement(self) -> str:
        found = self.turned
        if found is None:
            return f"The runs agree within noise over {self.steps} steps."
        before = sum(step < found.step for step in self.a.rows.keys() & self.b.rows.keys())
        return (
            f"The runs agree within noise over the {before} steps before, and no step after them can be compared. "
            f"{found.origin} Run step {found.run} in xamp.debug.find_nonfinite."
        )


def _plain_turned(found: Turned) -> dict[str, Any]:
    key = found.key
    where = {"kind": None, "module": None} if key is None else {"kind": key.kind, "module": key.module}
    return {"step": found.step, "seen": found.seen, **where, "origin": found.origin, "run": found.run}


def _plain(parting: Parting) -> dict[str, Any]:
    found = {"kind": parting.key.kind, "module": parting.key.module, "step": parting.step}
    numbers = {name: getattr(parting, name) for name in ("a", "b", "difference", "tolerance")}
    return found | {name: value if math.isfinite(value) else str(value) for name, value in numbers.items()}
