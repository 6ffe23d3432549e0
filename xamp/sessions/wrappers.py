"""Looks inside what other libraries wrap around models and optimizers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

__all__ = ["optimizer_in", "unwrap"]

_MODELS = ("_orig_mod", "_forward_module")  # of torch.compile, and of Lightning Fabric
_OPTIMIZERS = ("optimizer", "_optimizer")  # of accelerate, and of Lightning and Fabric


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel, DataParallel, torch.compile and Fabric's module."""
    while True:
        if isinstance(model, (DistributedDataParallel, DataParallel)):
            model = model.module
            continue
        inner = None
        if not isinstance(model, torch.jit.ScriptModule):
            inner = next((model._modules[name] for name in _MODELS if name in model._modules), None)
        if inner is None:
            return model
        model = inner


def optimizer_in(wrapper: Any) -> Optimizer | None:
    """The optimizer that ``wrapper`` keeps in an attribute of one of the usual names; None where there is none."""
    held = getattr(wrapper, "__dict__", {}) if hasattr(wrapper, "zero_grad") else {}
    return next((held[name] for name in _OPTIMIZERS if isinstance(held.get(name), Optimizer)), None)
