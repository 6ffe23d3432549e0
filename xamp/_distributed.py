"""What xamp must know of the wrappers that share a model between processes.

Three questions: has the wrapper postponed its reduction of the gradients (``no_sync``), do all ranks see the same
gradients anyway, and do their masters start out equal. DistributedDataParallel is noticed while it runs a model's
forward, because it may be put around the model at any time and leaves no trace in it; FSDP is found in the model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["Wrappers", "is_rank_zero", "note_given", "note_wrapper", "note_wrapper_while_tracing", "world_size"]

# DDP object -> whether its last forward with gradients enabled asked for a reduction; None: read it when needed.
_noted: Any = WeakIdKeyDictionary()


def note_wrapper() -> None:
    """Remember the DDP that runs a forward now. DDP decides there whether the coming backward is reduced."""
    ddp = DistributedDataParallel._active_ddp_module
    if ddp is not None and torch.is_grad_enabled():
        _noted[ddp] = bool(ddp.require_backward_grad_sync)


def note_wrapper_while_tracing() -> None:
    """The same while a forward is compiled; the graph will not call this again, so no answer can be kept."""
    ddp = DistributedDataParallel._active_ddp_module
    if ddp is not None and ddp not in _noted:
        _noted[ddp] = None


# What torch.compiler.assume_constant_result sets: run while tracing, result taken as constant. Calling the decorator
# would import the compiler with every import of xamp.
note_wrapper_while_tracing._dynamo_marked_constant = True  # type: ignore[attr-defined]


def note_given(wrapper: object) -> None:
    """Remember a DDP that was named; what its last forward asked for is read from it when needed."""
    if isinstance(wrapper, DistributedDataParallel) and wrapper not in _noted:
        _noted[wrapper] = None


_is_initialized: Callable[[], bool] = dist.is_initialized if dist.is_available() else lambda: False


def is_rank_zero() -> bool:
    """Whether this process is the one that logs."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def world_size(group: Any) -> int:
    """Number of processes in ``group`` (None: the default group); 1 where there is none."""
    if not _is_initialized():
        return 1
    return dist.get_world_size(group)


class Wrappers:
    """The wrappers around one session's models."""

    def __init__(self, models: Sequence[weakref.ref[nn.Module]], group: Any) -> None:
        self._models = models
        self._group = group
        self._adopted: Any = WeakIdKeyDictionary()  # DDP -> ids of our parameters that it reduces
        self._looked = False
        self._sharded: list[weakref.ref[nn.Module]] | None = None

    @staticmethod
    def absent() -> bool:
        """Whether nothing is shared between processes, so that no other question need be asked."""
        return not _noted.data and not _is_initialized()

    def postponed(self) -> bool:
        """Whether the gradients of the last backward have yet to be reduced."""
        if not _noted and world_size(self._group) == 1:
            return False
        for ddp, held in self._adopted.items():
            if not held:
                continue
            reduced = _noted.get(ddp)
            if not (ddp.require_backward_grad_sync if reduced is None else reduced):
                return True
        return any(not _reduces(module) for module in self._shards())

    def find_inside(self) -> None:
        """Note each DDP around a part of a model: no region of ours runs inside it to note it in passing."""
        if not self._looked and _is_initialized():
            self._looked = True
            for module in (m for ref in self._models if (model := ref()) is not None for m in model.modules()):
                note_given(module)

    def adopt(self, params: Callable[[], Iterable[torch.Tensor]]) -> list[DistributedDataParallel]:
        """DDP objects noticed since the last call that hold one of ``params``."""
        self.find_inside()
        fresh = [ddp for ddp in _noted if ddp not in self._adopted] if _noted else []
        if not fresh:
            return []
        mine = {id(p) for p in params()}
        found = []
        for ddp in fresh:
            ignored: set[str] = getattr(ddp, "parameters_to_ignore", set())
            held = {id(p) for name, p in ddp.module.named_parameters() if name not in ignored}
            self._adopted[ddp] = held & mine
            if held & mine:
                found.append(ddp)
        return found

    def agree(self, flags: torch.Tensor, params: Callable[[], Iterable[torch.Tensor]]) -> None:
        """Raise ``flags`` (1.0: overflow) to their maximum over the ranks, unless a DDP made the gradients equal."""
        if world_size(self._group) == 1:
            return
        reduced: set[int] = set().union(*self._adopted.values())
        if all(id(p) in reduced for p in params()):
            return
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group)

    def _shards(self) -> Iterator[nn.Module]:
        """Modules of the models that FSDP manages; looked for once, when the processes are connected."""
        if self._sharded is None:
            modules = [m for ref in self._models if (model := ref()) is not None for m in model.modules()]
            self._sharded = [weakref.ref(m) for m in modules if _is_sharded(m)]
        return (module for ref in self._sharded if (module := ref()) is not None)


def _is_sharded(module: nn.Module) -> bool:
    return hasattr(module, "_sync_gradients") or hasattr(module, "_get_fsdp_state")


def _reduces(module: Any) -> bool:
    """Whether an FSDP module reduces the gradients of its next backward."""
    if hasattr(module, "_sync_gradients"):  # FSDP1
        return bool(module._sync_gradients)
    group = module._get_fsdp_state()._fsdp_param_group  # FSDP2
    return group is None or bool(group.reduce_grads)


def share_from_rank_zero(tensors: Iterable[torch.Tensor], group: Any) -> None:
    """Broadcast ``tensors`` in place from the first rank of ``group``."""
    source = dist.get_global_rank(group, 0)
    for tensor in tensors:
        dist.broadcast(tensor, source, group=group)
