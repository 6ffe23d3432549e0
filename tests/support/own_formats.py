"""A stand-in for a device with storage formats, and optimizers, of its own."""

from __future__ import annotations

from typing import Any

import torch

from xamp.backends.cpu import CpuBackend
from xamp.contract import BackendSpec

PECULIAR = BackendSpec("peculiar", ("cpu",), "own_formats:PeculiarBackend", priority=500)


class PeculiarBackend(CpuBackend):
    """Tensors of two columns are in a format of its own; an optimizer that is told to be stale would step wrongly."""

    def plain(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone() if tensor.shape[-1:] == (2,) else tensor

    def optimizer_refusal(self, optimizer: Any, *, casts: bool) -> str:
        if not hasattr(optimizer, "is_joined"):
            return ""
        return "is cast." if casts else "is stale." if optimizer.is_joined else ""
