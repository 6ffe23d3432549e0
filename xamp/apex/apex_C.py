"""Apex's extension module ``apex_C`` in torch's own operators: several tensors as one flat tensor, and back."""

from __future__ import annotations

from xamp.registry.registry import require_torch

require_torch(__name__)

from collections.abc import Sequence

import torch

from xamp.torch_compat.torch_private import operators

__all__ = ["flatten", "unflatten"]


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a new tensor of one dimension with the elements of all ``tensors``, which have one dtype and device."""
    flat: torch.Tensor = operators.flatten_dense_tensors(tensors)
    return flat


def unflatten(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of ``flat`` with the shapes of ``tensors``."""
    return list(operators.unflatten_dense_tensors(flat, tensors))
