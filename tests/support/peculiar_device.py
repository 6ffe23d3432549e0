"""A stand-in for a device that has private storage formats, and optimizers of its own."""

from __future__ import annotations

from typing import Any

import torch

from xamp.backends.cpu import CpuBackend
from xamp.contract import BackendSpec

PECULIAR = BackendSpec("peculiar", ("cpu",), "peculiar_device:PeculiarBackend", priority=500)


class PeculiarBackend(CpuBackend):
    """Tensors of two columns have a private format. An optimizer with ``is_joined`` is refused if cast or stale."""

    def plain(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone() if tensor.shape[-1:] == (2,) else tensor

    def optimizer_refusal(self, optimizer: Any, *, casts: bool) -> str:
        if not hasattr(optimizer, "is_joined"):
            return ""
        return "is cast." if casts else "is stale." if optimizer.is_joined else ""
