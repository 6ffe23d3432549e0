"""The models that :mod:`benchmarks.models` trains, written out here so that no library of models is needed.

ResNet-50, the GPT-2 of 124 million parameters and BERT-base (with its head for masked words) have the parameters of the
published models. Data are random: only the time counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Bottleneck(nn.Module):
    """Three convolutions and a shortcut. The second one strides."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inside != 4 * width:
            convolution = nn.Conv2d(inside, 4 * width, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def resnet50() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    inside = 64
    for width, blocks, first in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            layers.append(Bottleneck(inside, width, 1 if block else first))
            inside = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 1000))


class Layer(nn.Module):
    """Attention and two linear layers; norms before them and causal as in GPT-2, or after them as in BERT."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attend(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = (part.view(n, length, self.heads, -1).transpose(1, 2) for part in self.into(x).chunk(3, -1))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(found.transpose(1, 2).reshape(n, length, width))  # type: ignore[no-any-return]

    def expand(self, x: Tensor) -> Tensor:
        return self.narrow(F.gelu(self.wide(x)))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        if self.causal:
            x = x + self.attend(self.first(x))
            return x + self.expand(self.second(x))
        x = self.first(x + self.attend(x))
        return self.second(x + self.expand(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """GPT-2; the head has the weight of the embedding."""

    def __init__(self, words: int = 50257, places: int = 1024, width: int = 768, depth: int = 12) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(places, width)
        self.layers = nn.Sequential(*(Layer(width, width // 64, causal=True) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)

    def forward(self, text: Tensor) -> Tensor:
        x = self.words(text) + self.places.weight[: text.shape[1]]
        return F.linear(self.norm(self.layers(x)), self.words.weight)


class BERT(nn.Module):
    """BERT with its head for masked words, which has the weight of the embedding."""

    def __init__(self, words: int = 30522, places: int = 512, width: int = 768, depth: int = 12) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(places, width)
        self.kinds, self.norm = nn.Embedding(2, width), nn.LayerNorm(width)
        self.layers = nn.Sequential(*(Layer(width, width // 64, causal=False) for _ in range(depth)))
        self.dense, self.last = nn.Linear(width, width), nn.LayerNorm(width)
        self.bias = nn.Parameter(torch.zeros(words))

    def forward(self, text: Tensor) -> Tensor:
        x = self.words(text) + self.places.weight[: text.shape[1]] + self.kinds.weight[0]
        x = self.layers(self.norm(x))
        return F.linear(self.last(F.gelu(self.dense(x))), self.words.weight, self.bias)


def mlp() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.ReLU())), nn.Linear(64, 10))


def small_convolutions() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
    )


def small_gpt() -> nn.Module:
    return GPT(words=64, places=32, width=64, depth=2)


def pictures(device: torch.device, count: int, side: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 3, side, side, device=device), torch.randint(10, (count,), device=device)


def rows(device: torch.device, count: int, width: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, width, device=device), torch.randint(10, (count,), device=device)


def texts(device: torch.device, count: int, length: int) -> tuple[Tensor, Tensor]:
    return torch.randint(64, (count, length), device=device), torch.randint(64, (count * length,), device=device)


Size = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Net:
    """A model, its data, and how much of it a step sees.

    Attributes:
        make: makes the model.
        data: makes inputs and targets, given the device and one of the sizes.
        unit: what is counted a second: "images", "tokens" or "rows".
        adam: whether it is trained with AdamW; else with SGD and momentum.
        cpu: on a CPU: numbers of samples, and their side, length or width; the largest first. Most CPUs multiply slowly
            in 16 bits.
        accelerator: the same on other devices, where one is enough.
        large: left out with ``--quick``.
    """

    make: Callable[[], nn.Module]
    data: Callable[[torch.device, int, int], tuple[Tensor, Tensor]]
    unit: str
    adam: bool
    cpu: tuple[Size, ...]
    accelerator: Size
    large: bool = False

    def sizes(self, device: torch.device) -> tuple[Size, ...]:
        """The sizes to choose from, the largest first."""
        return self.cpu if device.type == "cpu" else (self.accelerator,)

    def units(self, size: Size) -> int:
        """How many units a step sees."""
        return size[0] * size[1] if self.unit == "tokens" else size[0]


NETS = {
    "MLP": Net(mlp, rows, "rows", True, ((16, 64),), (64, 64)),
    "small convolutions": Net(small_convolutions, pictures, "images", False, ((4, 16),), (64, 32)),
    "small GPT": Net(small_gpt, texts, "tokens", True, ((2, 32),), (16, 32)),
    "ResNet-50": Net(resnet50, pictures, "images", False, ((2, 224), (1, 128), (1, 64), (2, 32)), (128, 224), True),
    "GPT, 124M": Net(GPT, texts, "tokens", True, ((1, 64), (1, 16), (1, 4)), (8, 1024), True),
    "BERT-base": Net(BERT, texts, "tokens", True, ((1, 64), (1, 16)), (16, 512), True),
}


def optimizer_for(net: Net, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer, in its fused implementation where the device has one; so all ways have the same form."""
    params: Any = list(model.parameters())

    def make(**form: Any) -> torch.optim.Optimizer:
        if net.adam:
            return torch.optim.AdamW(params, lr=1e-5, **form)
        return torch.optim.SGD(params, lr=1e-4, momentum=0.9, **form)

    try:
        return make(fused=True)
    except RuntimeError:  # torch knows no fused kernel for this device
        return make(foreach=True)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """The loss, in fp32."""
    return F.cross_entropy(output.flatten(0, -2), target)
