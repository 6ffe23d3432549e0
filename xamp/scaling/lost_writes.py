"""Weights of a model that something has written to, though the masters hold the weights: they are found and told of.

Loaded where :mod:`xamp.scaling.weights` has a hint. A comparison runs on the device, and the host reads its result
later; on a device that cannot copy to the host without waiting nothing is compared in turn.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from xamp.distributed import ranks
from xamp.scaling.masters import Pair
from xamp.values.late_reads import copies_without_waiting, copy_without_waiting
from xamp.values.log import say

__all__ = ["LostWrites", "warn_of_lost", "warn_of_old"]

_MODES = 8  # evaluations that begin, by the mode of the model or without gradients, at which all weights are compared
_PART = 2**16  # elements of a weight that are compared in turn
_CHUNK = 2**22  # elements that are compared at once: their copy in 16 bits takes memory


class LostWrites:
    """Looks for weights that differ from their masters, where something hints at it."""

    def __init__(self) -> None:
        self._turn = 0
        self._modes_left = _MODES
        self._late: tuple[list[torch.Tensor], torch.Tensor, Any] | None = None

    def begin_mode(self) -> bool:
        """Count an evaluation that begins or ends; return whether to compare all weights, as at the first ones."""
        self._modes_left -= 1
        return self._modes_left >= 0

    def find(self, written: Sequence[Pair], looked: Sequence[Pair]) -> list[torch.Tensor]:
        """Return the weights that were found to differ from their masters.

        Args:
            written: weights of which one or more have been written to, and masters: compared as a whole, and at once.
            looked: those whose turn it is: of large ones a part is compared, and on a device the result comes later.
        """
        self._turn += 1
        lost: list[torch.Tensor] = [param for param, master in written if _is_different(param, master)]
        if not lost and self._late is not None and self._late[2].query():
            (params, flags, _), self._late = self._late, None
            lost = [param for param, differs in zip(params, flags.tolist(), strict=True) if differs]
        if not lost and looked:
            lost = self._compare([(param, *_part(param, master, self._turn)) for param, master in looked])
        return lost

    def _compare(self, looked: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
        """Return the weights that differ where the host knows that at once: it does not wait for a device."""
        elsewhere = [(whole, *part) for whole, *part in looked if not whole.is_cpu]
        if elsewhere and self._late is None and copies_without_waiting(elsewhere[0][0].device):
            first = elsewhere[0][0].device
            flags = torch.stack([_differs(*part).to(first, torch.float32) for _, *part in elsewhere])
            self._late = [whole for whole, *_ in elsewhere], *copy_without_waiting(flags)
        return [whole for whole, *part in looked if whole.is_cpu and _is_different(*part)]


def _part(param: torch.Tensor, master: torch.Tensor, turn: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of a weight and its master to compare in this turn: all of a small one."""
    param, master = ranks.local(param), ranks.local(master)
    if not param.dim() or param.numel() <= _PART:
        return param, master
    rows = max(1, _PART * param.shape[0] // param.numel())
    start = turn * rows % param.shape[0]
    return param[start : start + rows], master[start : start + rows]


def _is_different(param: torch.Tensor, master: torch.Tensor) -> bool:
    """Return whether any element of ``param`` is not ``master``, rounded. Waits for the device."""
    param, master = ranks.local(param).detach(), ranks.local(master).detach()
    if param.numel() <= _CHUNK and torch.equal(param, master.to(param.dtype)):
        return False
    return bool(_differs(param, master))


@torch.no_grad()
def _differs(param: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
    """Return whether any element of ``param`` is not ``master``, rounded; nan is as nan. Does not wait."""
    found = torch.zeros((), dtype=torch.bool, device=param.device)
    rows = max(1, _CHUNK * len(param) // max(param.numel(), 1)) if param.dim() else 0
    parts = zip(param.split(rows), master.split(rows), strict=True) if rows else ((param, master),)
    for part, exact in parts:
        rounded = exact.to(part.dtype)
        found |= torch.logical_and(rounded != part, torch.logical_or(rounded == rounded, part == part)).any()
    return found


def warn_of_lost(names: Sequence[str], level: str) -> None:
    """Warn that something wrote into the model, or into the data of a master, and that the next step overwrites it."""
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    say(
        "%s%s of the model differs from its fp32 master: something other than optimizer.step() wrote into one of them, "
        "and the next step or evaluation overwrites the model from the masters. At level %s write into the masters, "
        "without .data: `with torch.no_grad(): for p in xamp.master_params(optimizer): p.clamp_(-c, c)`. The model "
        "follows them at its next forward.",
        *(names[0], others, level),
        level=logging.WARNING,
    )


def warn_of_old(level: str) -> None:
    """Warn that a compiled forward ran with the weights from before something wrote into the masters."""
    say(
        "something other than optimizer.step() wrote into the fp32 masters, and the forward before this scale_loss ran "
        "with the weights of before: it is a part of a larger compiled function, and such a graph sees no write into a "
        "tensor. From now on these graphs break before the forward and let the model follow, at level %s. To have no "
        "step wrong write in a loop, `with torch.no_grad(): for p in xamp.master_params(optimizer): p.clamp_(-c, c)`, "
        "after which the model follows at once, or compile the model itself, whose forward looks each time.",
        level,
        level=logging.WARNING,
    )
