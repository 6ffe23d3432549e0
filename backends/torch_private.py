"""The private names of torch that backends use; no other module here names one, but for the emulation's own.

They are listed, with those of the core, in :mod:`xamp.torch_compat.torch_private.names`: the release that brought each,
and what xamp does without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import _default_to_fused_or_foreach

__all__ = [
    "cudnn_built_with",
    "cudnn_rnn_flatten_weight",
    "default_to_fused_or_foreach",
    "foreach_mul_",
    "get_cudnn_enabled",
    "has_kernel_for_key",
    "use_cudnn_rnn_flatten_weight",
]

has_kernel_for_key: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key
"""Returns whether an operator, such as ``"aten::mm"``, has a kernel for a key of the dispatcher."""

foreach_mul_ = torch._foreach_mul_

default_to_fused_or_foreach: Any = _default_to_fused_or_foreach
"""Returns whether an optimizer chooses its fused implementation by itself, and whether the one on lists."""

get_cudnn_enabled: Callable[[], bool] = torch._C._get_cudnn_enabled
use_cudnn_rnn_flatten_weight: Callable[[], bool] = torch._use_cudnn_rnn_flatten_weight
"""Returns whether torch was built with cuDNN's recurrent layers."""

cudnn_rnn_flatten_weight = torch._cudnn_rnn_flatten_weight


def cudnn_built_with() -> tuple[int, ...]:
    """Return the version of cuDNN that torch was built with; empty for a build without cuDNN."""
    module: Any = getattr(torch._C, "_cudnn", None)
    return () if module is None else tuple(module.getCompileVersion())
