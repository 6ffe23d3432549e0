"""The wrappers (DDP, FSDP) that share a session's models between processes, and what its ranks do together.

:class:`Wrappers` answers what follows from where parameters live: who decides on a step, who compares settings, which
gradients a wrapper has yet to reduce (``no_sync``) and where it hides them, and whether sharding has taken a parameter
out of a model. :mod:`xamp.distributed.ddp` notices DistributedDataParallel (DDP), FSDP is found in the models.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from xamp.distributed import ddp as ddps
from xamp.distributed import fsdp, ranks
from xamp.distributed.ranks import Layout, is_dtensor, is_shard, layout_of, local, ranks_of, widest

__all__ = ["StepQuorum", "Wrappers", "groups_of_meshes", "groups_sharing"]


class StepQuorum(NamedTuple):
    """Who decides on a step.

    Attributes:
        params: the parameters of the step.
        groups: process groups of more than one rank, over each of which the ranks agree; empty: this rank is alone.
        averagers: DDPs that reduce all of ``params`` between them and span exactly the ranks of the one group; empty:
            there are none. Weak: a DDP holds the model, by which sessions are known.
        frozen: those of ``params`` that no DDP reduces and that had no gradient when the quorum was made.
    """

    params: Sequence[torch.Tensor] = ()
    groups: Sequence[Any] = ()
    averagers: Sequence[weakref.ref[DistributedDataParallel]] = ()
    frozen: Sequence[torch.Tensor] = ()

    def averages(self) -> bool:
        """Return whether all ranks get the same gradients from :attr:`averagers`, which then are some, and alive."""
        found = [ref() for ref in self.averagers]
        if not found or any(param.requires_grad for param in self.frozen):
            return False
        return all(ddp is not None and ddps.averages(ddp) for ddp in found)


class Wrappers:
    """The wrappers around one session's models.

    Attributes:
        group: the process group that ``initialize`` was given.
        agree_always: always all-reduce the overflow flags, because ranks hold different parts of the model.
    """

    def __init__(self, models: Sequence[weakref.ref[nn.Module]], group: Any) -> None:
        self.group = group
        self.agree_always = False
        self._models = models
        self._held: Any = WeakIdKeyDictionary()  # DDP -> ids of its parameters
        self._reduced: Any = WeakIdKeyDictionary()  # DDP -> ids of those that it is known to reduce
        self._searched_models = False
        self._sharded: list[weakref.ref[nn.Module]] | None = None
        self._quorum = StepQuorum()
        self._layouts: Any = WeakIdKeyDictionary()  # by parameter
        self._own: Any = WeakIdKeyDictionary()  # parameter of an optimizer -> its module, weakly, and its name there

    def find(self) -> list[DistributedDataParallel]:
        """Return the DDP objects noticed since the last call."""
        if not self._searched_models and ranks.is_running():
            self._searched_models = True  # a DDP around a part of a model has no region inside that would note it
            for module in self._modules():
                ddps.note_given(module)
        new = [ddp for ddp in ddps.noted if ddp not in self._held]
        for ddp in new:
            self._held[ddp], self._reduced[ddp] = ddps.held(ddp), ddps.reduced(ddp)
            self._quorum = StepQuorum()
        return new

    def hold_any(self) -> bool:
        """Return whether a DDP or FSDP was found that holds a model, or a part of one."""
        return bool(self._held) or any(True for _ in self._shards())

    def _modules(self) -> Iterator[nn.Module]:
        return (m for ref in self._models if (model := ref()) is not None for m in model.modules())

    def _shards(self) -> Iterator[nn.Module]:
        """Yield the modules that FSDP manages. The models are searched for them once, at the first call."""
        if self._sharded is None:
            self._sharded = [weakref.ref(m) for m in self._modules() if fsdp.is_sharded(m)]
        return (module for ref in self._sharded if (module := ref()) is not None)

    def _holding(self, params: Iterable[torch.Tensor]) -> list[DistributedDataParallel]:
        """Return the DDPs that hold any of ``params``."""
        ids = {id(p) for p in params}
        return [ddp for ddp, held in self._held.items() if not held.isdisjoint(ids)]

    def layout(self, param: torch.Tensor) -> Layout:
        """Return how the elements of ``param`` lie on the ranks. Of one that is a part it is found once."""
        if (found := self._layouts.get(param)) is not None:
            return found  # type: ignore[no-any-return]
        if is_shard(param):
            self._layouts.update(ranks.fsdp1_layouts(self._modules()))
        elif ranks.is_part(param):
            self._layouts[param] = layout_of(param)
        return self._layouts.get(param, layout_of(param))  # type: ignore[no-any-return]

    def holders(self, params: Sequence[torch.Tensor]) -> list[Any]:
        """Return the process groups of the wrappers that hold any of ``params``, each once."""
        found = (group for p in params for group in self.layout(p).holders)
        return list(dict.fromkeys([*(ddp.process_group for ddp in self._holding(params)), *found]))

    def quorum(self, params: Sequence[torch.Tensor]) -> StepQuorum:
        """Return who decides on a step of ``params``. Mostly they are those of the last call.

        These are the group that ``initialize`` was given, and those that divide a parameter between them, for no part
        is stepped alone; else those of the wrappers that hold ``params``; else the default group.
        """
        known = self._quorum.params
        if len(known) != len(params) or not all(map(operator.is_, known, params)):
            self._quorum = self._find_quorum(params)
        return self._quorum

    def _find_quorum(self, params: Sequence[torch.Tensor]) -> StepQuorum:
        if not ranks.is_running():
            return StepQuorum(params)
        if self.group is None:
            groups = widest(self.holders(params) or [None])
        else:
            groups = widest([self.group, *(group for p in params for group in self.layout(p).shards)])
        if len(groups) != 1:
            return StepQuorum(params, groups)
        among = ranks_of(groups[0])
        spanning = [ddp for ddp in self._holding(params) if ranks_of(ddp.process_group) == among]
        reduced: set[int] = set().union(*(self._reduced[ddp] for ddp in spanning))
        others = [p for p in params if id(p) not in reduced]
        if any(p.requires_grad for p in others):
            return StepQuorum(params, groups)
        return StepQuorum(params, groups, [weakref.ref(ddp) for ddp in spanning], others)

    def agree(self, flags: torch.Tensor, params: Sequence[torch.Tensor], saturates: bool) -> None:
        """Raise ``flags`` (1.0: overflow) to their maximum over the ranks that decide together.

        Nothing is shared where each of ``params`` is in a DDP that averages its gradient over these very ranks: an
        overflow of one rank is then in the gradients of all. On a device that ``saturates``, it is not.
        """
        quorum = self.quorum(params)
        if quorum.groups and (saturates or self.agree_always or not quorum.averages()):
            for group in quorum.groups:
                ranks.share_overflow(flags, group)

    def names_within(
        self, group: Any, params: Iterable[torch.Tensor], unseen: Iterable[DistributedDataParallel]
    ) -> list[str]:
        """Return names of parameters by which the ranks of ``group`` find out that they share a model.

        They are those in the DDPs that span these ranks, noted or ``unseen``, for the models around may differ between
        ranks. DDPs without any of ``params`` or of the models' do not count: one that nobody needs any more may be gone
        on one rank, and be there on another until its garbage is collected.
        """
        named = [pair for ref in self._models if (model := ref()) is not None for pair in model.named_parameters()]
        own = {id(p) for _, p in named} | {id(p) for p in params}  # FSDP2 shows others while it gathers them
        held = {**self._held, **{ddp: ddps.held(ddp) for ddp in unseen}}
        among = ranks_of(group)
        shared = [ddp for ddp, ids in held.items() if ranks_of(ddp.process_group) == among and not ids.isdisjoint(own)]
        found = sorted(n for ddp in shared for n, p in ddp.module.named_parameters() if id(p) in held[ddp])
        return found or [n for n, _ in named]

    def may_be_left(self, params: Iterable[torch.Tensor]) -> bool:
        """Return whether ranks that share ``params`` may run out of batches before others, under torch's ``Join``."""
        joining = [held for ddp, held in self._held.items() if ddp._join_config.enable]
        return bool(joining) and not set().union(*joining).isdisjoint(map(id, params))

    def postponed(self, params: Sequence[torch.Tensor]) -> bool:
        """Return whether a wrapper has yet to reduce the gradients that the last backward left in ``params``."""
        ids = {id(p) for p in params}
        if any(ddps.postpones(ddp) and not held.isdisjoint(ids) for ddp, held in self._held.items()):
            return True
        later = [module for module in self._shards() if fsdp.postpones(module)]
        return bool(later) and not ids.isdisjoint(map(id, fsdp.sharded_params(later)))

    def hidden_gradients(self, params: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """See :func:`xamp.distributed.fsdp.hidden_gradients`."""
        return fsdp.hidden_gradients(self._shards(), params, others)

    def lost_by_raising(self, params: Sequence[torch.Tensor]) -> str:
        """Return what is lost where a backward to ``params`` has raised on this rank; empty: nothing.

        The collective calls of its next backward would meet those that the others are in now, and DDP does not notice.
        FSDP, also where it reduces nothing yet, waits for the end of the backward that raised.
        """
        if any(map(fsdp.is_in_backward, self._shards())):
            return "FSDP is in the midst of it: its next backward would lose gradients"
        if not self.postponed(params) and self.quorum(params).groups:
            return (
                "the ranks that share its model or decide with it may have gone on without it: their collective calls "
                "no longer meet"
            )
        return ""

    def remember_params(self, params: Iterable[torch.Tensor]) -> None:
        """Remember which of ``params``, those of an optimizer, are in the models now, and where."""
        places = {id(p): (weakref.ref(m), name) for m in self._modules() for name, p in m._parameters.items()}
        outside = dict.fromkeys(map(id, fsdp.sharded_params(self._modules())), (lambda: None, ""))
        for param in params:
            if (place := places.get(id(param)) or outside.get(id(param))) is not None:
                self._own[param] = place

    def lost(self, params: Iterable[torch.Tensor], master_of: Callable[[torch.Tensor], object]) -> list[torch.Tensor]:
        """Return those of ``params`` that sharding has taken out of the models, or has sharded under a master.

        What the user has replaced is not lost: a module of its own has taken the place, or the weights are tied now.
        """
        modules = {id(module): module for module in self._modules()}
        kept = [p for module in modules.values() for p in module._parameters.values()]
        current = {id(p) for p in (*kept, *fsdp.sharded_params(modules.values()))}  # also while whole ones are there
        has_fsdp = any(map(fsdp.is_sharded, modules.values()))
        has_parts = has_fsdp or any(is_dtensor(p) or is_shard(p) for p in kept)

        def is_gone(param: torch.Tensor) -> bool:
            ref, name = self._own[param]
            if is_dtensor(param):  # DDP took it apart where another tensor, of its memory, has the place
                now, part = getattr(ref(), name, None), local(param)
                return isinstance(now, torch.Tensor) and part.numel() > 0 and local(now).data_ptr() == part.data_ptr()
            if id(ref()) not in modules:
                return False
            now = ref()._parameters.get(name)
            return has_fsdp or (has_parts if now is None else is_dtensor(now) or is_shard(now))  # FSDP has gathered it

        held = [param for param in params if param in self._own]
        lost = [p for p in held if id(p) not in current and not is_shard(p) and is_gone(p)]
        return lost or [p for p in held if is_shard(p) and master_of(p) is not None]


def groups_sharing(params: Iterable[torch.Tensor]) -> Sequence[Any]:
    """Return the process groups of DDPs and DTensors that hold any of ``params``, where no model is known.

    This searches all objects, and is called once: a parameter does not know its DDP.
    """
    params = list(params)
    return widest(dict.fromkeys([*(ddp.process_group for ddp in ddps.search(params)), *groups_of_meshes(params)]))


def groups_of_meshes(params: Iterable[torch.Tensor]) -> list[Any]:
    """Return the process groups of the meshes of all DTensors among ``params``, each once."""
    return list(dict.fromkeys(group for p in params for group in layout_of(p).holders))
