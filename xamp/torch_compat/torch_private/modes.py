"""Modes that see each operator, subclasses of tensors that hold others, and values nested in containers."""

from __future__ import annotations

from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)
from torch.utils._pytree import tree_iter, tree_map

__all__ = [
    "TorchDispatchMode",
    "disable_current_modes",
    "is_traceable_wrapper_subclass",
    "tree_iter",
    "tree_map",
]

disable_current_modes = _disable_current_modes
