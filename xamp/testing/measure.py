"""Measurements that hold on any machine: the ratio of two times in one process, and the bytes alive at one time."""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from xamp.torch_compat.torch_private.modes import TorchDispatchMode, tree_iter

if TYPE_CHECKING:  # with pytest, which who only measures need not have
    from xamp.testing.lane import Lane

__all__ = ["Pair", "Storages", "best_ratio", "quartiles", "rounds_of"]

ATTEMPTS = 5
"""How often a ratio is measured until it is within its bound: other load on the machine can only make it worse."""

ROUNDS = 15


def best_ratio(ours: Callable[[], object], theirs: Callable[[], object], lane: Lane, bound: float, calls: int) -> float:
    """Measure the time of ``ours`` over that of ``theirs``, in several attempts.

    Returns the first ratio within ``bound``, else the smallest one.

    Args:
        ours: The code to judge.
        theirs: The code to compare it with.
        lane: The lane whose device both run on; the device's work counts.
        bound: A ratio that is good enough to stop.
        calls: How many calls run in a row between two readings of the clock.
    """
    wait = getattr(lane.backend.runtime(lane.kind), "synchronize", lambda: None)
    least = float("inf")
    for _ in range(ATTEMPTS):
        least = min(least, Pair.of(rounds_of(ours, theirs, wait, calls=calls, rounds=ROUNDS)).ratio)
        if least <= bound:
            break
    return least


@dataclasses.dataclass(frozen=True)
class Pair:
    """Medians over the rounds: each side's microseconds for one call, their ratio, and their difference.

    The two spreads are the quartiles of the ratio and of the difference: half of the rounds lie between them.
    """

    ours: float
    theirs: float
    ratio: float
    difference: float
    ratio_spread: tuple[float, float]
    difference_spread: tuple[float, float]

    @classmethod
    def of(cls, times: Sequence[tuple[float, float]]) -> Pair:
        """Return the medians of what :func:`rounds_of` returned."""
        ratios, differences = [a / b for a, b in times], [a - b for a, b in times]
        return cls(
            statistics.median(a for a, _ in times),
            statistics.median(b for _, b in times),
            statistics.median(ratios),
            statistics.median(differences),
            quartiles(ratios),
            quartiles(differences),
        )

    def __str__(self) -> str:
        return f"{self.ours:7.1f} us : {self.theirs:7.1f} us"


def rounds_of(
    ours: Callable[[], object],
    theirs: Callable[[], object],
    wait: Callable[[], object],
    *,
    calls: int,
    rounds: int,
    warm_up: int = 20,
    clock: Callable[[], float] = time.perf_counter,
) -> list[tuple[float, float]]:
    """Time both sides in ``rounds`` rounds of ``calls`` calls each; they take turns to go first.

    Returns the microseconds of a call of each side, for each round. The ratio is taken within a round, where both sides
    run under the same load. The median over the rounds drops rounds in which something else ran. The minimum would
    compare two lucky moments. ``wait`` waits for the device. Before the first round each side is called ``warm_up``
    times, or ``calls`` times if that is more. ``clock`` returns seconds.
    """
    for _ in range(max(calls, warm_up)):  # fills allocators and caches; the host decides about the first fused step
        ours()
        theirs()
    times: list[tuple[float, float]] = []
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        for index in range(rounds):
            pair = (ours, theirs) if index % 2 else (theirs, ours)
            first, second = (_time(call, wait, calls, clock) for call in pair)
            times.append((first, second) if index % 2 else (second, first))
    finally:
        if was_on:
            gc.enable()
    return times


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The lower and the upper quartile; of one value, that value twice."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, method="inclusive")
    return low, high


def _time(call: Callable[[], object], wait: Callable[[], object], calls: int, clock: Callable[[], float]) -> float:
    """Microseconds for one call."""
    wait()
    start = clock()
    for _ in range(calls):
        call()
    wait()
    return (clock() - start) / calls * 1e6


class Storages(TorchDispatchMode):
    """Counts the bytes of all live storages, on one device type, that an operator has touched; and their peak.

    It counts tensors, not an allocator's blocks, so it gives the same number each time and on every device.

    Args:
        kind: The device type.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kind = kind
        self._peak = 0
        self._now = 0
        self._live: dict[int, tuple[weakref.ref[Any], int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.note(tree_iter((args, kwargs, result)))
        return result

    def note(self, values: Iterable[Any]) -> None:
        """Count the tensors among ``values`` from now until they are freed."""
        for value in values:
            if isinstance(value, torch.Tensor) and value.device.type == self._kind and not value.is_sparse:
                self._add(value.untyped_storage())

    def lap(self) -> int:
        """The peak since the last call, in bytes."""
        peak, self._peak = self._peak, self._now
        return peak

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._live and self._live[key][0]() is not None:
            return
        self._live[key] = (weakref.ref(storage, lambda ref, key=key: self._drop(key, ref)), size)  # type: ignore[misc]
        self._now += size
        self._peak = max(self._peak, self._now)

    def _drop(self, key: int, ref: Any) -> None:
        held = self._live.get(key)
        if held is not None and held[0] is ref:
            del self._live[key]
            self._now -= held[1]
