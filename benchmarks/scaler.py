"""``xamp.GradScaler`` against ``torch.amp.GradScaler``: the same loop, zero_grad, scale, backward, step, update.

Both sides run the loop of :mod:`benchmarks.step`; only the scaler differs.
"""

from __future__ import annotations

import torch

import xamp
from benchmarks.report import Figure, of_ratio
from benchmarks.step import COUNTS, FORMS, Make, Theirs, calls_for
from benchmarks.timing import compare


class Ours(Theirs):
    def __init__(self, count: int, make: Make, device: torch.device, *, unscale: bool = True) -> None:
        super().__init__(count, make, device, unscale=unscale)
        self.scaler = xamp.GradScaler(growth_interval=10**6)


def run(device: torch.device, rounds: int) -> list[Figure]:
    """Measure each form and size, with and without an explicit ``unscale_`` before ``step``."""
    figures = []
    for name, (make, _) in FORMS.items():
        for count in COUNTS:
            for unscale in (False, True):
                ours, theirs = (kind(count, make, device, unscale=unscale) for kind in (Ours, Theirs))
                pair = compare(ours, theirs, device, calls=calls_for(count), rounds=rounds)
                case = f"{name}, {count}" + (", unscale_" if unscale else "")
                figures.append(of_ratio(case, pair))
    return figures
