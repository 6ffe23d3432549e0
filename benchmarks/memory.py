"""Peak memory of training with Adam, in bytes a parameter.

Every storage that an operator touches is counted from then until it is freed, by a dispatch mode, on any device; so
what is measured is the tensors, not an allocator. Activations are in it, and made small: one row of input.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import xamp
from benchmarks import bounds
from benchmarks.report import Figure

LAYERS, WIDTH = 24, 128

Make = Callable[[Any], torch.optim.Optimizer]
FORMS: dict[str, tuple[Make, bool | str]] = {
    "auto": (lambda p: torch.optim.Adam(p, lr=1e-4), "auto"),
    "for-loop": (lambda p: torch.optim.Adam(p, lr=1e-4, foreach=False), False),
    "foreach": (lambda p: torch.optim.Adam(p, lr=1e-4, foreach=True), False),
}
"""How the optimizer is made, and ``initialize(fused=...)``."""


def run(device: torch.device) -> list[Figure]:
    figures = []
    for level in ("O2", "O5", "O1", None):
        for form, (make, fused) in FORMS.items():
            for accumulate in (1, 2):
                bounded = level in ("O2", "O5") and form == "auto" and accumulate == 1
                peaks = _peaks(level, make, fused, accumulate, device)
                case = f"{level or 'torch fp32'} {form}" + (", 2 micro-batches" if accumulate > 1 else "")
                detail = "  ".join(f"{phase} {value:.2f}" for phase, value in peaks.items())
                bound = bounds.O2_ADAM_BYTES if bounded else None
                figures.append(Figure(case, max(peaks.values()), "bytes", bound, detail))
    return figures


def _peaks(level: str | None, make: Make, fused: bool | str, accumulate: int, device: torch.device) -> dict[str, float]:
    """Peak of each phase of the third step, in bytes a parameter."""
    gc.collect()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).to(device)
    optimizer = make(model.parameters())
    if level is not None:
        xamp.initialize(model, optimizer, level=level, fused=fused, op_policy="native", verbosity=0)
    x = torch.randn(1, WIDTH, device=device)
    with Storages() as storages:
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


class Storages(TorchDispatchMode):
    """Bytes of all live storages that an operator has touched, and their peak."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._now = 0
        self._peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.note(tree_iter((args, kwargs, result)))
        return result

    def note(self, values: Any) -> None:
        for value in values:
            if isinstance(value, torch.Tensor) and value.device.type != "meta":
                self._add(value.untyped_storage())

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

    def lap(self) -> int:
        """The peak since the last call, bytes."""
        peak, self._peak = self._peak, self._now
        return peak
