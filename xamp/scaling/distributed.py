"""The wrappers (DDP, FSDP) that share a session's models between processes, and which ranks decide together.

:class:`Wrappers` answers three questions: Has a wrapper postponed its reduction of the gradients (``no_sync``)? Who
decides on a step, and do these ranks see the same gradients anyway? Has sharding taken a parameter out of a model?
:mod:`xamp.scaling.ddp` notices DistributedDataParallel (DDP); FSDP is found in the models themselves.
"""

from __future__ import annotations

import dataclasses
import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from xamp.ground.compiler import break_graphs
from xamp.ground.torch_private.distributed import process_groups
from xamp.scaling import ddp as ddps
from xamp.scaling.fsdp import groups2, hidden_gradients, is_in_backward, keepers, sharded_params
from xamp.scaling.masters import master_of
from xamp.scaling.rank_groups import Layout, fsdp1_layouts, is_shard, layout_of, ranks_of, widest
from xamp.scaling.shards import is_dtensor, local

__all__ = [
    "Wrappers",
    "groups_of_meshes",
    "groups_sharing",
    "is_running",
    "is_shard",
    "is_sharded",
    "own_groups",
    "share_from_rank_zero",
    "share_overflow",
]

is_running: Callable[[], bool] = dist.is_initialized if dist.is_available() else lambda: False
"""Returns whether there is a default process group. Each step asks, so this is torch's function itself."""


own_groups = process_groups
"""Returns all process groups that this rank is in."""


def share_overflow(flags: torch.Tensor, group: Any) -> None:
    """Raise ``flags`` (1.0: overflow) to their maximum over the ranks of ``group``."""
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Who decides on a step.

    Attributes:
        params: the parameters of the step.
        groups: process groups of more than one rank, over each of which the ranks agree; empty: this rank is alone.
        averagers: DDPs that reduce all of ``params`` between them and span exactly the ranks of the one group; empty
            where there are none, so that the gradients of the ranks may differ. Weak: a DDP holds the model, by which
            sessions are known.
        frozen: those of ``params`` that no DDP reduces and that had no gradient when the plan was made.
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


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a parameter was.

    Attributes:
        was_shard: it was FSDP1's already.
        module: its module, weakly; None where FSDP kept it outside of any.
        name: its name there.
    """

    was_shard: bool
    module: weakref.ref[nn.Module] | None
    name: str

    def is_sharded(self, modules: set[int], gathered: bool) -> bool:
        """Return whether the place, in one of the modules with these ids, has a shard now or is empty.

        With ``gathered`` any other tensor counts as a shard: FSDP may have put the gathered parameter there.
        """
        module = None if self.module is None else self.module()
        if module is None or id(module) not in modules:
            return False
        now = module._parameters.get(self.name)
        return now is None or gathered or is_dtensor(now) or is_shard(now)

    def has_other_over(self, param: torch.Tensor) -> bool:
        """Return whether another tensor with the memory of ``param``, a DTensor, has the place: DDP took it apart."""
        module = None if self.module is None else self.module()
        now = getattr(module, self.name, None)
        part = local(param)
        return isinstance(now, torch.Tensor) and part.numel() > 0 and local(now).data_ptr() == part.data_ptr()


class Wrappers:
    """The wrappers around one session's models."""

    def __init__(self, models: Sequence[weakref.ref[nn.Module]], group: Any) -> None:
        self._models = models
        self._group = group
        self._held: Any = WeakIdKeyDictionary()  # DDP -> ids of its parameters
        self._reduced: Any = WeakIdKeyDictionary()  # DDP -> ids of those that it is known to reduce
        self._searched_models = False
        self._sharded: list[weakref.ref[nn.Module]] | None = None
        self._layouts: dict[int, Layout] | None = None
        self._plan = _Plan()
        self.agree_always = False  # some rank needs it, for its part of the model differs from that of this rank
        self._own: Any = WeakIdKeyDictionary()  # parameters of optimizers that were in the models -> _Place

    @staticmethod
    def absent() -> bool:
        """Return whether nothing is shared between processes. Then no other question need be asked."""
        return not is_running() and not ddps.noted.data  # .data: a weak dictionary counts its length in Python

    def find(self) -> list[DistributedDataParallel]:
        """Return the DDP objects noticed since the last call."""
        if not self._searched_models and is_running():
            self._searched_models = True  # a DDP around a part of a model has no region inside that would note it
            for module in self._modules():
                ddps.note_given(module)
        new = [ddp for ddp in ddps.noted if ddp not in self._held]
        for ddp in new:
            self._held[ddp] = ddps.held(ddp)
            self._reduced[ddp] = ddps.reduced(ddp)
            self._plan = _Plan()
        return new

    def postponed(self, params: Iterable[torch.Tensor]) -> bool:
        """Return whether a wrapper has yet to reduce the gradients that the last backward left in ``params``."""
        ids = {id(p) for p in params}
        for ddp, held in self._held.items():
            reduced = ddps.noted.get(ddp)
            if not (ddp.require_backward_grad_sync if reduced is None else reduced) and not held.isdisjoint(ids):
                return True
        return any(self._yet_to_reduce(ids))

    def agree(self, flags: torch.Tensor, params: Sequence[torch.Tensor], saturates: bool) -> None:
        """Raise ``flags`` (1.0: overflow) to their maximum over the ranks that decide together.

        Nothing is shared where each of ``params`` is in a DDP that averages its gradient over these very ranks: an
        overflow of one rank is then in the gradients of all. On a device that ``saturates``, it is not.
        """
        plan = self._plan_for(params)
        if plan.groups and (saturates or self.agree_always or not plan.averages()):
            for group in plan.groups:
                share_overflow(flags, group)

    def averages(self, params: Sequence[torch.Tensor]) -> bool:
        """Return whether DDP gives all ranks that decide on ``params`` the same gradients of all of them."""
        return self._plan_for(params).averages()

    def names_within(self, group: Any, own: set[int], unseen: Iterable[DistributedDataParallel] = ()) -> list[str]:
        """Return the names of parameters in the DDPs that span the ranks of ``group``, the same on each of them.

        The models around may differ between ranks: one has a part that another has not, or has wrapped.

        Args:
            group: a process group.
            own: ids of the session's parameters. The DDPs of other sessions do not count: one that nobody needs any
                more may be gone on one rank, and be there on another until its garbage is collected.
            unseen: DDPs of the models that nobody has noted.
        """
        ranks = ranks_of(group)
        spanning = [ddp for ddp in (*self._held, *unseen) if ranks_of(ddp.process_group) == ranks]
        held = {ddp: ddps.held(ddp) for ddp in spanning}
        taken = {ddp: ids for ddp, ids in held.items() if not ids.isdisjoint(own)}
        return sorted(n for ddp, ids in taken.items() for n, p in ddp.module.named_parameters() if id(p) in ids)

    def deciders(self, params: Sequence[torch.Tensor]) -> Sequence[Any]:
        """Return the groups whose ranks decide together on a step of ``params``; empty where this rank decides alone.

        These are the group that ``initialize`` was given, and those that divide a parameter between them; else those
        of the wrappers that hold ``params``; else the default group. A group whose ranks another one has too is left
        out.
        """
        return self._plan_for(params).groups

    def _plan_for(self, params: Sequence[torch.Tensor]) -> _Plan:
        """Return who decides on ``params``. Mostly they are those of the last call."""
        known = self._plan.params
        if len(known) != len(params) or not all(map(operator.is_, known, params)):
            self._plan = self._make_plan(params)
        return self._plan

    @break_graphs("ranks find out once which of them decide together")
    def _make_plan(self, params: Sequence[torch.Tensor]) -> _Plan:
        if not is_running():
            return _Plan(params)
        given = self._group is not None
        groups = widest([self._group, *self._between(params)] if given else self.holders(params) or [None])
        if len(groups) != 1:
            return _Plan(params, groups)
        ranks = ranks_of(groups[0])
        spanning = [ddp for ddp in self._holding(params) if ranks_of(ddp.process_group) == ranks]
        reduced: set[int] = set().union(*(self._reduced[ddp] for ddp in spanning))
        others = [p for p in params if id(p) not in reduced]
        if any(p.requires_grad for p in others):
            return _Plan(params, groups)
        return _Plan(params, groups, [weakref.ref(ddp) for ddp in spanning], others)

    def _between(self, params: Iterable[torch.Tensor]) -> Iterator[Any]:
        """Yield the groups between whose ranks elements of ``params`` are divided: a part is not stepped alone."""
        return (group for p in params for group in self.layout(p).shards)

    def _holding(self, params: Iterable[torch.Tensor]) -> list[DistributedDataParallel]:
        """Return the DDPs that hold any of ``params``."""
        ids = {id(p) for p in params}
        return [ddp for ddp, held in self._held.items() if not held.isdisjoint(ids)]

    def holders(self, params: Sequence[torch.Tensor]) -> list[Any]:
        """Return the process groups of the wrappers that hold any of ``params``, each once."""
        found = [ddp.process_group for ddp in self._holding(params)]
        found += [group for p in params for group in self.layout(p).holders]
        return list({id(group): group for group in found}.values())

    def any_in_backward(self) -> bool:
        """Return whether FSDP has begun a backward and not ended it."""
        return any(map(is_in_backward, self._shards()))

    def may_be_left(self, params: Sequence[torch.Tensor]) -> bool:
        """Return whether ranks may run out of batches before others, under torch's ``Join``."""
        return self.any_joins() and any(ddp._join_config.enable for ddp in self._holding(params))

    def any_joins(self) -> bool:
        """Return whether any DDP is under ``Join`` now."""
        return any(ddp._join_config.enable for ddp in self._held)

    def layout(self, param: torch.Tensor) -> Layout:
        """Return how the elements of ``param`` lie on the ranks."""
        if self._layouts is None or (is_shard(param) and id(param) not in self._layouts):
            self._layouts = fsdp1_layouts(self._modules())
        return layout_of(param, self._layouts)

    def hidden_gradients(
        self, params: Iterable[torch.Tensor], others: Iterable[torch.Tensor] = ()
    ) -> list[torch.Tensor]:
        """Return the gradients of ``params`` that FSDP2 has yet to reduce: it keeps them outside of any ``.grad``.

        Where it keeps them in one piece with those of ``others``, of other optimizers, they count for the first of all.
        """
        groups = keepers(self._shards())
        return list(hidden_gradients(groups, {id(p) for p in params}, {id(p) for p in others})) if groups else []

    def hold_any(self) -> bool:
        """Return whether a DDP or FSDP was found that holds a model, or a part of one."""
        return bool(self._held) or any(True for _ in self._shards())

    def _yet_to_reduce(self, params: Collection[int]) -> Iterator[nn.Module]:
        """Yield the modules whose FSDP leaves gradients of parameters with these ids to a later backward."""
        for module in self._shards():
            if not _reduces(module) and any(id(p) in params for p in sharded_params([module])):
                yield module

    def note_held(self, params: Iterable[torch.Tensor]) -> None:
        """Remember which of ``params``, those of an optimizer, are in the models now."""
        current = self._current()
        places = {id(p): (weakref.ref(m), name) for m in self._modules() for name, p in m._parameters.items()}
        for param in params:
            if id(param) in current:
                self._own[param] = _Place(is_shard(param), *places.get(id(param), (None, "")))

    def lost(self, params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return those of ``params`` that sharding has taken out of the models, or has sharded under a master.

        What the user has replaced is not lost: a module of its own has taken the place, or the weights are tied now.
        """
        current = self._current()
        held = [param for param in params if param in self._own]
        replaced = [p for p in held if id(p) not in current and not is_shard(p) and not is_dtensor(p)]
        modules = {id(module) for module in self._modules()} if replaced and self._any_sharded() else set()
        gathered = any(map(is_sharded, self._modules())) if modules else False
        lost = [param for param in replaced if self._own[param].is_sharded(modules, gathered)]
        lost += [p for p in held if is_dtensor(p) and id(p) not in current and self._own[p].has_other_over(p)]
        return lost or [p for p in held if is_shard(p) and not self._own[p].was_shard and master_of(p) is not None]

    def _current(self) -> set[int]:
        """Return the ids of the models' parameters, of sharded ones also while whole ones stand in their place."""
        modules = list(self._modules())
        found = {id(p) for module in modules for p in module._parameters.values()}
        return found | {id(p) for p in sharded_params(modules)}

    def _any_sharded(self) -> bool:
        params = (p for module in self._modules() for p in module._parameters.values())
        return any(map(is_sharded, self._modules())) or any(is_dtensor(p) or is_shard(p) for p in params)

    def _modules(self) -> Iterator[nn.Module]:
        return (m for ref in self._models if (model := ref()) is not None for m in model.modules())

    def _shards(self) -> Iterator[nn.Module]:
        """Yield the modules that FSDP manages. The models are searched for them once, at the first call."""
        if self._sharded is None:
            self._sharded = [weakref.ref(m) for m in self._modules() if is_sharded(m)]
        return (module for ref in self._sharded if (module := ref()) is not None)


def groups_sharing(params: Iterable[torch.Tensor]) -> list[Any]:
    """Return the process groups of DDPs and DTensors that hold any of ``params``, where no model is known.

    This searches all objects, and is called once: a parameter does not know its DDP.
    """
    params = list(params)
    found = [ddp.process_group for ddp in ddps.search(params)]
    return list(widest({id(group): group for group in [*found, *groups_of_meshes(params)]}.values()))


def groups_of_meshes(params: Iterable[torch.Tensor]) -> list[Any]:
    """Return the process groups of the meshes of all DTensors among ``params``, each once."""
    found = (group for p in params for group in layout_of(p, {}).holders)
    return list({id(group): group for group in found}.values())


def is_sharded(module: nn.Module) -> bool:
    """Return whether FSDP1 or FSDP2 manages ``module``."""
    return hasattr(module, "_sync_gradients") or hasattr(module, "_get_fsdp_state")


def _reduces(module: Any) -> bool:
    """Return whether an FSDP module reduces the gradients of its next backward."""
    if hasattr(module, "_sync_gradients"):  # FSDP1
        return bool(module._sync_gradients)
    groups = groups2(module)  # FSDP2, which waits for what it reduces at the end of the last backward only
    is_last = not groups or module._get_fsdp_state()._state_ctx.is_last_backward
    return is_last and all(group.reduce_grads and _adds_copies_up(group) for group in groups)


def _adds_copies_up(group: Any) -> bool:
    """Return whether a group of HSDP reduces between the copies too; see FSDP2's ``set_requires_all_reduce``."""
    return bool(group.all_reduce_grads) or not hasattr(group.mesh_info, "replicate_process_group")


def share_from_rank_zero(tensors: Iterable[torch.Tensor], group: Any) -> None:
    """Broadcast ``tensors`` in place from the first rank of ``group``."""
    source = dist.get_global_rank(group, 0)
    for tensor in tensors:
        dist.broadcast(local(tensor), source, group=group)
