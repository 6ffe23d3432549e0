"""Small models with named layers in which tests plant a fault, and a loop that trains them and may record a trace."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import xamp


class Slot(nn.Module):
    """Does nothing, until a test plants a function in it."""

    def __init__(self) -> None:
        super().__init__()
        self.planted: Callable[[torch.Tensor], torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.planted is None else self.planted(x)


class Mlp(nn.Module):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), Slot()) for _ in range(depth))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        found: torch.Tensor = self.head(x)
        return found

    def batch(self) -> torch.Tensor:
        return torch.randn(8, 16)


class Conv(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        blocks = [
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), Slot(), nn.ReLU()) for _ in range(depth)
        ]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.blocks(x).mean((2, 3)))
        return found

    def batch(self) -> torch.Tensor:
        return torch.randn(4, 4, 6, 6)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.slot = Slot()
        self.out = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) / 4
        mask = torch.full((x.shape[1], x.shape[1]), float("-inf"), dtype=scores.dtype).triu(1)
        found: torch.Tensor = x + self.out(self.slot((scores + mask).softmax(-1) @ v))
        return found


class Transformer(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        found: torch.Tensor = self.head(x)
        return found

    def batch(self) -> torch.Tensor:
        return torch.randint(11, (2, 5))


MODELS: dict[str, Callable[[], Any]] = {"mlp": Mlp, "conv": Conv, "transformer": Transformer}


def slots(model: nn.Module) -> list[str]:
    """The names of the places for faults."""
    return [name for name, module in model.named_modules() if isinstance(module, Slot)]


def made(kind: str, seed: int) -> tuple[Any, str]:
    """A model, and the name of one of its slots."""
    torch.manual_seed(seed)
    model = MODELS[kind]()
    return model, random.Random(seed).choice(slots(model))


def plant(model: nn.Module, slot: str, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    module = model.get_submodule(slot)
    assert isinstance(module, Slot)
    module.planted = function


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output.float(), torch.ones_like(output).float() * 0.5)


def optimizer_of(model: nn.Module, lr: float = 0.01, scaled: str = "", by: float = 1.0) -> torch.optim.Optimizer:
    """SGD with a group for each module; the learning rate of module ``scaled`` is wrong by a factor."""
    groups = [
        {"params": list(module._parameters.values()), "lr": lr * (by if name == scaled else 1.0)}
        for name, module in model.named_modules()
        if module._parameters
    ]
    return torch.optim.SGD(groups, lr=lr)


def train(
    model: Any,
    optimizer: Any,
    level: str,
    steps: int,
    *,
    seed: int = 0,
    path: Any = None,
    at: Any = None,
    **settings: Any,
) -> None:
    """Train; record a trace into ``path``. ``at`` is called with the number of each step before it."""
    xamp.initialize(model, optimizer, level=level, verbosity=0, **settings)
    torch.manual_seed(1000 + seed)
    recorder = None if path is None else xamp.trace(path, model, optimizer, every=1)
    for step in range(steps):
        if at is not None:
            at(step)
        optimizer.zero_grad()
        loss = loss_of(model(model.batch()))
        with xamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        if recorder is not None:
            recorder.step(loss)
    if recorder is not None:
        recorder.close()
