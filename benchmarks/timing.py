"""Times two ways of doing one thing against each other, in one process, turn about."""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable

import torch


@dataclasses.dataclass(frozen=True)
class Pair:
    """Medians over the rounds: of each side's time in microseconds, of their ratio, of their difference."""

    ours: float
    theirs: float
    ratio: float
    difference: float

    def __str__(self) -> str:
        return f"{self.ours:7.1f} us : {self.theirs:7.1f} us"


def compare(
    ours: Callable[[], object], theirs: Callable[[], object], device: torch.device, *, calls: int, rounds: int
) -> Pair:
    """Run both ``rounds`` times, ``calls`` calls in a row each, who goes first taking turns.

    The ratio is taken within a round, where both sides met the same machine; the median over the rounds drops those in
    which something else ran. Not the minimum: that would compare two lucky moments.
    """
    for _ in range(max(calls, 20)):  # allocators and caches; a fused first step is decided on the host
        ours()
        theirs()
    times: list[tuple[float, float]] = []
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        for index in range(rounds):
            if index % 2:
                b = _time(theirs, device, calls)
                a = _time(ours, device, calls)
            else:
                a = _time(ours, device, calls)
                b = _time(theirs, device, calls)
            times.append((a, b))
    finally:
        gc.enable()
        gc.unfreeze()
    return Pair(
        statistics.median(a for a, _ in times),
        statistics.median(b for _, b in times),
        statistics.median(a / b for a, b in times),
        statistics.median(a - b for a, b in times),
    )


def _time(call: Callable[[], object], device: torch.device, calls: int) -> float:
    """Microseconds a call, the device's work included."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    synchronize(device)
    return (time.perf_counter() - start) / calls * 1e6


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
