"""Finds weights of the model that something else than a step wrote into: the masters overwrite them at the next step.

To compare all weights at each step would cost as much as a step. So they are compared at the second ``scale_loss``, the
third, the fifth, the ninth and so on, and once where the version of one weight moved by more than a step moves it.
Other ``scale_loss`` calls pay for a counter. The comparison runs on the device, and the host reads its result later; on
a device that cannot copy to the host without waiting nothing is compared.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from xamp.ground.log import say
from xamp.scaling import masters, ranks
from xamp.scaling.late_reads import copies_without_waiting, copy_without_waiting

__all__ = ["LostWrites", "warn_of_lost", "warn_of_old"]


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
        if late is None:
            return self._compare([(p, m) for p, m in pairs if not ranks.is_dtensor(p)])
        params, differs, event = late
        if not event.query():
            self._late = late
            return []
        if torch.equal(differs, torch.zeros_like(differs)):  # in the memory of the host
            return []
        return self._told([p for p, d in zip(params, differs.tolist(), strict=True) if d])

    def _compare(self, pairs: Sequence[masters.Pair]) -> list[torch.Tensor]:
        """Return the weights that differ where the host knows that at once: it does not wait for a device."""
        on_host = [(param, master) for param, master in pairs if param.is_cpu]
        elsewhere = [(param, master) for param, master in pairs if not param.is_cpu]
        if elsewhere and copies_without_waiting(elsewhere[0][0].device):
            first = elsewhere[0][0].device
            flags = torch.stack([_differs(*pair).to(first, torch.float32) for pair in elsewhere])
            self._late = [param for param, _ in elsewhere], *copy_without_waiting(flags)
        return self._told([param for param, master in on_host if not _is_same(param, master)])

    def _told(self, params: list[torch.Tensor]) -> list[torch.Tensor]:
        self._found = bool(params)
        return params


@torch.no_grad()
def _is_same(param: torch.Tensor, master: torch.Tensor) -> bool:
    """Return whether ``param``, on a CPU, is ``master``, rounded."""
    param, master = _part(param, master)
    return torch.allclose(master.to(param.dtype), param, rtol=0.0, atol=0.0, equal_nan=True)


@torch.no_grad()
def _differs(param: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
    """Return whether any element of ``param`` is not ``master``, rounded; nan stands for nothing. Does not wait."""
    param, master = _part(param, master)
    return torch.logical_and(master.to(param.dtype) != param, param == param).any()


def _part(param: torch.Tensor, master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first rows of a large weight, about four million elements: their copy in 16 bits takes memory."""
    if not param.dim() or param.numel() <= 2**22:
        return param, master
    rows = max(1, 2**22 * param.shape[0] // param.numel())
    return param[:rows], master[:rows]


def warn_of_lost(names: Sequence[str], level: str) -> None:
    """Warn that something wrote into the model, or into the data of a master, and that the next step overwrites it.

    Args:
        names: the qualified names of the parameters.
        level: the level.
    """
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    say(
        "%s%s of the model differs from its fp32 master: something other than optimizer.step() wrote into one of them, "
        "and the next step overwrites the model from the masters. At level %s write into the masters, without .data: "
        "`with torch.no_grad(): for p in xamp.master_params(optimizer): p.clamp_(-c, c)`. The model follows them at "
        "its next forward.",
        *(names[0], others, level),
        level=logging.WARNING,
    )


def warn_of_old(level: str) -> None:
    """Warn that a compiled forward ran with the weights from before something wrote into the masters.

    Args:
        level: the level.
    """
    say(
        "something other than optimizer.step() wrote into the fp32 masters, and the forward before this scale_loss ran "
        "with the weights of before: it is a part of a larger compiled function, and such a graph sees no write into a "
        "tensor. From now on these graphs break before the forward and let the model follow, at level %s. To have no "
        "step wrong write in a loop, `with torch.no_grad(): for p in xamp.master_params(optimizer): p.clamp_(-c, c)`, "
        "after which the model follows at once, or compile the model itself, whose forward looks each time.",
        level,
        level=logging.WARNING,
    )
