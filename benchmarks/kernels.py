"""The kernels of a step in one pass, one by one, by the device's own clock: microseconds, and the share of a copy.

The bytes are those that a kernel cannot do without. Over eight large tensors, and over the parameters of GPT-2. Where
the kernels should run on a device and do not, it ends with the reason.
"""

from __future__ import annotations

import collections
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch

from benchmarks.nets import GPT
from benchmarks.report import Figure
from benchmarks.timing import copy_rate, module_of, synchronize
from xamp import onepass
from xamp.plans import available

Shapes = Sequence[torch.Size]
RULES: dict[str, tuple[onepass.Rule, int, float]] = {
    "SGD": (onepass.Rule("sgd"), 0, 0.75),
    "momentum": (onepass.Rule("sgd"), 1, 0.75),
    "AdamW": (onepass.Rule("adam", decoupled=True), 2, 0.8),
    "Adagrad": (onepass.Rule("adagrad"), 1, 0.0),
    "LAMB": (onepass.Rule("lamb", decoupled=True), 2, 0.0),
    "NovoGrad": (onepass.Rule("novograd", decoupled=True), 1, 0.0),
}
"""By name: the rule, its states with elements, and the least share of a copy that a step is promised; 0: none."""


def run(device: torch.device, rounds: int) -> list[Figure]:
    """Time each rule over both kinds of shapes, in fp16 and bf16; tiny ones where Triton interprets."""
    if (why := available.refusal(device)) and available.expects(device):
        raise RuntimeError(f"the kernels should run on {device}, and do not: {why}")
    if why:
        return [Figure(f"left out: {why}", 0.0, "us")]
    is_tiny = device.type == "cpu"
    form, rate = "interpreted" if is_tiny else "compiled", copy_rate(device)
    figures = [Figure(f"copy, beside kernels that are {form}", rate / 2**30, "GiB/s")]
    for shapes_name, shapes in (("8 x 4096 x 4096", _large(is_tiny)), ("GPT-2", _gpt(is_tiny))):
        for dtype in (torch.float16, torch.bfloat16):
            for name in RULES:
                case = f"{name}, {str(dtype).removeprefix('torch.')}, {shapes_name}"
                figures += _figures(
                    case, name, shapes, dtype, device, rate, 2 if is_tiny else max(min(10, rounds), rounds // 5)
                )
    return figures


def _large(is_tiny: bool) -> Shapes:
    return [torch.Size((16, 16) if is_tiny else (4096, 4096))] * (2 if is_tiny else 8)


def _gpt(is_tiny: bool) -> Shapes:
    with torch.device("meta"):
        model = GPT(words=16, places=8, width=8, depth=1) if is_tiny else GPT()
    return [param.shape for param in model.parameters()]


def _figures(
    case: str, name: str, shapes: Shapes, dtype: torch.dtype, device: torch.device, rate: float, rounds: int
) -> list[Figure]:
    rule, states, least = RULES[name]
    plan, grads = _plan(rule, states, shapes, dtype, device)
    found, inverse = torch.zeros((), device=device), torch.ones((), device=device)
    group = [{"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "momentum": 0.9 * (states > 0), "step": 2}]
    times: dict[str, list[float]] = collections.defaultdict(list)
    for _ in range(rounds + 2):
        with _timed(device) as taken:
            plan.check(grads, found, group, inverse)
            clip = plan.clip_factor(grads, plan.checked_norm(inverse), 1.0)
            plan.step(grads, group, found, inverse, clip)
        for kernel, seconds in taken():
            times[kernel].append(seconds)
    count, size = sum(shape.numel() for shape in shapes), dtype.itemsize
    moved = {"sums": count * size, "step": count * (2 * size + 8 + 8 * states)}
    each = {kernel: statistics.median(taken) for kernel, taken in times.items()}
    figures = []
    for kernel, seconds in each.items():
        runs = len(times[kernel]) // (rounds + 2)
        if kernel in moved and runs == 1:
            share = moved[kernel] / seconds / rate
            figures.append(Figure(f"{case}: {kernel}", share, "of a copy", detail=f"{seconds * 1e6:.1f} us"))
        else:
            figures.append(Figure(f"{case}: {kernel}", seconds * 1e6, "us", detail=f"{runs} a step"))
    whole = sum(seconds * (len(times[kernel]) // (rounds + 2)) for kernel, seconds in each.items())
    share = (moved["sums"] + moved["step"]) / whole / rate
    wanted = f"; promised {least}" if least and device.type != "cpu" else ""
    return [*figures, Figure(f"{case}: all", share, "of a copy", detail=f"{whole * 1e6:.1f} us{wanted}")]


def _plan(
    rule: onepass.Rule, states: int, shapes: Shapes, dtype: torch.dtype, device: torch.device
) -> tuple[onepass.Plan, list[torch.Tensor]]:
    rows, grads = [], []
    for shape in shapes:
        param = torch.randn(shape, device=device)
        held = [torch.zeros_like(param) for _ in range(states)]
        if rule.name == "novograd":
            held.append(torch.zeros((), device=device))
        rows.append(onepass.Row(param, param.to(dtype), tuple(held), torch.zeros((), device=device)))
        grads.append(torch.randn(shape, device=device).to(dtype))
    return available.plan(rule, rows), grads


@contextlib.contextmanager
def _timed(device: torch.device) -> Iterator[Callable[[], list[tuple[str, float]]]]:
    """Time each launch of the block by events of the device; yield what returns the names and seconds afterwards."""
    marks: list[tuple[str, Any, Any]] = []
    launch = onepass.Plan._run
    events = getattr(module_of(device), "Event", None) if device.type != "cpu" else None

    def now() -> Any:
        if events is None:
            return time.perf_counter()
        event = events(enable_timing=True)
        event.record()
        return event

    def run(self: onepass.Plan, name: str, *args: Any, **constants: Any) -> None:
        begin = now()
        launch(self, name, *args, **constants)
        marks.append((name, begin, now()))

    def taken() -> list[tuple[str, float]]:
        synchronize(device)
        if events is None:
            return [(name, end - begin) for name, begin, end in marks]
        return [(name, begin.elapsed_time(end) * 1e-3) for name, begin, end in marks]

    with mock.patch.object(onepass.Plan, "_run", run):
        yield taken
