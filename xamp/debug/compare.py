"""``compare``: lines up two traces, and finds the first step and module where they part beyond noise.

Each number of one run is compared with that of the other at the same step. Their difference, relative to the larger of
the two, must exceed a tolerance, and must do so with the same sign at the samples that follow: noise changes its sign.

The tolerance without a third run: 16 unit roundoffs of the lower dtype of the two runs at the first step, growing to 10
times that over 100 steps, for errors add up in training; plus 1.5 times what the series changes from one sample to the
next, growing from 0 over the first 20 steps, or from the step on at which only one run was skipped. With a third run:
3 times the largest difference so far between the first run and the third, plus the 16 roundoffs.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from xamp.debug.series import KINDS, Key, Series, fluctuation, module_order, series_of
from xamp.debug.trace_file import Run
from xamp.errors import PolicyError

__all__ = ["Comparison", "Parting", "compare"]

_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-16, "float64": 2.0**-16}
"""Of the dtype of operators. For fp32 that of TF32's sums of many products, because devices add in other orders."""

_BASE, _GROWTH, _GROWN = 16.0, 100, 10.0
_LASTING = 5  # samples at which a difference must have one sign
_SETTLED, _SPREAD = 20, 1.5
_OF_NOISE = 3.0
_WEIGHTS = 0.004  # how much the norms of the first weights may differ: those of one checkpoint in fp32 and in bf16
_SMALL = 1e-6  # of the largest gradient or update of a step: below this it counts as nothing
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
    """

    a: Run
    b: Run
    noise: str
    steps: int
    partings: list[Parting]
    notes: list[str]
    series_a: Mapping[Key, Series]
    series_b: Mapping[Key, Series]

    @property
    def same(self) -> bool:
        """Whether the runs agree within noise."""
        return not self.partings

    @property
    def first(self) -> Parting | None:
        """The first parting: the first step, and there what a step computes first."""
        return self.partings[0] if self.partings else None

    @property
    def module(self) -> str | None:
        """The module of the first parting that has one, by the order of a step; None where none has."""
        found = next((p for p in self.partings if p.key.kind != "loss"), None)
        return None if found is None else found.key.module

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
                "meaning": self.meaning(),
                "partings": [_plain(parting) for parting in self.partings],
                "notes": self.notes,
            },
            indent=1,
        )

    def meaning(self) -> str:
        """Return one sentence on what the first parting means."""
        first = self.first
        if first is None:
            return f"The runs agree within noise over {self.steps} steps."
        factor = self.factor
        all_by = "" if factor is None else f" All part by the same factor, {factor:.4g}."
        nothing = not (math.isfinite(first.a) and math.isfinite(first.b))
        if nothing and first.key.kind in ("activation", "gradient", "loss"):
            worse = "A" if not math.isfinite(first.a) else "B"
            return f"Only run {worse} has inf or nan there: run that step in xamp.debug.find_nonfinite."
        return {
            "weights": "The weights differ before any step: other seeds, another checkpoint, another initialisation.",
            "activation": "The forward parts here first: another input, another operator, or lost precision.",
            "loss": "The loss parts between two samples: record with a smaller `every` to see the module.",
            "gradient": "The forward agrees and backward parts: underflow, overflow, or a loss that is scaled twice.",
            "update": "The gradients agree and the step parts: the optimizer's settings, its state, or a scale.",
        }[first.key.kind] + all_by


def compare(a: Run, b: Run, noise: Run | None = None) -> Comparison:
    """Compare run ``b`` with run ``a``.

    Args:
        a: a run.
        b: another one, with the same steps.
        noise: a repetition of ``a`` that is right, from which the noise is taken: the same settings with another order
            of sums, such as on another number of threads, or the other device.

    Raises:
        PolicyError: the runs have no step and no number in common.
    """
    series_a, series_b = series_of(a), series_of(b)
    common = [key for key in series_a if key in series_b and series_a[key].keys() & series_b[key].keys()]
    if not common:
        raise PolicyError(
            f"compare {a.path!r} {b.path!r}: no number of the same step is in both ({_span(a)} and {_span(b)}). Record "
            "both runs with the same model, and give recorder.step(loss) in both."
        )
    apart = _first_difference_of_skips(a, b)
    judge = _Judge(a, b, apart, None if noise is None else series_of(noise))
    largest = {kind: _largest(series_a, series_b, kind) for kind in ("gradient", "update", "weights")}
    found = [judge.parting(key, series_a[key], series_b[key], largest.get(key.kind, {})) for key in common]
    order = module_order(a, b)
    partings = sorted((p for p in found if p is not None), key=lambda p: _rank(p, order))
    source = judge.source if noise is None else f"the differences of {a.path} and {noise.path}"
    return Comparison(
        a, b, source, len(a.rows.keys() & b.rows.keys()), partings, _notes(a, b, apart), series_a, series_b
    )


class _Judge:
    """Decides where a series parts."""

    def __init__(self, a: Run, b: Run, apart: int | None, noise: Mapping[Key, Series] | None) -> None:
        lower = max((str(run.header.get("dtype")) for run in (a, b)), key=lambda name: _ROUNDOFF.get(name, 0.0))
        self._base = _BASE * _ROUNDOFF.get(lower, _ROUNDOFF["float32"])
        self._apart = apart
        self._noise = noise
        self._start = min((*a.rows, *a.samples), default=0)
        self.source = f"the roundoff of {lower}"
        self._skipped = {step for run in (a, b) for step, row in run.rows.items() if row.skipped == 1.0}

    def parting(self, key: Key, a: Series, b: Series, largest: Series) -> Parting | None:
        """Return where a series parts, or None."""
        steps = sorted(a.keys() & b.keys())
        if key.kind in ("gradient", "update"):
            steps = [step for step in steps if step not in self._skipped]
        found = [(step, _difference(a[step], b[step], _SMALL * largest.get(step, 0.0))) for step in steps]
        spread = max(fluctuation([series[step] for step in steps]) for series in (a, b)) if steps else 0.0
        noise = {} if self._noise is None else self._noise.get(key, {})
        tolerances: list[float] = []
        seen = 0.0
        for step, _ in found:
            if step in noise:
                seen = max(seen, abs(_difference(a[step], noise[step], _SMALL * largest.get(step, 0.0))))
            tolerances.append(self._tolerance(step, spread, seen if self._noise is not None else None))
        if key.kind == "weights":  # later they follow from the updates
            first = found and found[0][0] == self._start and abs(found[0][1]) > _WEIGHTS
            return Parting(key, self._start, a[self._start], b[self._start], found[0][1], _WEIGHTS) if first else None
        for at, (step, difference) in enumerate(found):
            if _lasts(found[at : at + _LASTING], tolerances[at : at + _LASTING]):
                return Parting(key, step, a[step], b[step], difference, tolerances[at])
        return None

    def _tolerance(self, step: int, spread: float, seen: float | None) -> float:
        if seen is not None:
            return self._base + _OF_NOISE * seen
        since = step - self._start
        settled = min(1.0, since / _SETTLED) if self._apart is None or step <= self._apart else 1.0
        return self._base * (1.0 + (_GROWN - 1.0) * min(1.0, since / _GROWTH)) + _SPREAD * settled * spread


def _lasts(found: Sequence[tuple[int, float]], tolerances: Sequence[float]) -> bool:
    """Return whether each of these differences is beyond its tolerance, with one sign. A single one must be thrice."""
    if math.isinf(found[0][1]):
        return True
    enough = 3.0 if len(found) == 1 else 1.0
    beyond = all(abs(d) > enough * tolerance for (_, d), tolerance in zip(found, tolerances, strict=True))
    return beyond and len({d > 0 for _, d in found if not math.isinf(d)}) <= 1


def _difference(a: float, b: float, small: float) -> float:
    """Return (b - a) relative to the larger one; 0.0 where neither is finite or both are below ``small``."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return 0.0 if math.isfinite(a) == math.isfinite(b) else math.inf
    size = max(abs(a), abs(b))
    return (b - a) / size if size > small else 0.0


def _largest(a: Mapping[Key, Series], b: Mapping[Key, Series], kind: str) -> dict[int, float]:
    found: dict[int, float] = {}
    for series in (a, b):
        for key, values in series.items():
            if key.kind == kind:
                for step, value in values.items():
                    found[step] = max(found.get(step, 0.0), value if math.isfinite(value) else 0.0)
    return found


def _rank(parting: Parting, order: Mapping[str, int]) -> tuple[Any, ...]:
    """Sort by step, then by what a step computes first: forward from the first module, backward from the last."""
    kind, place = parting.key.kind, order.get(parting.key.module, len(order))
    if kind == "update":
        return parting.step, KINDS.index(kind), -abs(parting.difference), place
    return parting.step, KINDS.index(kind), -place if kind == "gradient" else place


def _first_difference_of_skips(a: Run, b: Run) -> int | None:
    differing = [s for s in a.rows.keys() & b.rows.keys() if (a.rows[s].skipped == 1.0) != (b.rows[s].skipped == 1.0)]
    return min(differing, default=None)


def _notes(a: Run, b: Run, apart: int | None) -> list[str]:
    notes = []
    for name, run in (("A", a), ("B", b)):
        skipped = [step for step, row in sorted(run.rows.items()) if row.skipped == 1.0]
        if skipped:
            shown = ", ".join(map(str, skipped[:6])) + (" ..." if len(skipped) > 6 else "")
            notes.append(f"{name} skipped {len(skipped)} of {len(run.rows)} steps: {shown}")
        if not run.closed:
            notes.append(f"{name} was not closed: the process ended early, or is running still")
    if apart is not None:
        notes.append(
            f"from step {apart} on the runs have skipped different steps, so that their weights differ a little"
        )
    only = [sorted(one.keys() - other.keys()) for one, other in ((a.rows, b.rows), (b.rows, a.rows))]
    notes += [f"{len(steps)} steps are in {name} only" for name, steps in zip("AB", only, strict=True) if steps]
    return notes


def _span(run: Run) -> str:
    return f"steps {min(run.rows)} to {max(run.rows)}" if run.rows else "no step"


def _plain(parting: Parting) -> dict[str, Any]:
    found = {"kind": parting.key.kind, "module": parting.key.module, "step": parting.step}
    numbers = {name: getattr(parting, name) for name in ("a", "b", "difference", "tolerance")}
    return found | {name: value if math.isfinite(value) else str(value) for name, value in numbers.items()}
