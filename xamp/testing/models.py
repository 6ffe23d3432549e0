"""Small models of the usual kinds, each with made-up data from which it learns something in a few steps.

A :class:`Task` holds all that a clause needs: the model, its batches, its losses and its optimizers. Data and
weights come from generators on the CPU, so that every device, level and run gets the same ones.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, Adam, Optimizer, SparseAdam
from torch.utils.checkpoint import checkpoint

__all__ = ["TASKS", "Batch", "Phase", "Task", "Transformer", "checkpointed", "parts_of"]

Batch = tuple[torch.Tensor, torch.Tensor]
"""Input and target."""


@dataclasses.dataclass(frozen=True)
class Phase:
    """One backward of a training step, and the optimizers that step after it.

    Attributes:
        loss: From the model and a batch to a scalar.
        optimizers: Indices of the optimizers that step after this backward.
    """

    loss: Callable[[Any, Batch], torch.Tensor]
    optimizers: tuple[int, ...] = (0,)


@dataclasses.dataclass(frozen=True)
class Task:
    """A model, its data, and how it is trained.

    Attributes:
        name: The task's name.
        build: Makes the model, on the CPU in fp32, with weights from torch's generator.
        draw: From a generator to a batch, on the CPU.
        phases: The backwards of one training step, in order.
        tune: From the model to its optimizers.
        tune_sgd: The same with SGD alone, which also works at O3.
        parts: Names of the modules that ``initialize`` is given; ``""`` is the whole model.
        predict: From the model and a batch to the model's output.
        curve: From the model and a batch to the number that training lowers; None: the loss of the first phase.
    """

    name: str
    build: Callable[[], nn.Module]
    draw: Callable[[torch.Generator], Batch]
    phases: tuple[Phase, ...]
    tune: Callable[[Any], list[Optimizer]]
    tune_sgd: Callable[[Any], list[Optimizer]]
    parts: tuple[str, ...] = ("",)
    predict: Callable[[Any, Batch], torch.Tensor] = lambda model, batch: model(batch[0])
    curve: Callable[[Any, Batch], torch.Tensor] | None = None

    def __str__(self) -> str:
        return self.name

    def make(self, device: torch.device, seed: int = 0) -> Any:
        """The model on ``device``, in training mode; the same seed gives the same weights."""
        torch.manual_seed(seed)
        return self.build().to(device)

    def batch(self, step: int, device: torch.device) -> Batch:
        """The batch of a step on ``device``; the same step gives the same batch."""
        x, y = self.draw(torch.Generator().manual_seed(1000 + step))
        return x.to(device), y.to(device)


def parts_of(task: Task, model: nn.Module) -> list[nn.Module]:
    """The modules of ``model`` that ``initialize`` is given for ``task``."""
    return [model.get_submodule(name) for name in task.parts]


def _one_adam(lr: float) -> Callable[[nn.Module], list[Optimizer]]:
    return lambda model: [Adam(model.parameters(), lr=lr)]


def _one_sgd(lr: float) -> Callable[[nn.Module], list[Optimizer]]:
    return lambda model: [SGD(model.parameters(), lr=lr, momentum=0.9)]


def _classify(model: Any, batch: Batch) -> torch.Tensor:
    logits = model(batch[0])
    return F.cross_entropy(logits.flatten(0, -2), batch[1].flatten())


def _regress(model: Any, batch: Batch) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


# ---------------------------------------------------------------- images: convolutions and batch norm

_SIDE, _SORTS = 8, 4


class ConvNet(nn.Module):
    """Two convolutions with batch norm. Images (N, 1, 8, 8) -> logits (N, 4)."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(2 * width)
        self.head = nn.Linear(2 * width * (_SIDE // 2) ** 2, _SORTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        x = F.avg_pool2d(F.silu(self.norm1(self.conv1(x))), 2)
        x = F.silu(self.norm2(self.conv2(x)))
        return self.head(x.flatten(1))  # type: ignore[no-any-return]


def _images(generator: torch.Generator) -> Batch:
    """A batch of images: each is one of four fixed patterns plus noise of the same size."""
    patterns = torch.randn(_SORTS, 1, _SIDE, _SIDE, generator=torch.Generator().manual_seed(1))
    labels = torch.randint(_SORTS, (32,), generator=generator)
    return patterns[labels] + torch.randn(32, 1, _SIDE, _SIDE, generator=generator), labels


# ---------------------------------------------------------------- text: embedding, attention, layer norm

_WORDS, _LENGTH = 16, 12


class Block(nn.Module):
    """One transformer layer, layer norm first. (N, length, width) -> the same shape.

    Args:
        width: Features of a word.
        heads: Attention heads.
        fused: Use one operator for attention; else matrix products and a softmax.
    """

    def __init__(self, width: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.heads = heads
        self.fused = fused
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        n, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(n, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        if self.fused:
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            scores = (q @ k.transpose(-2, -1) * (width // self.heads) ** -0.5).masked_fill(later, float("-inf"))
            attended = torch.softmax(scores, -1) @ v
        x = x + self.out(attended.transpose(1, 2).reshape(n, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Two transformer layers, with embedding and layer norms. Tokens (N, 12) -> logits (N, 12, 16).

    Args:
        reentrant: Recompute the layers in backward, with ``use_reentrant`` of this value; None: keep everything.
        dropout: Probability of dropout after each layer.
    """

    def __init__(self, reentrant: bool | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        width = 32
        self.reentrant = reentrant
        self.dropout = dropout
        self.embedding = nn.Embedding(_WORDS, width)
        self.position = nn.Parameter(torch.randn(_LENGTH, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, 4, fused) for fused in (True, False))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, _WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """See the class."""
        x = self.embedding(tokens) + self.position
        for block in self.blocks:
            run = functools.partial(self._layer, block)
            x = run(x) if self.reentrant is None else checkpoint(run, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))  # type: ignore[no-any-return]

    def _layer(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(block(x), self.dropout, self.training) if self.dropout else block(x)


def _series(generator: torch.Generator) -> Batch:
    """Sequences of words, each with its own stride: two words determine the next one."""
    start = torch.randint(_WORDS, (16, 1), generator=generator)
    stride = torch.randint(1, 4, (16, 1), generator=generator)
    words = (start + stride * torch.arange(_LENGTH + 1)) % _WORDS
    return words[:, :-1], words[:, 1:]


# ---------------------------------------------------------------- series: recurrent layers


class Recurrent(nn.Module):
    """An LSTM and a GRU. (N, time, 4) -> (N, time, 1)."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, width, batch_first=True)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return self.head(self.gru(self.lstm(x)[0])[0])  # type: ignore[no-any-return]


def _sums(generator: torch.Generator) -> Batch:
    """Series of four channels; the target is half the running sum of the first channel."""
    x = torch.randn(16, 6, 4, generator=generator)
    return x, x[..., :1].cumsum(1) / 2


# ---------------------------------------------------------------- two networks against each other


class Adversaries(nn.Module):
    """A generator of points in the plane and its critic, each with its own optimizer."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, width), nn.SiLU(), nn.Linear(width, 2))
        self.critic = nn.Sequential(nn.Linear(2, width), nn.SiLU(), nn.Linear(width, 1))


def _critic_loss(model: Any, batch: Batch) -> torch.Tensor:
    made = model.generator(batch[0]).detach()
    loss: torch.Tensor = (model.critic(batch[1]) - 1).square().mean() + model.critic(made).square().mean()
    return loss


def _generator_loss(model: Any, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = (model.critic(model.generator(batch[0])) - 1).square().mean()
    return loss


def _apart(model: Any, batch: Batch) -> torch.Tensor:
    """The distance from the mean of the generated points to the mean of the real ones."""
    gap: torch.Tensor = (model.generator(batch[0]).mean(0) - batch[1].mean(0)).norm()
    return gap


def _points(generator: torch.Generator) -> Batch:
    real = torch.randn(64, 2, generator=generator) / 4 + torch.tensor([1.0, -1.0])
    return torch.randn(64, 4, generator=generator), real


def _two(make: Callable[[Any], Optimizer]) -> Callable[[Any], list[Optimizer]]:
    return lambda model: [make(model.critic.parameters()), make(model.generator.parameters())]


# ---------------------------------------------------------------- sparse gradients


class Bag(nn.Module):
    """The mean of an embedding with sparse gradients, and a linear layer. Words (N, 6) -> logits (N, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 16, sparse=True)
        self.head = nn.Linear(16, _SORTS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return self.head(self.table(words).mean(1))  # type: ignore[no-any-return]


def _bags(generator: torch.Generator) -> Batch:
    """Bags of words; two words in three are among the sixteen that belong to the label."""
    labels = torch.randint(_SORTS, (32,), generator=generator)
    own = labels[:, None] * 16 + torch.randint(16, (32, 6), generator=generator)
    any_word = torch.randint(64, (32, 6), generator=generator)
    return torch.where(torch.rand(32, 6, generator=generator) < 0.67, own, any_word), labels


def _sparse_and_dense(model: Any) -> list[Optimizer]:
    return [SparseAdam(model.table.parameters(), lr=0.05), Adam(model.head.parameters(), lr=0.05)]


def _sparse_sgd(model: Any) -> list[Optimizer]:
    return [SGD(model.table.parameters(), lr=2.0), SGD(model.head.parameters(), lr=0.5)]


# ---------------------------------------------------------------- the tasks

TASKS = {
    task.name: task
    for task in (
        Task("convolutions", ConvNet, _images, (Phase(_classify),), _one_adam(3e-3), _one_sgd(0.02)),
        Task("transformer", Transformer, _series, (Phase(_classify),), _one_adam(5e-3), _one_sgd(0.05)),
        Task("recurrent", Recurrent, _sums, (Phase(_regress),), _one_adam(1e-2), _one_sgd(0.1)),
        Task(
            "adversaries",
            Adversaries,
            _points,
            (Phase(_critic_loss, (0,)), Phase(_generator_loss, (1,))),
            _two(lambda params: Adam(params, lr=2e-2)),
            _two(lambda params: SGD(params, lr=0.1)),
            parts=("generator", "critic"),
            predict=lambda model, batch: model.generator(batch[0]),
            curve=_apart,
        ),
        Task("sparse", Bag, _bags, (Phase(_classify, (0, 1)),), _sparse_and_dense, _sparse_sgd),
    )
}


def checkpointed(reentrant: bool | None, dropout: float = 0.1) -> Task:
    """The transformer with dropout. Backward recomputes its layers; ``reentrant=None``: it does not."""
    build = functools.partial(Transformer, reentrant, dropout)
    return dataclasses.replace(TASKS["transformer"], name=f"checkpoint-{reentrant}", build=build)
