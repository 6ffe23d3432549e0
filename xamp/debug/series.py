"""Series of numbers out of a trace: the loss, and for each module the size of its results, gradients and updates."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

from xamp.debug.trace_file import Run, Sample

__all__ = ["KINDS", "Key", "Series", "fluctuation", "module_order", "series_of"]

KINDS = ("weights", "activation", "loss", "gradient", "update")
"""The kinds of series, in the order in which a step computes them."""


@dataclasses.dataclass(frozen=True)
class Key:
    """What a series is about.

    Attributes:
        kind: one of :data:`KINDS`. ``"weights"``: norm of the parameters before the step. ``"activation"``: root mean
            square of the first result. ``"gradient"``: norm of the parameters' gradients. ``"update"``: norm of what
            the step changed.
        module: qualified name; empty for the model itself, and for the loss.
    """

    kind: str
    module: str = ""

    def __str__(self) -> str:
        return self.kind if self.kind == "loss" else f"{self.kind} of {self.module or 'the model itself'}"


Series = Mapping[int, float]
"""A number for each step at which it is known."""


def series_of(run: Run) -> dict[Key, dict[int, float]]:
    """Return all series of a run, but for numbers that are not known."""
    found: dict[Key, dict[int, float]] = {}
    losses = {step: row.loss for step, row in sorted(run.rows.items()) if step not in (run.without_loss or ())}
    if run.without_loss is not None or not all(map(math.isnan, losses.values())):
        found[Key("loss")] = losses
    for step, sample in sorted(run.samples.items()):
        for key, number in _numbers(sample).items():
            found.setdefault(key, {})[step] = number
    return {key: values for key, values in found.items() if values}


def _numbers(sample: Sample) -> dict[Key, float]:
    numbers = {Key("activation", name): triple[0] for name, triple in sample.activations.items()}
    squares: dict[Key, list[float]] = {}
    for name, triple in sample.parameters.items():
        for kind, number in zip(("gradient", "weights", "update"), triple, strict=True):
            if not number < 0:  # nan is a number that is not finite
                squares.setdefault(Key(kind, sample.owners[name]), []).append(number * number)
    return numbers | {key: math.sqrt(sum(each)) for key, each in squares.items()}


def module_order(*runs: Run) -> dict[str, int]:
    """Return for each module its place in the order of first calls, which is that of the forward."""
    order: dict[str, int] = {}
    for run in runs:
        for sample in run.samples.values():
            for name in (*sample.activations, *sample.owners.values()):
                order.setdefault(name, len(order))
    return order


def fluctuation(values: Sequence[float]) -> float:
    """Return how much a series changes from one step to the next, relative to itself: the median."""
    import statistics  # 2 ms, which a program that compares nothing need not pay

    changes = [
        abs(b - a) / max(abs(a), abs(b))
        for a, b in itertools.pairwise(values)
        if math.isfinite(a) and math.isfinite(b) and max(abs(a), abs(b)) > 0
    ]
    return statistics.median(changes) if changes else 0.0
