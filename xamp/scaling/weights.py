"""The weights of a session whose parameters have masters: which of two copies is the newer one, and who follows it.

The question is asked at three moments. Before a forward the model follows masters that something other than a step has
written into; versions of tensors tell of that. On entering ``scale_loss`` masters follow the parameters for the first
time; later a write into a parameter is told of, for the next step overwrites it. After a step the model follows.

To compare all weights at each step would cost as much as a step. So :class:`LostWrites` compares them at the second
``scale_loss``, the third, the fifth, the ninth and so on, and once where the version of one weight moved by more than a
step moves it. The comparison runs on the device, and the host reads its result later; on a device that cannot copy to
the host without waiting nothing is compared.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from xamp.distributed import ddp as ddps
from xamp.distributed import ranks
from xamp.scaling import masters
from xamp.scaling.gradients import Gradients
from xamp.torch_compat.compiler import keep_eager
from xamp.torch_compat.torch_private.modes import disable_current_modes
from xamp.values import followers
from xamp.values.late_reads import copies_without_waiting, copy_without_waiting
from xamp.values.log import say

__all__ = ["LostWrites", "MasterVersions", "Weights"]


class MasterVersions:
    """The versions that the masters of an optimizer had when they were last written into the model."""

    def __init__(self, gradients: Gradients) -> None:
        self._gradients = gradients
        self._seen: list[int] = []

    def remember(self) -> None:
        """Remember the masters' versions: the low-precision parameters have their values."""
        self._seen = [master._version for _, master in self._gradients.params.pairs]

    def pairs(self, *, changed: bool) -> list[masters.Pair]:
        """Return the pairs whose masters something other than a step has written to; or the others."""
        both = zip(self._gradients.params.pairs, self._seen, strict=True)
        return [pair for pair, seen in both if (pair[1]._version != seen) is changed]

    @keep_eager
    def copy_masters_to_model(self) -> None:
        """Write those masters into the model that something other than ``step`` has changed.

        SAM perturbs and restores weights in methods of its own; a script may average weights in ``master_params``.
        Costs 0.05 us a master where nothing has changed.
        """
        if self._seen != [master._version for _, master in self._gradients.params.pairs]:
            with disable_current_modes():  # as of torch.export: these are the real weights
                masters.write_changed(self.pairs(changed=True))
            self.remember()


class Weights:
    """The weights of one session.

    Args:
        level: the level, for messages.
        versions: returns the versions of each optimizer.
        names_of: returns the qualified names of parameters, for messages.
        check_not_sharded: refuses a model that was sharded after ``initialize``.
        is_busy: returns whether the host may not wait for the device now.

    Attributes:
        pairs: all low-precision parameters and their masters.
    """

    def __init__(
        self,
        level: str,
        versions: Callable[[], Iterable[MasterVersions]],
        names_of: Callable[[Iterable[torch.Tensor]], list[str]],
        check_not_sharded: Callable[[str], None],
        is_busy: Callable[[], bool],
    ) -> None:
        self.pairs: list[masters.Pair] = []
        self._level = level
        self._versions = versions
        self._names_of = names_of
        self._check_not_sharded = check_not_sharded
        self._is_busy = is_busy
        self._in_use = False
        self._found_old = False  # a forward ran without masters that had changed, for no graph asked
        self._lost_writes = LostWrites()

    def add(self, pairs: Iterable[masters.Pair]) -> None:
        """Remember masters that an optimizer of this session holds, and their parameters."""
        known = {id(m) for _, m in self.pairs}
        self.pairs += [pair for pair in pairs if id(pair[1]) not in known]

    def start(self) -> None:
        """Use the masters for the first time: they follow what was written into the parameters."""
        masters.start_masters(self.pairs)

    def refuse_sharded(self, alone: bool) -> None:
        """Raise a StateError for a model that was sharded since. ``alone``: nothing is shared between processes."""
        if not self._in_use or (not alone and ranks.is_shard(self.pairs[0][0])):
            self._check_not_sharded("scale_loss")

    def reconcile(self, new_wrappers: Iterable[DistributedDataParallel]) -> None:
        """Let masters follow what was written into the parameters, and make them equal on the ranks of each new DDP.

        This happens at the first use of the masters, and whenever a DDP appears.

        Args:
            new_wrappers: the DDP objects that are new.
        """
        if not self._in_use:
            self.start()
            self._in_use = True
        elif new_wrappers:
            masters.start_masters(self.pairs)
        elif followers.graphs.exist and self._is_model_behind():
            self._let_compiled_forwards_ask()
            return
        else:
            self.look_for_lost_writes()
        for ddp in new_wrappers:
            self._share(ddp)
        for versions in self._versions():
            versions.remember()

    def _share(self, ddp: DistributedDataParallel) -> None:
        """Give all ranks of ``ddp`` the masters that its first rank has of its parameters."""
        held = ddps.held(ddp)
        pairs = [pair for pair in self.pairs if id(pair[0]) in held]
        if pairs:  # else it holds another model, and may have outlived its process group
            ranks.share_from_rank_zero([m.detach() for _, m in pairs], ddp.process_group)
            masters.write_quietly(pairs)

    def look_for_lost_writes(self) -> None:
        """Warn, once, of weights of the model that the next step will overwrite. Mostly this is a look at a counter."""
        self._lost_writes.count(self.pairs)
        if self._lost_writes.is_due and not self._is_busy():
            kept = [pair for versions in self._versions() for pair in versions.pairs(changed=False)]
            if lost := self._lost_writes.find(kept):
                _warn_of_lost(self._names_of(lost), self._level)

    def copy_masters_to_model(self) -> None:
        """Before a forward: write the masters that changed since the last step into the model."""
        for versions in self._versions():
            versions.copy_masters_to_model()

    def may_be_behind(self) -> bool:
        """Return whether compiled forwards must ask whether a master has changed."""
        return self._found_old

    def _is_model_behind(self) -> bool:
        """Return whether a forward ran with the weights from before something wrote into the masters."""
        changed = [pair for versions in self._versions() for pair in versions.pairs(changed=True)]
        return not all(masters.is_equal(param) for param, _ in changed)  # a load writes into the model too

    def _let_compiled_forwards_ask(self) -> None:
        """Let compiled forwards that are a part of larger graphs ask from now on whether a master has changed."""
        if not self._found_old:
            self._found_old = True
            followers.refresh_graphs()
            _warn_of_old(self._level)


# ---------------------------------------------------------------- writes that will be lost


class LostWrites:
    """Looks for weights that differ from their masters, until one is found."""

    def __init__(self) -> None:
        self._count = 0
        self._version: int | None = None  # of one weight, when it was last seen
        self._has_moved = False  # it moved by more than a step moves it; later it may be written for good reasons
        self._is_written = False  # this was seen at the last count
        self._late: tuple[list[torch.Tensor], torch.Tensor, Any] | None = None
        self._found = False

    def count(self, pairs: Sequence[masters.Pair]) -> None:
        """Count one more ``scale_loss``, and look at the version of one weight."""
        self._count += 1
        self._is_written = False
        if not self._has_moved:
            version, before = pairs[-1][0]._version, self._version
            self._version = version
            self._is_written = self._has_moved = before is not None and version - before > 1

    @property
    def is_due(self) -> bool:
        """Whether to call :meth:`find` now."""
        if self._found:
            return False
        return self._count & (self._count - 1) == 0 or self._is_written or self._late is not None

    def find(self, pairs: Sequence[masters.Pair]) -> list[torch.Tensor]:
        """Return the weights that were found to differ from their masters, once; mostly that is known later.

        Args:
            pairs: weights and masters; those whose masters changed since the last forward are not among them.
        """
        late, self._late = self._late, None
        if late is None:
            lost = self._compare([(p, m) for p, m in pairs if not ranks.is_dtensor(p)])
        elif not late[2].query():
            self._late, lost = late, []
        elif not _is_raised(late[1]):
            lost = []
        else:
            lost = [param for param, differs in zip(late[0], late[1].tolist(), strict=True) if differs]
        self._found = bool(lost)
        return lost

    def _compare(self, pairs: Sequence[masters.Pair]) -> list[torch.Tensor]:
        """Return the weights that differ where the host knows that at once: it does not wait for a device."""
        elsewhere = [pair for pair in pairs if not pair[0].is_cpu]
        if elsewhere and copies_without_waiting(elsewhere[0][0].device):
            first = elsewhere[0][0].device
            flags = torch.stack([_differs(*pair).to(first, torch.float32) for pair in elsewhere])
            self._late = [param for param, _ in elsewhere], *copy_without_waiting(flags)
        return [param for param, master in pairs if param.is_cpu and _is_raised(_differs(param, master))]


@torch.no_grad()
def _differs(param: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
    """Return whether any element of ``param`` is not ``master``, rounded; nan is as nan. Does not wait.

    Of a large weight this compares the first four million elements or so: their copy in 16 bits takes memory.
    """
    if param.dim() and param.numel() > 2**22:
        rows = max(1, 2**22 * param.shape[0] // param.numel())
        param, master = param[:rows], master[:rows]
    rounded = master.to(param.dtype)
    return torch.logical_and(rounded != param, torch.logical_or(rounded == rounded, param == param)).any()


def _is_raised(flags: torch.Tensor) -> bool:
    """Return whether one of ``flags``, which are in the memory of the host, is not zero."""
    return not torch.equal(flags, torch.zeros_like(flags))


def _warn_of_lost(names: Sequence[str], level: str) -> None:
    """Warn that something wrote into the model, or into the data of a master, and that the next step overwrites it."""
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    say(
        "%s%s of the model differs from its fp32 master: something other than optimizer.step() wrote into one of them, "
        "and the next step overwrites the model from the masters. At level %s write into the masters, without .data: "
        "`with torch.no_grad(): for p in xamp.master_params(optimizer): p.clamp_(-c, c)`. The model follows them at "
        "its next forward.",
        *(names[0], others, level),
        level=logging.WARNING,
    )


def _warn_of_old(level: str) -> None:
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
