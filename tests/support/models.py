"""Small models that several tests train, and the digits that they train on."""

from __future__ import annotations

import functools

import torch
from torch import nn


class DigitsNet(nn.Module):
    """A convolutional classifier with batch norm. Images (N, 1, 8, 8) -> logits (N, 10)."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(2 * width)
        self.head = nn.Linear(2 * width * 16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm1(self.conv1(x)))
        x = nn.functional.max_pool2d(torch.relu(self.norm2(self.conv2(x))), 2)
        return self.head(x.flatten(1))  # type: ignore[no-any-return]


class Block(nn.Module):
    """One transformer layer, layer norm first. (N, length, width) -> the same shape."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(n, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(n, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Two layers, with embedding and layer norms. Tokens (N, length) -> logits (N, length, vocabulary)."""

    def __init__(self, vocabulary: int = 64, width: int = 32, heads: int = 4, length: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class Mlp(nn.Sequential):
    """A multilayer perceptron with ``params`` parameter tensors: half as many layers, the last without bias if odd."""

    def __init__(self, params: int, width: int = 8) -> None:
        layers: list[nn.Module] = []
        for left in range(params, 0, -2):
            layers += [nn.Linear(width, width, bias=left > 1), nn.Tanh()]
        super().__init__(*layers[:-1])


@functools.cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Scikit-learn's handwritten digits, 1797, shuffled: images (N, 1, 8, 8) in 0..1, labels (N,). Real data."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    order = torch.randperm(len(bunch.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    return images[order], torch.tensor(bunch.target)[order]
