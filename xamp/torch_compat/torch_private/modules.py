"""Classes of modules, what they call, and the hooks of all optimizers."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules._functions import SyncBatchNorm as SyncBatchNormFunction
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.optim.optimizer import (
    _default_to_fused_or_foreach,
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
)

__all__ = [
    "RECURRENT",
    "BatchNorm",
    "InstanceNorm",
    "SyncBatchNormFunction",
    "default_to_fused_or_foreach",
    "optimizer_post_hooks",
    "optimizer_pre_hooks",
]

BatchNorm = _BatchNorm
"""The class of batch norms of all dimensions, to derive from; :mod:`xamp.torch_compat.norms` has it unnamed."""

InstanceNorm = _InstanceNorm

RECURRENT: Any = torch._VF
"""Has the functions that recurrent layers and cells call. Each is looked up here when it is called."""

default_to_fused_or_foreach: Any = _default_to_fused_or_foreach
"""Returns whether an optimizer chooses its fused implementation by itself, and whether the one on lists."""

optimizer_pre_hooks = _global_optimizer_pre_hooks
"""The hooks before the steps of all optimizers: torch adds to this dict, and to the next one."""

optimizer_post_hooks = _global_optimizer_post_hooks
