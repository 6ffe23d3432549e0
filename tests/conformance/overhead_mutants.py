"""What the clauses of tier ``overhead`` must notice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from mutants import Mutant, patched, registered

from xamp.backends.cpu import CpuBackend
from xamp.casting import active
from xamp.scaling import moves


class OneByOne(CpuBackend):
    """Unscales and looks at one gradient after the other."""

    def unscale_(self, grads: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
        for grad in grads:
            grad.mul_(inv_scale)
            finite = torch.isinf(grad).logical_or(torch.isnan(grad)).any().logical_not()
            torch.maximum(found_inf, 1.0 - finite.float(), out=found_inf)


class KeepsCopies(CpuBackend):
    """Keeps the gradients of the last step, as a debugging aid might."""

    kept: list[torch.Tensor]

    def unscale_(self, grads: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
        self.kept = [grad.clone() for grad in grads]
        super().unscale_(grads, found_inf, inv_scale)


def slowly(mark: Any, number: int, cached: bool | None = True) -> Any:
    """Enters a region by way of torch's own objects, several times over."""
    for _ in range(10):
        with torch.autocast(mark.device_type, dtype=mark.dtype):
            pass
    return enter(mark, number, cached)


enter = active.enter

MUTANTS = [
    Mutant("unscales one by one", "overhead.step", registered(f"{__name__}:OneByOne"), "mutant"),
    Mutant("enters regions slowly", "overhead.forward", patched(active, "enter", slowly)),
    Mutant("keeps copies of gradients", "overhead.peak_memory", registered(f"{__name__}:KeepsCopies"), "mutant"),
    Mutant(
        "all gradients go to masters at once",
        "overhead.memory_of_masters",
        patched(moves, "chunks", lambda pairs: iter([pairs] if pairs else [])),
    ),
]
