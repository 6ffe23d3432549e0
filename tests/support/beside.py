"""What tests of adapters share: a net, its batches, and the training loop with xamp written out as a reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

import xamp

__all__ = ["LEVELS", "Net", "batches", "by_hand", "loader", "loss_of", "net", "same", "sgd", "state"]

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
DATA = (torch.randn(24, 6, generator=torch.Generator().manual_seed(5)), torch.linspace(-3, 3, 24))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.last(torch.tanh(self.norm(self.first(x))))
        return made.squeeze(-1)


def net(seed: int = 3) -> Net:
    torch.manual_seed(seed)
    return Net()


def sgd(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.1, momentum=0.5)


def loader() -> Any:
    """Six batches of four, always in one order."""
    return DataLoader(TensorDataset(*DATA), batch_size=4)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(DATA[0].split(4), DATA[1].split(4), strict=True))


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    """Whether two states of models are equal bit for bit."""
    return found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)


def by_hand(
    level: str,
    given: Sequence[tuple[torch.Tensor, torch.Tensor]],
    *,
    clip: float | None = None,
    accumulate: int = 1,
    **settings: Any,
) -> tuple[Net, Any]:
    """Train as the README says, with the loop written out; return the model and the optimizer."""
    model = net()
    optimizer: Any = sgd(model)
    xamp.initialize(model, optimizer, level, verbosity=0, **settings)
    for index, (x, y) in enumerate(given):
        if index % accumulate == 0:
            optimizer.zero_grad()
        loss = loss_of(model(x), y) / accumulate
        with xamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        if index % accumulate == accumulate - 1:
            if clip is not None:
                xamp.clip_grad_norm_(optimizer, clip)
            optimizer.step()
    return model, optimizer
