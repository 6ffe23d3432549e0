"""Process groups, and what runs a forward for several ranks. A torch built without torch.distributed has no groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from xamp.torch_compat.torch_private.late import if_imported

__all__ = ["ACTIVE_DDP", "active_ddp", "composed_states", "ddp_attributes", "process_group_store", "process_groups"]

ddp_attributes: Mapping[str, Any] = vars(DistributedDataParallel)
"""The attributes of the class, for code that each forward runs: a look-up by :data:`ACTIVE_DDP` makes no call."""

ACTIVE_DDP = "torch.nn.parallel.DistributedDataParallel._active_ddp_module".rpartition(".")[2]


def active_ddp() -> Any:
    """Return the DDP that runs a forward now, None if there is none. The compiler binds its graph to the answer."""
    return DistributedDataParallel._active_ddp_module


def process_groups() -> list[Any]:
    """Return all process groups that this rank is in."""
    return list(dist.distributed_c10d._world.pg_map)


def process_group_store(group: Any) -> Any:
    """Return the store of a process group."""
    return dist.distributed_c10d._get_process_group_store(group)


def composed_states(module: nn.Module) -> Iterable[Any]:
    """Return the states that torch's ``replicate`` and its like keep in ``module``; none if none was imported."""
    key = if_imported("torch.distributed._composable.contract.STATE_KEY")
    return () if key is None else module.__dict__.get(key, {}).values()
