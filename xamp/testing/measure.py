"""Measures that hold on any machine: a ratio of two times in one process, and the bytes that live at once."""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from xamp.testing.lane import Lane

__all__ = ["Pair", "Storages", "best_ratio", "compare"]

ATTEMPTS = 5
"""How often a ratio is taken until it is within its bound: what else runs on the machine only ever makes it worse."""

ROUNDS = 15


def best_ratio(ours: Callable[[], object], theirs: Callable[[], object], lane: Lane, bound: float, calls: int) -> float:
    """Time of a call of ``ours`` over that of ``theirs``: the first within ``bound`` of some attempts, else the least.

    Args:
        ours: What is judged.
        theirs: What it is held against.
        lane: Whose device both run on; its work counts.
        bound: Is enough.
        calls: In a row, between two looks at the clock.
    """
    wait = getattr(lane.backend.runtime(lane.kind), "synchronize", lambda: None)
    least = float("inf")
    for _ in range(ATTEMPTS):
        least = min(least, compare(ours, theirs, wait, calls=calls, rounds=ROUNDS).ratio)
        if least <= bound:
            break
    return least


@dataclasses.dataclass(frozen=True)
class Pair:
    """Medians over the rounds: of each side's time in microseconds a call, of their ratio, of their difference."""

    ours: float
    theirs: float
    ratio: float
    difference: float

    def __str__(self) -> str:
        return f"{self.ours:7.1f} us : {self.theirs:7.1f} us"


def compare(
    ours: Callable[[], object], theirs: Callable[[], object], wait: Callable[[], object], *, calls: int, rounds: int
) -> Pair:
    """Run both ``rounds`` times, ``calls`` calls in a row each, who goes first taking turns.

    The ratio is taken within a round, where both sides met the same machine; the median over the rounds drops those in
    which something else ran. Not the minimum: that would compare two lucky moments. ``wait`` waits for the device.
    """
    for _ in range(max(calls, 20)):  # allocators and caches; a fused first step is decided on the host
        ours()
        theirs()
    times = []
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        for index in range(rounds):
            pair = (ours, theirs) if index % 2 else (theirs, ours)
            found = [_time(call, wait, calls) for call in pair]
            times.append(found if index % 2 else found[::-1])
    finally:
        if was_on:
            gc.enable()
    return Pair(
        statistics.median(a for a, _ in times),
        statistics.median(b for _, b in times),
        statistics.median(a / b for a, b in times),
        statistics.median(a - b for a, b in times),
    )


def _time(call: Callable[[], object], wait: Callable[[], object], calls: int) -> float:
    """Microseconds a call."""
    wait()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    wait()
    return (time.perf_counter() - start) / calls * 1e6


class Storages(TorchDispatchMode):
    """Bytes of all live storages on a type of device that an operator has touched, and their peak.

    Counts tensors, not what an allocator holds, and so gives the same number each time and on every device.

    Args:
        kind: The type of device.
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
        """The peak since the last call, bytes."""
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
