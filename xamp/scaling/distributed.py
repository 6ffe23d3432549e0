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

__all__ = [
    "Wrappers",
    "is_shard",
    "note_given",
    "note_wrapper",
    "note_wrapper_while_tracing",
    "share_from_rank_zero",
    "share_overflow",
    "world_size",
]

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


def world_size(group: Any) -> int:
    """Number of processes in ``group`` (None: the default group); 1 where there is none."""
    if not _is_initialized():
        return 1
    return dist.get_world_size(group)


def share_overflow(flags: torch.Tensor, group: Any) -> None:
    """Raise ``flags`` (1.0: overflow) to their maximum over the ranks of ``group``."""
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)


def is_shard(param: torch.Tensor) -> bool:
    """Whether ``param`` is one rank's part of a parameter, in FSDP1's flat one.

    FSDP2's parts are DTensors, whose kernels agree on an overflow by themselves.
    """
    return hasattr(param, "_fsdp_flattened") or hasattr(param, "_is_flat_param")


class Wrappers:
    """The wrappers around one session's models."""

    def __init__(self, models: Sequence[weakref.ref[nn.Module]], group: Any) -> None:
        self._models = models
        self._group = group
        self._held: Any = WeakIdKeyDictionary()  # DDP -> ids of the parameters it reduces
        self._looked = False
        self._sharded: list[weakref.ref[nn.Module]] | None = None

    @staticmethod
    def absent() -> bool:
        """Whether nothing is shared between processes, so that no other question need be asked."""
        return not _is_initialized() and not _noted.data  # its length is counted in Python

    def find(self) -> list[DistributedDataParallel]:
        """The DDP objects noticed since the last call."""
        if not self._looked and _is_initialized():
            self._looked = True  # no region runs inside a DDP around a part of a model, to note it in passing
            for module in self._modules():
                note_given(module)
        fresh = [ddp for ddp in _noted if ddp not in self._held]
        for ddp in fresh:
            ignored: set[str] = getattr(ddp, "parameters_to_ignore", set())
            self._held[ddp] = {id(p) for name, p in ddp.module.named_parameters() if name not in ignored}
        return fresh

    def postponed(self, params: Iterable[torch.Tensor]) -> bool:
        """Whether the gradients that the last backward left in ``params`` have yet to be reduced."""
        ids = {id(p) for p in params}
        for ddp, held in self._held.items():
            reduced = _noted.get(ddp)
            if not (ddp.require_backward_grad_sync if reduced is None else reduced) and not held.isdisjoint(ids):
                return True
        return any(not _reduces(module) for module in self._shards())

    def agree(self, flags: torch.Tensor, params: Iterable[torch.Tensor], saturates: bool) -> None:
        """Raise ``flags`` (1.0: overflow) to their maximum over the ranks, unless a DDP made the gradients equal.

        Where the device ``saturates``, equal gradients do not show the overflow of another rank.
        """
        if world_size(self._group) == 1:
            return
        reduced: set[int] = set().union(*self._held.values())
        if saturates or not all(id(p) in reduced for p in params):
            share_overflow(flags, self._group)

    def keep_gradients(self) -> bool:
        """Whether an FSDP2 has yet to reduce gradients, and keeps them where no parameter shows them."""
        return any(hasattr(module, "_get_fsdp_state") and not _reduces(module) for module in self._shards())

    def _modules(self) -> Iterator[nn.Module]:
        return (m for ref in self._models if (model := ref()) is not None for m in model.modules())

    def _shards(self) -> Iterator[nn.Module]:
        """Modules of the models that FSDP manages; looked for once, when the processes are connected."""
        if self._sharded is None:
            self._sharded = [weakref.ref(m) for m in self._modules() if _is_sharded(m)]
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
