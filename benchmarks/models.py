"""Whole training steps of real models: xamp against torch.amp by hand, accelerate, Fabric and, where it is, Apex.

Each figure is a pair that took turns in one process; both sides have the same model, data and form of the optimizer.
xamp runs the operators of ``torch.autocast`` (``op_policy="native"``) as the others do. Of each model also: units a
second, peak memory, the share of the rate of a large multiplication that its FLOPs reach, and on a device that can
tell, whether a step waits for it.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import ways
from benchmarks.nets import NETS, Net, Size, loss_of
from benchmarks.report import Figure, of_ratio
from benchmarks.timing import compare, first_wait, module_of, multiplication_rate, seconds
from benchmarks.ways import DTYPES, WAYS, Step, Task, Way
from xamp.testing.measure import Storages

AIM_S = 1.0
"""Inputs are so small that a step should take no longer than this."""
LIMIT_S = 4.0
"""A model of which one step takes longer than this is left out."""
STEPS = 5


def run(device: torch.device, rounds: int, quick: bool, peak: float | None) -> list[Figure]:
    """Measure each model in each dtype that the device is fast enough in.

    Args:
        device: where to train.
        rounds: the rounds of a pair of small models; large ones get a twentieth.
        quick: leave the large models out.
        peak: FLOPs a second that the device's data sheet promises in 16 bits; None: those of a large multiplication.
    """
    figures: list[Figure] = []
    for name, net in NETS.items():
        for dtype in DTYPES:
            if net.large and (quick or (device.type == "cpu" and dtype == "fp16")):
                continue  # CPUs multiply in fp16 at a rate that says nothing about a training
            with ways.quiet():
                figures += Trial(name, net, device, dtype, rounds).figures(peak)
    return figures


class Trial:
    """One model in one dtype."""

    def __init__(self, name: str, net: Net, device: torch.device, dtype: str, rounds: int) -> None:
        self.net, self.device, self.dtype = net, device, dtype
        self.size = size_for(net, device, DTYPES[dtype])
        self.flops = flops_of(net, self.size)
        self.rounds = max(3, rounds // 20) if net.large else rounds
        self.case = f"{name} ({self.size[0]} x {self.size[1]}), {dtype}"

    def figures(self, peak: float | None) -> Iterator[Figure]:
        took = self.trial()
        if took > LIMIT_S:
            yield Figure(f"{self.case}: left out, one step takes", took, "s", None, f"the limit is {LIMIT_S:g} s")
            return
        for other, way in WAYS.items():
            yield from self.pair(other, way, took)
        yield from self.alone(peak)

    def step_of(self, make: Callable[[Task], Step]) -> Step:
        return make(Task.of(self.net, self.size, self.device, self.dtype))

    def trial(self) -> float:
        """Seconds of the second step of the loop by hand."""
        step = self.step_of(ways.by_hand)
        step()
        return seconds(step, self.device, 1)

    def pair(self, other: str, way: Way, took: float) -> Iterator[Figure]:
        why = way.why_not(self.device, self.dtype)
        if why:
            if not why.endswith("alone") and "CPU" not in why:
                yield Figure(f"{self.case}: {other} {why}", 0.0, "", None)
            return
        mine, theirs = self.step_of(way.ours), self.step_of(way.theirs)
        calls = max(1, min(20, int(0.02 / took)))
        warm_up = 2 if self.net.large else 20
        pair = compare(mine, theirs, self.device, calls=calls, rounds=self.rounds, warm_up=warm_up)
        del mine, theirs
        gc.collect()
        yield of_ratio(f"{self.case}: over {other}", pair)

    def alone(self, peak: float | None) -> Iterator[Figure]:
        """What xamp's step does in a second, and what it needs."""
        step = self.step_of(ways.ours)
        step()
        took = min(seconds(step, self.device, 1 if self.net.large else STEPS) for _ in range(STEPS))
        yield Figure(f"{self.case}: {self.net.unit} a second", self.net.units(self.size) / took, f"{self.net.unit}/s")
        reached = self.flops / took
        # Many CPUs multiply faster in fp32; then that is what the device could do.
        against = peak or max(multiplication_rate(self.device, each) for each in (DTYPES[self.dtype], torch.float32))
        of = "the data sheet's" if peak else "a large multiplication's"
        yield Figure(
            f"{self.case}: model FLOP utilisation",
            *(reached / against, "ratio", None),
            f"{self.flops:.3g} FLOPs a step, {reached:.3g} a second of {of} {against:.3g}",
        )
        yield Figure(f"{self.case}: peak memory", self.memory(step) / 2**20, "MiB")
        waited = first_wait(step, self.device, STEPS)
        if waited is not None:
            yield Figure(f"{self.case}: waits, sync debug mode", float(bool(waited)), "a step", 0, waited)

    def memory(self, step: Step) -> float:
        """Bytes: the device's allocator knows its peak; on a CPU those of all storages that a step touches."""
        gc.collect()
        if self.device.type == "cpu":
            with Storages(self.device.type) as storages:
                step()
            return float(storages.lap())
        module = module_of(self.device)
        module.reset_peak_memory_stats(self.device)
        step()
        return float(module.max_memory_allocated(self.device))


def size_for(net: Net, device: torch.device, dtype: torch.dtype) -> Size:
    """The largest size that a step should be through with in :data:`AIM_S`; the smallest if none is."""
    sizes = net.sizes(device)
    if len(sizes) == 1:
        return sizes[0]
    rate = multiplication_rate(device, dtype)
    return next((size for size in sizes if flops_of(net, size) / rate < AIM_S), sizes[-1])


@functools.cache
def flops_of(net: Net, size: Size) -> float:
    """FLOPs of a forward and a backward, counted without computing."""
    device = torch.device("meta")
    with device:
        model = net.make()
    x, target = net.data(device, *size)
    with FlopCounterMode(display=False) as counter:
        loss_of(model(x), target).backward()
    return float(counter.get_total_flops())
