"""Peak memory of training with Adam, in bytes for each parameter.

A dispatch mode counts every storage from the first operator that touches it until it is freed, on any device. So it
measures tensors, not an allocator. Activations are included, but small: the input has one row.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

import xamp
from benchmarks import bounds, one_pass
from benchmarks.report import Figure
from xamp.policy import best_level, levels_where
from xamp.testing.measure import Storages

LAYERS, WIDTH = 24, 128

Make = Callable[[Any], torch.optim.Optimizer]
FORMS: dict[str, tuple[Make, bool | str]] = {
    "auto": (lambda p: torch.optim.Adam(p, lr=1e-4), "auto"),
    "for-loop": (lambda p: torch.optim.Adam(p, lr=1e-4, foreach=False), False),
    "foreach": (lambda p: torch.optim.Adam(p, lr=1e-4, foreach=True), False),
    "AdamW in one pass": (lambda p: torch.optim.AdamW(p, lr=1e-4), "one-pass"),
}
"""By name: the function that makes the optimizer, and the value for ``initialize(fused=...)``."""

_BOUNDS = {
    "auto": (bounds.O2_ADAM_BYTES, bounds.O2_ADAM_ACCUMULATION_BYTES),
    "AdamW in one pass": (bounds.ONE_PASS_BYTES, bounds.O2_ADAM_ACCUMULATION_BYTES),
}
"""Of levels with masters: with one backward before a step, and with two."""


def run(device: torch.device) -> list[Figure]:
    figures = []
    with_masters = levels_where(lambda row: row.master_weights)
    for level in (*with_masters, best_level(("float16",)).name, None):
        for form, (make, fused) in FORMS.items():
            for accumulate in (1, 2):
                bounded = level in with_masters and form in _BOUNDS
                if fused == "one-pass" and (level not in with_masters or one_pass.refusal(device)):
                    continue
                peaks = _peaks(level, make, fused, accumulate, device)
                case = f"{level or 'torch fp32'} {form}" + (", 2 micro-batches" if accumulate > 1 else "")
                detail = "  ".join(f"{phase} {value:.2f}" for phase, value in peaks.items())
                bound = _BOUNDS[form][accumulate - 1] if bounded else None
                figures.append(Figure(case, max(peaks.values()), "bytes", bound, detail))
    return figures


def _peaks(level: str | None, make: Make, fused: bool | str, accumulate: int, device: torch.device) -> dict[str, float]:
    """The peak of each phase of the third step, in bytes for each parameter."""
    gc.collect()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).to(device)
    optimizer = make(model.parameters())
    if level is not None:
        xamp.initialize(model, optimizer, level=level, fused=fused, op_policy="native", verbosity=0)
    x = torch.randn(1, WIDTH, device=device)
    with Storages(device.type) as storages:
        storages.note([*model.parameters(), *xamp.master_params(optimizer), x])
        for _ in range(3):
            peaks = _step(level, model, optimizer, x, accumulate, storages)
    return {phase: peak / (LAYERS * WIDTH * WIDTH) for phase, peak in peaks.items()}


def _step(
    level: str | None, model: Any, optimizer: Any, x: torch.Tensor, accumulate: int, storages: Storages
) -> dict[str, int]:
    peaks: dict[str, int] = {}

    def lap(phase: str) -> None:
        peaks[phase] = max(peaks.get(phase, 0), storages.lap())

    storages.lap()
    optimizer.zero_grad()
    for _ in range(accumulate):
        loss = model(x).float().square().mean()
        lap("forward")
        if level is None:
            loss.backward()
            lap("backward")
        else:
            with xamp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
                lap("backward")
        del loss
        lap("exit")
    optimizer.step()
    lap("step")
    return peaks
