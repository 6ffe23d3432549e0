"""Times two ways of doing one thing against each other, alternating in one process."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch

from xamp.testing import measure
from xamp.testing.measure import Pair

__all__ = [
    "Pair",
    "clock_of",
    "compare",
    "compare_made",
    "copy_rate",
    "first_wait",
    "module_of",
    "multiplication_rate",
    "seconds",
    "synchronize",
]


def compare(
    ours: Callable[[], object],
    theirs: Callable[[], object],
    device: torch.device,
    *,
    calls: int,
    rounds: int,
    warm_up: int = 20,
) -> Pair:
    """Return the medians of :func:`xamp.testing.measure.rounds_of`; the time includes the device's work."""
    return compare_made(lambda: (ours, theirs), device, calls=calls, rounds=rounds, warm_up=warm_up, made=1)


MADE = 5
"""How often a pair is made anew: where its tensors lie in memory moves its times by percents as long as it lives."""


def compare_made(
    make: Callable[[], tuple[Callable[[], object], Callable[[], object]]],
    device: torch.device,
    *,
    calls: int,
    rounds: int,
    warm_up: int = 20,
    made: int = MADE,
) -> Pair:
    """As :func:`compare`, of the two sides that ``make`` returns. It is called ``made`` times; they share rounds."""
    clock, wait = clock_of(device), functools.partial(synchronize, device)
    times = []
    each = max(1, rounds // made)
    for _ in range(made):
        times += measure.rounds_of(*make(), wait, calls=calls, rounds=each, warm_up=warm_up, clock=clock)
    return Pair.of(times)


def clock_of(device: torch.device) -> Callable[[], float]:
    """Seconds: on a CPU those that this process computes, so that it does not count how long it waits for others."""
    return time.process_time if device.type == "cpu" else time.perf_counter


def seconds(call: Callable[[], object], device: torch.device, calls: int) -> float:
    """Seconds for one call, the device's work included."""
    clock = clock_of(device)
    synchronize(device)
    start = clock()
    for _ in range(calls):
        call()
    synchronize(device)
    return (clock() - start) / calls


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        module_of(device).synchronize(device)


def module_of(device: torch.device) -> Any:
    """The module of torch for the device."""
    return torch.get_device_module(device)


def first_wait(step: Callable[[], object], device: torch.device, steps: int) -> str | None:
    """Run ``step`` in the device's sync debug mode, which raises at the first operation that waits for the device.

    Returns the first line of that error, "" if no operation waits, and None if the device has no such mode.
    """
    set_mode = None if device.type == "cpu" else getattr(module_of(device), "set_sync_debug_mode", None)
    if set_mode is None:
        return None
    set_mode("error")
    try:
        for _ in range(steps):
            step()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        set_mode("default")
    return ""


@functools.cache
def multiplication_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs a second of a matrix multiplication: what the device reaches, not what its data sheet promises."""
    side = 256 if device.type == "cpu" else 8192
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    seconds(lambda: a @ b, device, 3)
    return 2 * side**3 / min(seconds(lambda: a @ b, device, 5) for _ in range(5))


def copy_rate(device: torch.device) -> float:
    """Bytes a second that a copy within the device's memory moves: those that it reads, and those that it writes."""
    count = 2**24 if device.type == "cpu" else 2**28
    a, b = (torch.zeros(count, device=device) for _ in range(2))
    seconds(lambda: b.copy_(a), device, 3)
    return 2 * 4 * count / min(seconds(lambda: b.copy_(a), device, 3) for _ in range(7))
