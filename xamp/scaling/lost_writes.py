"""Finds weights of the model that something else than a step wrote into: the masters overwrite them at the next step.

To compare all weights at each step would cost as much as a step. So they are compared at the second ``scale_loss``, the
third, the fifth, the ninth and so on, and once where the version of one weight moved by more than a step moves it.
Other ``scale_loss`` calls pay for a counter. The comparison runs on the device, and the host reads its result later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from xamp.scaling import masters, shards
from xamp.scaling.scale import copies_without_waiting, copy_without_waiting

__all__ = ["LostWrites"]


class LostWrites:
    """Looks for weights that differ from their masters, until one is found."""

    def __init__(self) -> None:
        self._count = 0
        self._version: int | None = None  # of one weight, when it was last seen; None: no longer of interest
        self._follows_version = True
        self._late: tuple[list[torch.Tensor], torch.Tensor, Any] | None = None
        self._found = False

    def is_due(self, pairs: Sequence[masters.Pair]) -> bool:
        """Return whether to call :meth:`look` now. Called at each ``scale_loss`` after the first."""
        if self._found:
            return False
        self._count = count = self._count + 1
        due = count & (count - 1) == 0
        if self._follows_version:
            version, before = pairs[-1][0]._version, self._version
            self._version = version
            if before is not None and version - before > 1:  # a step writes the weight once
                self._follows_version = False  # it may be written often for good reasons, as by SAM
                due = True
        return due or self._late is not None

    def look(self, pairs: Sequence[masters.Pair]) -> list[torch.Tensor]:
        """Return the weights that were found to differ from their masters, once; mostly that is known later.

        Args:
            pairs: weights and masters; those whose masters changed since the last forward are not among them.
        """
        late, self._late = self._late, None
        if late is not None:
            params, differs, event = late
            if not event.query():
                self._late = late
                return []
            return self._told([p for p, d in zip(params, differs.tolist(), strict=True) if d])
        found = [(param, _differs(param, master)) for param, master in pairs if not shards.is_dtensor(param)]
        if not found:
            return []
        flags = torch.stack([flag.to(found[0][1].device, torch.float32) for _, flag in found])
        params = [param for param, _ in found]
        if flags.is_cpu or not copies_without_waiting(flags.device):
            return self._told([p for p, d in zip(params, flags.tolist(), strict=True) if d])
        self._late = params, *copy_without_waiting(flags)
        return []

    def _told(self, params: list[torch.Tensor]) -> list[torch.Tensor]:
        self._found = bool(params)
        return params


@torch.no_grad()
def _differs(param: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
    """Return whether any element of ``param`` is not its master, rounded; nan stands for nothing. Stays on the device.

    Of a large weight the first four million elements, about, are compared: the copy of them in 16 bits takes memory.
    """
    if param.dim() and param.numel() > 2**22:
        rows = max(1, 2**22 * param.shape[0] // param.numel())
        param, master = param[:rows], master[:rows]
    return torch.logical_and(master.to(param.dtype) != param, param == param).any()
