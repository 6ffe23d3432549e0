"""``apex.parallel``: data parallelism over torch's own, synchronised batch norm on any device, LARC."""

from __future__ import annotations

from xamp.registry.registry import require_torch

require_torch(__name__)

from typing import Any

import torch
from torch import nn
from torch.distributed import ReduceOp

from xamp.apex.parallel.distributed import DistributedDataParallel, Reducer
from xamp.apex.parallel.LARC import LARC
from xamp.apex.parallel.sync_batchnorm import SyncBatchNorm
from xamp.torch_compat.torch_private.modules import BatchNorm, InstanceNorm

__all__ = [
    "LARC",
    "DistributedDataParallel",
    "ReduceOp",
    "Reducer",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
]


def convert_syncbn_model(module: nn.Module, process_group: Any = None, channel_last: bool = False) -> nn.Module:
    """Replace every batch norm in ``module`` by a :class:`SyncBatchNorm` with the same values.

    Args:
        module: is changed in place, except where it is a batch norm itself.
        process_group: the ranks that share statistics; None: all.
        channel_last: the channels are the last dimension of the inputs.

    Returns:
        ``module``, or the batch norm that takes its place.
    """
    converted = module
    if isinstance(module, InstanceNorm):
        return module
    if isinstance(module, BatchNorm):
        converted = _converted(module, process_group, channel_last)
    for name, child in module.named_children():
        converted.add_module(name, convert_syncbn_model(child, process_group, channel_last))
    return converted


def _converted(norm: Any, process_group: Any, channel_last: bool) -> SyncBatchNorm:
    made = SyncBatchNorm(
        norm.num_features,
        norm.eps,
        norm.momentum,
        norm.affine,
        norm.track_running_stats,
        process_group,
        channel_last=channel_last,
    )
    if norm.affine:
        made.weight, made.bias = norm.weight, norm.bias  # the very parameters: an optimizer made before holds them
    made.running_mean, made.running_var = norm.running_mean, norm.running_var
    made.num_batches_tracked = norm.num_batches_tracked
    made.training = norm.training
    return made


def create_syncbn_process_group(group_size: int) -> Any:
    """Make process groups of ``group_size`` ranks each, and return the one of this rank; None for a size of 0: all.

    Every rank must call it. ``group_size`` must divide the number of ranks.
    """
    if group_size == 0:
        return None
    world_size = torch.distributed.get_world_size()
    if world_size < group_size or world_size % group_size:
        raise AssertionError(
            f"create_syncbn_process_group({group_size}): must divide the number of ranks, which is {world_size}."
        )
    own = None
    for first in range(0, world_size, group_size):
        ranks = list(range(first, first + group_size))
        group = torch.distributed.new_group(ranks=ranks)
        if torch.distributed.get_rank() in ranks:
            own = group
    return own
