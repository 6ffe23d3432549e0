"""``apex.fused_dense``: linear layers, on torch's own."""

from __future__ import annotations

from xamp.registry.registry import require_torch

require_torch(__name__)

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["FusedDense", "FusedDenseGeluDense", "fused_dense_function", "fused_dense_gelu_dense_function"]


def fused_dense_function(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``input @ weight.T + bias``."""
    return F.linear(input, weight, bias)


def fused_dense_gelu_dense_function(
    input: torch.Tensor, weight1: torch.Tensor, bias1: torch.Tensor, weight2: torch.Tensor, bias2: torch.Tensor
) -> torch.Tensor:
    """Return a linear layer of the GELU of a linear layer of ``input``."""
    return F.linear(F.gelu(F.linear(input, weight1, bias1)), weight2, bias2)


class FusedDense(nn.Linear):
    """``torch.nn.Linear``, whose weights Apex left uninitialised."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias)


class FusedDenseGeluDense(nn.Module):
    """Two linear layers with a GELU between them.

    Args:
        in_features: of the input.
        intermediate_features: between the layers.
        out_features: of the output.
        bias: must be True, as in Apex.

    Raises:
        AssertionError: ``bias=False``.
    """

    def __init__(self, in_features: int, intermediate_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        if not bias:
            raise AssertionError("DenseGeluDense module without bias is currently not supported")
        self.in_features = in_features
        self.intermediate_features = intermediate_features
        self.out_features = out_features
        first, second = nn.Linear(in_features, intermediate_features), nn.Linear(intermediate_features, out_features)
        self.weight1, self.bias1 = first.weight, first.bias
        self.weight2, self.bias2 = second.weight, second.bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the output of the second layer."""
        return fused_dense_gelu_dense_function(input, self.weight1, self.bias1, self.weight2, self.bias2)
