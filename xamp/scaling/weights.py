"""The weights of a session whose parameters have masters: which of two copies is the newer one, and who follows it.

The question is asked at four moments. Before a forward the model follows masters that something other than a step has
written into; versions of tensors tell of that. Where it may evaluate, it follows whatever the versions say, for
optimizers write averages through ``.data``: where its mode changes, before the first forward without gradients after a
step, and after ``optimizer.eval()`` and ``train()``. On entering ``scale_loss`` masters follow the parameters for the
first time; later a write into a parameter is told of, for the next step overwrites it. After a step the model follows.

The sum of the parameters' versions tells of writes. Those through ``.data`` have none, and to compare all weights at
each step would cost as much as a step. So :class:`Weights` compares eight weights at a ``scale_loss``, in turn, of a
large one a part: at each of the first, then at each eighth. On a device the host reads the result later.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch.nn.parallel import DistributedDataParallel

from xamp.distributed import ddp as ddps
from xamp.distributed import ranks
from xamp.scaling import masters
from xamp.scaling.gradients import Gradients
from xamp.torch_compat.compiler import keep_eager
from xamp.torch_compat.torch_private.modes import disable_current_modes
from xamp.values import followers

if TYPE_CHECKING:
    from xamp.scaling.lost_writes import LostWrites

__all__ = ["MasterVersions", "Weights"]

_FEW = 8  # so many weights are compared at once
_FIRST = 32  # so often this is done at each scale_loss, and then at each eighth


_version: Callable[[torch.Tensor], int] = operator.attrgetter("_version")


class MasterVersions:
    """The versions that an optimizer's masters and their parameters had when they were last made equal.

    Attributes:
        may_differ: something may have written through ``.data`` since the model was last seen to have their values.
    """

    def __init__(self, gradients: Gradients) -> None:
        self.may_differ = True
        self._gradients = gradients
        self._seen: list[int] = []
        self._params_seen = 0
        self._looks = 0

    def remember(self) -> None:
        """Remember the versions: the low-precision parameters have the masters' values."""
        params = self._gradients.params
        self._seen = [*map(_version, params.masters)]
        self._params_seen = sum(map(_version, params.low_precision))
        self.may_differ = True

    def pairs(self, *, changed: bool) -> list[masters.Pair]:
        """Return the pairs whose masters something other than a step has written to; or the others."""
        if changed and self._seen == [*map(_version, self._gradients.params.masters)]:
            return []
        both = zip(self._gradients.params.pairs, self._seen, strict=True)
        return [pair for pair, seen in both if (pair[1]._version != seen) is changed]

    def is_model_written(self) -> bool:
        """Return whether something has written into the parameters, and a version tells of it."""
        return self._params_seen != sum(map(_version, self._gradients.params.low_precision))

    def next_few(self) -> list[masters.Pair]:
        """Return the pairs to compare now, in turn, but for those whose masters were written to; mostly none."""
        self._looks += 1
        if self._looks % _FEW and self._looks > _FIRST:
            return []
        pairs = self._gradients.params.pairs
        places = {turn % len(pairs) for turn in range(self._looks - _FEW, self._looks)} if pairs else ()
        return [pairs[place] for place in places if pairs[place][1]._version == self._seen[place]]

    @keep_eager
    def copy_masters_to_model(self, *, lent: bool = False) -> None:
        """Write those masters into the model that something other than ``step`` has changed.

        SAM perturbs and restores weights in methods of its own; a script may average weights in ``master_params``.
        Costs 0.05 us a master where nothing has changed. ``lent``: a script had them to write into.
        """
        self.may_differ |= lent
        if self._seen != [*map(_version, self._gradients.params.masters)]:
            written = sum(map(_version, self._gradients.params.low_precision)) - self._params_seen
            with disable_current_modes():  # as of torch.export: these are the real weights
                masters.write_changed(self.pairs(changed=True))
            self.remember()
            self._params_seen -= written  # what was written into other parameters is yet to be told

    @keep_eager
    def follow_afresh(self) -> None:
        """Write all masters into the model, but for those that no backward has used: these follow the model."""
        self.copy_masters_to_model()
        with disable_current_modes():
            masters.write_quietly([pair for pair in self._gradients.params.pairs if masters.is_used(pair[0])])
        self.may_differ = False


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
        self._lost_writes: LostWrites | None = None
        self._has_told = False

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

    def take_in_writes(self, new_wrappers: Iterable[DistributedDataParallel]) -> None:
        """Before a backward: let masters follow the parameters at the first one, and where a DDP is new.

        Before others look for what was written into the model, which the next step will overwrite. All ranks of a new
        DDP get equal masters.

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

    def look_for_lost_writes(self, *, in_turn: bool = True) -> None:
        """Warn, once, of weights of the model that the next step will overwrite. Compares few of them ``in_turn``."""
        if self._has_told or self._is_busy():
            return
        written: list[masters.Pair] = []
        looked: list[masters.Pair] = []
        for versions in self._versions():
            if versions.is_model_written():
                written += versions.pairs(changed=False)
            looked += versions.next_few() if in_turn else ()
        if written or (looked and not _are_equal(looked)):
            self._tell(written, looked)

    def _tell(self, written: Sequence[masters.Pair], looked: Sequence[masters.Pair]) -> None:
        """Warn of all weights that differ from their masters, where one of these is found to."""
        if lost := self._search().find(written, looked):
            self._has_told = True
            kept = [pair for versions in self._versions() for pair in versions.pairs(changed=False)]
            from xamp.scaling.lost_writes import warn_of_lost

            warn_of_lost(self._names_of(self._search().find(kept, ()) or lost), self._level)

    def _search(self) -> LostWrites:
        if self._lost_writes is None:
            from xamp.scaling.lost_writes import LostWrites  # most trainings need none

            self._lost_writes = LostWrites()
        return self._lost_writes

    def copy_masters_to_model(self) -> None:
        """Before a forward: write the masters that changed since the last step into the model."""
        all_versions = list(self._versions())
        evaluates = not torch.is_grad_enabled() and any(versions.may_differ for versions in all_versions)
        look = evaluates and self._search().begin_mode()
        for versions in all_versions:
            if evaluates and versions.may_differ:
                self._follow_afresh(versions, look=look)
            else:
                versions.copy_masters_to_model()

    def follow_afresh(self, *, by_optimizer: bool) -> None:
        """Write the masters into the model, which may be about to evaluate, whatever the versions say.

        ``by_optimizer``: it is that which has written into them; else the mode of the model has changed.
        """
        look = not by_optimizer and self._search().begin_mode()
        for versions in self._versions():
            self._follow_afresh(versions, look=look)

    def _follow_afresh(self, versions: MasterVersions, *, look: bool) -> None:
        """Let the model follow; tell of what was written into it. ``look``: through ``.data`` too."""
        if (look or versions.is_model_written()) and not self._has_told and not self._is_busy():
            self._tell([pair for pair in versions.pairs(changed=False) if masters.is_used(pair[0])], ())
        versions.follow_afresh()

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
            from xamp.scaling.lost_writes import warn_of_old

            warn_of_old(self._level)


def _are_equal(pairs: Sequence[masters.Pair]) -> bool:
    """Return whether all of ``pairs`` are small weights of a CPU, and equal to their masters, rounded."""
    if any(not param.is_cpu or param.numel() > 2**16 or ranks.is_dtensor(param) for param, _ in pairs):
        return False
    with torch.no_grad():  # one by one, for lists would take memory at the peak of an accumulation
        return all(torch.equal(_bits(param), _bits(master.to(param.dtype))) for param, master in pairs)


def _bits(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight in 16 bits as integers of 64 bits, where it lies so: these are compared 7 times as fast."""
    is_whole = weight.is_contiguous() and weight.numel() % 4 == 0 == weight.storage_offset() % 4
    return weight.view(-1).view(torch.int64) if is_whole else weight
