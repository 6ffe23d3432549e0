"""``apex.mlp``: several linear layers with one activation."""

from __future__ import annotations

from xamp.registry.registry import require_torch

require_torch(__name__)

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["MLP", "mlp_function"]

_ACTIVATIONS = {"none": 0, "relu": 1, "sigmoid": 2}


def mlp_function(bias: int, activation: int, *args: torch.Tensor) -> torch.Tensor:
    """Run linear layers, each followed by the activation, the last one too, as Apex's kernel does.

    Args:
        bias: 1: there are biases.
        activation: 0 none, 1 ReLU, 2 sigmoid.
        args: the input, the weights and, where there are any, the biases.
    """
    x, *rest = args
    count = len(rest) // 2 if bias else len(rest)
    biases: Sequence[torch.Tensor | None] = rest[count:] if bias else [None] * count
    for weight, offset in zip(rest[:count], biases, strict=True):
        x = F.linear(x, weight, offset)
        if activation == 1:
            x = F.relu(x)
        elif activation == 2:
            x = torch.sigmoid(x)
    return x


class MLP(nn.Module):
    """Linear layers with an activation after each. Parameters are ``weight_0``, ``bias_0`` and so on, as in Apex.

    Args:
        mlp_sizes: the features of the input and of each layer.
        bias: whether the layers have biases.
        activation: ``"none"``, ``"relu"`` or ``"sigmoid"``.

    Raises:
        TypeError: another activation.
    """

    def __init__(self, mlp_sizes: Sequence[int], bias: bool = True, activation: str = "relu") -> None:
        super().__init__()
        if activation not in _ACTIVATIONS:
            raise TypeError(f"MLP(activation={activation!r}): activation must be one of {', '.join(_ACTIVATIONS)}.")
        self.num_layers = len(mlp_sizes) - 1
        self.mlp_sizes = list(mlp_sizes)
        self.bias = 1 if bias else 0
        self.activation = _ACTIVATIONS[activation]
        for index in range(self.num_layers):
            weight = nn.Parameter(torch.empty(mlp_sizes[index + 1], mlp_sizes[index]))
            self.register_parameter(f"weight_{index}", weight)
            if bias:
                self.register_parameter(f"bias_{index}", nn.Parameter(torch.empty(mlp_sizes[index + 1])))
        self.reset_parameters()

    @property
    def weights(self) -> list[torch.Tensor]:
        """The weights of the layers."""
        return [self.get_parameter(f"weight_{index}") for index in range(self.num_layers)]

    @property
    def biases(self) -> list[torch.Tensor]:
        """The biases of the layers; empty where there are none."""
        return [self.get_parameter(f"bias_{index}") for index in range(self.num_layers if self.bias else 0)]

    def reset_parameters(self) -> None:
        """Draw new weights."""
        for weight in self.weights:
            nn.init.normal_(weight, 0.0, math.sqrt(2.0 / float(weight.size(0) + weight.size(1))))
        for bias in self.biases:
            nn.init.normal_(bias, 0.0, math.sqrt(1.0 / float(bias.size(0))))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the output of the last layer."""
        return mlp_function(self.bias, self.activation, input, *self.weights, *self.biases)

    def extra_repr(self) -> str:
        """Return the sizes, for ``repr``."""
        return f"MLP sizes: {self.mlp_sizes}, Bias={self.bias}, activation={self.activation}"
