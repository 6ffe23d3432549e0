"""Apex's casts around functions: what they cost a call that needs no cast, and, for information, a call that does.

The same calls run with the casts installed and without, alternating in one process, because casts can be removed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from benchmarks import bounds
from benchmarks.report import Figure
from xamp.apex._handle import init

Call = Callable[[], object]
Times = dict[str, float]

x = torch.linspace(-1.0, 1.0, 4).reshape(2, 2)
half, row = x.half(), torch.ones(2)
weight, bias = torch.nn.Parameter(x.clone()), torch.nn.Parameter(row.clone())
low_weight, low_bias = weight.detach().half(), bias.detach().half()

# Functions on Apex's lists: calls as in a model, whose arguments already have the right dtype. Each names the function
# in full, so that Python looks it up again.
LISTED: dict[str, Call] = {
    "torch.mm": lambda: torch.mm(half, half),
    "half @ half": lambda: half @ half,
    "F.linear": lambda: F.linear(half, low_weight, low_bias),
    "F.softmax": lambda: F.softmax(x, 1),
    "F.softmax, by name": lambda: F.softmax(x, dim=1),
    "F.layer_norm": lambda: F.layer_norm(x, (2,), bias, bias, 1e-5),
    "x.sum()": lambda: x.sum(),
    "x**2": lambda: x**2,
    "x + x": lambda: x + x,
    "x * 2.0": lambda: x * 2.0,
    "torch.cat": lambda: torch.cat([x, x]),
    "x.add_": lambda: half.add_(half),
}
UNLISTED: dict[str, Call] = {
    "torch.relu": lambda: torch.relu(x),
    "F.relu": lambda: F.relu(x),
    "x.view": lambda: x.view(4),
    "x.shape": lambda: x.shape,
}
CAST: dict[str, tuple[Callable[[], object], Call]] = {
    "torch.mm of fp32": (lambda: torch.mm(x, x), lambda: torch.mm(x.half(), x.half())),
    "F.linear, cached weights": (lambda: F.linear(half, weight, bias), lambda: F.linear(half, low_weight, low_bias)),
    "F.softmax of fp16": (lambda: F.softmax(half, 1), lambda: F.softmax(half.float(), 1)),
    "fp16 + fp32": (lambda: half + x, lambda: half.float() + x),
}


def run(rounds: int) -> list[Figure]:
    plain: dict[str, Call] = {**LISTED, **UNLISTED, **{name: by_hand for name, (_, by_hand) in CAST.items()}}
    written: dict[str, Call] = {**LISTED, **UNLISTED, **{name: call for name, (call, _) in CAST.items()}}
    turns = []
    with torch.no_grad():
        for turn in range(rounds):
            if turn % 2:
                without, under = _times(plain), _under_casts(written)
            else:
                under, without = _under_casts(written), _times(plain)
            turns.append((under, without))
    figures = [_figure(turns, "listed", name, bounds.APEX_LISTED_US) for name in LISTED]
    figures += [_figure(turns, "unlisted", name, bounds.APEX_UNLISTED_US) for name in UNLISTED]
    return figures + [_figure(turns, "cast", name, None) for name in CAST]


def _under_casts(calls: dict[str, Call]) -> Times:
    handle = init()
    try:
        return _times(calls)
    finally:
        handle._deactivate()


def _times(calls: dict[str, Call], number: int = 200) -> Times:
    """Microseconds for one call. The first calls are not timed: replacing functions empties Python's lookup caches."""
    found = {}
    for name, call in calls.items():
        for _ in range(20):
            call()
        start = time.perf_counter()
        for _ in range(number):
            call()
        found[name] = (time.perf_counter() - start) / number * 1e6
    return found


def _figure(turns: list[tuple[Times, Times]], group: str, name: str, bound: float | None) -> Figure:
    ours, theirs = ([turn[side][name] for turn in turns] for side in (0, 1))
    detail = f"{statistics.median(ours):7.2f} us : {statistics.median(theirs):7.2f} us"
    value = statistics.median(a - b for a, b in zip(ours, theirs, strict=True))
    return Figure(f"{group}: {name}", value, "us", bound, detail)
