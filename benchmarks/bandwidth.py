"""The step's share of the copy bandwidth: unscale and optimizer step of large parameters, where memory is the limit.

The bytes are those that a step cannot do without: each weight and moment read and written once, each gradient read
once, each low-precision weight written once. A step that does only this at the rate of a copy has a share of 1.
"""

from __future__ import annotations

import gc

import torch

from benchmarks import one_pass
from benchmarks.report import Figure
from benchmarks.step import FORMS, Loop, Ours, Theirs, phase_times
from benchmarks.timing import copy_rate
from xamp.policy import best_level, levels_where

COUNT = 8
WIDTH = {"cpu": 1024}
ELSEWHERE = 4096
MOMENTS = {"SGD fused": 0, "Adam fused": 2}
"""How many fp32 values for each parameter the optimizer keeps."""


def run(device: torch.device, rounds: int) -> list[Figure]:
    rate = copy_rate(device)
    width = WIDTH.get(device.type, ELSEWHERE)
    figures = [Figure("copy, bytes read and written", rate / 2**30, "GiB/s")]
    casting = best_level(("float16",)).name
    lowering = levels_where(lambda row: row.master_weights and row.dynamic)[0]
    for form, moments in MOMENTS.items():
        whole = 4 * (2 + 2 * moments)  # weight and moments, each read and written
        cases = {casting: whole + 4, lowering: whole + 2 + 2, "torch.amp": whole + 4}
        for name, needed in cases.items():
            loop = loop_of(name, form, width, device)
            took = work_of(phase_times(loop, device, max(min(10, rounds), rounds // 4)))
            moved = needed * COUNT * width**2
            detail = f"{took * 1e6:9.1f} us, {needed} bytes a parameter"
            figures.append(Figure(f"{form}, {name}", moved / took / rate, "of a copy", None, detail))
            del loop
            gc.collect()
    return figures + one_pass.counts(device)


def loop_of(name: str, form: str, width: int, device: torch.device) -> Loop:
    make, shape = FORMS[form][0], (width, width)
    if name == "torch.amp":
        return Theirs(COUNT, make, device, shape=shape)
    return Ours(COUNT, make, device, name, "auto", shape)


def work_of(phases: dict[str, float]) -> float:
    """Seconds of what follows backward."""
    return sum(us for phase, us in phases.items() if phase not in ("zero_grad", "scale", "backward")) * 1e-6
