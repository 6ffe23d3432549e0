"""What the functions of ``amp_C`` share: lists in fp32, numbers from tensors, writes that a flag prevents."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from xamp.ground import kernels
from xamp.registry.registry import HOST

__all__ = ["Lists", "floats", "norms", "number", "raise_flag", "store", "whole_norm"]

Lists = Sequence[Sequence[torch.Tensor]]

_LOWER = (torch.float16, torch.bfloat16)
_CHUNK = 2**14
"""So many elements torch's kernel for the CPU sums in fp32 without harm: of 38 million it gives a norm 2e-3 too low."""


def floats(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors in fp32, and as operators on lists take them: see :func:`xamp.ground.kernels.plain`.

    Those of 16 bits are copies. Where nothing is to do, a tensor is the very same, detached.
    """
    return kernels.plain([t.detach().float() if t.dtype in _LOWER else t.detach() for t in tensors])


def number(value: Any) -> Any:
    """Return ``value`` as what a foreach operator takes: a Python number, or a tensor without dimensions."""
    return value.detach().reshape(()) if isinstance(value, torch.Tensor) else value


def norms(tensors: Sequence[torch.Tensor], order: float = 2.0) -> torch.Tensor:
    """Return the norm of each tensor, computed in fp32 (fp64 for fp64), shape ``[len(tensors)]``."""
    wide = kernels.plain([t.detach() for t in tensors])
    if not wide:
        return torch.zeros(0)
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in wide) else torch.float32
    filled = [t if t.numel() else t.new_zeros(1) for t in wide]
    if order != math.inf and filled[0].device.type == HOST:
        return torch.stack([_norm_in_chunks(t, order, dtype) for t in filled])
    return torch.stack(kernels.norms(filled, order, dtype))


def _norm_in_chunks(tensor: torch.Tensor, order: float, dtype: torch.dtype) -> torch.Tensor:
    if tensor.numel() <= _CHUNK:
        return kernels.norms([tensor], order, dtype)[0]
    parts = kernels.norms(tensor.reshape(-1).split(_CHUNK), order, dtype)
    whole: torch.Tensor = torch.linalg.vector_norm(torch.stack(parts).double(), order)
    return whole.to(dtype)


def whole_norm(parts: torch.Tensor, order: float = 2.0) -> torch.Tensor:
    """Return the norm over all from the norms of the parts, shape ``[1]``, as the kernels return it."""
    if not parts.numel():
        return parts.new_zeros(1)
    norm: torch.Tensor = torch.linalg.vector_norm(parts, order)
    return norm.reshape(1)


def raise_flag(flag: torch.Tensor, *values: Sequence[torch.Tensor]) -> None:
    """Set ``flag`` to 1 if an element of ``values`` is inf or nan. The host does not wait."""
    for tensors in values:
        if len(tensors):
            flag.masked_fill_(~torch.isfinite(norms(tensors, float("inf"))).all().to(flag.device), 1)


def store(targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor], skip: torch.Tensor | None = None) -> None:
    """Write ``values`` into ``targets``, in their dtypes.

    Args:
        targets: tensors of any floating dtype.
        values: as many, of the same shapes.
        skip: where this is not zero, on the device, the targets keep what they hold.
    """
    held = [t.detach() for t in targets]
    if skip is not None:
        raised = skip.reshape(()) != 0
        values = [torch.where(raised.to(t.device), t, v.to(t.dtype)) for t, v in zip(held, values, strict=True)]
    if held:
        kernels.copy_(held, list(values))
