"""``xamp.GradScaler`` against ``torch.amp.GradScaler``: the same loop, zero_grad, scale, backward, step, update.

Both sides run the loop of :mod:`benchmarks.step`; only the scaler differs.
"""

from __future__ import annotations

import functools
import statistics

import torch

import xamp
from benchmarks import bounds
from benchmarks.report import Figure, of_ratio
from benchmarks.step import COUNTS, FORMS, Make, Theirs, calls_for
from benchmarks.timing import compare_made


class Ours(Theirs):
    def __init__(self, count: int, make: Make, device: torch.device, *, unscale: bool = True) -> None:
        super().__init__(count, make, device, unscale=unscale)
        self.scaler = xamp.GradScaler(growth_interval=10**6)


def run(device: torch.device, rounds: int) -> list[Figure]:
    """Measure each form and size, with and without an explicit ``unscale_`` before ``step``; last the median of all."""
    figures = []
    for name, (make, _) in FORMS.items():
        for count in COUNTS:
            for unscale in (False, True):
                sides = functools.partial(_sides, count, make, device, unscale)
                pair = compare_made(sides, device, calls=calls_for(count), rounds=rounds)
                case = f"{name}, {count}" + (", unscale_" if unscale else "")
                figures.append(of_ratio(case, pair, bounds.SCALER_RATIO))
    median = statistics.median(figure.value for figure in figures)
    return [*figures, Figure("median of all", median, "ratio", bounds.SCALER_MEDIAN)]


def _sides(count: int, make: Make, device: torch.device, unscale: bool) -> tuple[Ours, Theirs]:
    return Ours(count, make, device, unscale=unscale), Theirs(count, make, device, unscale=unscale)
