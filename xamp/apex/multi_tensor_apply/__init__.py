"""``apex.multi_tensor_apply``: calls a function of :mod:`xamp.apex.amp_C` on lists of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from xamp.registry.registry import require_torch

require_torch(__name__)

__all__ = ["MultiTensorApply", "multi_tensor_applier"]


class MultiTensorApply:
    """Calls functions of ``amp_C`` with a chunk size, as Apex does. The chunk size makes no difference.

    Attributes:
        available: True: here the functions need no extension to be built.
    """

    available = True
    warned = False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def check_avail(self) -> None:
        """Do nothing: the functions are always there."""

    def __call__(self, op: Callable[..., Any], noop_flag_buffer: Any, tensor_lists: Any, *args: Any) -> Any:
        """Return ``op(chunk_size, noop_flag_buffer, tensor_lists, *args)``."""
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)
