"""``compare``: lines up two traces, and finds the first step and module where they part beyond noise.

Each number of one run is compared with that of the other at the same step. Their difference, relative to the larger of
the two, must exceed a tolerance, and must do so with the same sign at the samples that follow: noise changes its sign.

The tolerance without a third run: 16 unit roundoffs of the lower dtype of the two runs at the first step, growing to 10
times that over 100 steps, for errors add up in training; plus 1.5 times what the series changes from one sample to the
next, growing from 0 over the first 20 steps, or from the step on at which only one run was skipped. With a third run:
3 times the largest difference so far between the first run and the third, plus the 16 roundoffs.

Numbers of which neither run's is finite cannot be compared; they are counted. Where both runs have inf or nan to the
end, they are not the same: see :mod:`xamp.debug.turned`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from xamp.debug.comparison import Comparison, Parting
from xamp.debug.series import KINDS, Key, Series, fluctuation, module_order, series_of
from xamp.debug.trace_file import Run
from xamp.debug.turned import not_compared, turned
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
    pairs = {
        key: [(s, series_a[key][s], series_b[key][s]) for s in judge.steps(key, series_a, series_b)] for key in common
    }
    notes = [*_notes(a, b, apart), *judge.notes(noise), *filter(None, [not_compared(pairs)])]
    both, *own = (
        turned(each, lambda key: _order(key, order)) for each in ([series_a, series_b], [series_a], [series_b])
    )
    steps = len(a.rows.keys() & b.rows.keys())
    return Comparison(a, b, source, steps, partings, notes, series_a, series_b, both, (own[0], own[1]))


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
        self._no_noise: list[int] = []  # steps at which the third run is not finite, and the first is

    def steps(self, key: Key, a: Mapping[Key, Series], b: Mapping[Key, Series]) -> list[int]:
        """Return the steps at which a series of both runs counts."""
        found = sorted(a[key].keys() & b[key].keys())
        return [step for step in found if key.kind not in ("gradient", "update") or step not in self._skipped]

    def notes(self, noise: Run | None) -> list[str]:
        """Return what is to be said of the third run."""
        if noise is None or not self._no_noise:
            return []
        return [
            f"the third run, {noise.path}, has inf or nan from step {min(self._no_noise)} on where A has none: no "
            "noise is taken from it there, and it may not be a run that is right"
        ]

    def parting(self, key: Key, a: Series, b: Series, largest: Series) -> Parting | None:
        """Return where a series parts, or None."""
        steps = self.steps(key, {key: a}, {key: b})
        found = [(step, _difference(a[step], b[step], _SMALL * largest.get(step, 0.0))) for step in steps]
        spread = max(fluctuation([series[step] for step in steps]) for series in (a, b)) if steps else 0.0
        noise = {} if self._noise is None else self._noise.get(key, {})
        tolerances: list[float] = []
        seen = 0.0
        for step, _ in found:
            lacks = step in noise and math.isfinite(a[step]) and not math.isfinite(noise[step])
            if step in noise and math.isfinite(a[step]) and not lacks:
                seen = max(seen, abs(_difference(a[step], noise[step], _SMALL * largest.get(step, 0.0))))
            if lacks:
                self._no_noise.append(step)
            usual = self._tolerance(step, spread)
            own = self._base + _OF_NOISE * seen
            tolerances.append(usual if self._noise is None else max(usual, own) if lacks else own)
        if key.kind == "weights":  # later they follow from the updates
            first = found and found[0][0] == self._start and abs(found[0][1]) > _WEIGHTS
            return Parting(key, self._start, a[self._start], b[self._start], found[0][1], _WEIGHTS) if first else None
        for at, (step, difference) in enumerate(found):
            if _lasts(found[at : at + _LASTING], tolerances[at : at + _LASTING]):
                return Parting(key, step, a[step], b[step], difference, tolerances[at])
        return None

    def _tolerance(self, step: int, spread: float) -> float:
        """Return the tolerance where no third run says what noise is."""
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
    kind, place = _order(parting.key, order)
    return parting.step, kind, -abs(parting.difference) if parting.key.kind == "update" else 0.0, place


def _order(key: Key, order: Mapping[str, int]) -> tuple[int, int]:
    place = order.get(key.module, len(order))
    return KINDS.index(key.kind), -place if key.kind == "gradient" else place


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
