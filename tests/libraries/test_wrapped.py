"""accelerate, Lightning Fabric and Lightning around models and optimizers that xamp manages.

Covers: xamp.sessions.foreign, xamp.sessions.session.
"""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from library_loop import LEVELS, Case, Row, by_hand, distance, library, rows
from torch import nn
from torch.optim import SGD

import xamp

accelerate = library("accelerate")
lightning = library("lightning")

X = torch.linspace(-1.0, 1.0, 48).reshape(8, 6)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))


def squares(output: Any, batch: dict[str, Any]) -> torch.Tensor:
    return output.float().square().mean()  # type: ignore[no-any-return]


CASE = Case("accelerate", "", net, lambda: {"input": X}, squares, lambda params: SGD(params, lr=0.1, momentum=0.5))


def compare(model: nn.Module, level: str, name: str, what: str) -> None:
    within = distance(model.state_dict(), by_hand(CASE, level, steps=3)[-1])
    rows.append(Row(name, library(name).__version__, what, level, within, None))
    assert within < 1e-5


@pytest.mark.parametrize("level", LEVELS)
def test_accelerate(level: str) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    bare, optimizer = CASE.start()
    xamp.initialize(bare, optimizer, level, verbosity=0, op_policy="native")
    model, optimizer = accelerator.prepare(bare, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        with xamp.scale_loss(squares(model(X), {}), optimizer) as scaled:
            accelerator.backward(scaled)
        optimizer.step()
    assert xamp.session(optimizer) is not None
    assert xamp.session(accelerator.unwrap_model(model)).stats.applied == 3
    compare(bare, level, "accelerate", "Accelerator")


@pytest.mark.parametrize("level", LEVELS)
def test_fabric(level: str) -> None:
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    bare, optimizer = CASE.start()
    xamp.initialize(bare, optimizer, level, verbosity=0, op_policy="native")
    model, optimizer = fabric.setup(bare, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        with xamp.scale_loss(squares(model(X), {}), optimizer) as scaled:
            fabric.backward(scaled)
        optimizer.step()
    compare(bare, level, "lightning", "Fabric")


@pytest.mark.parametrize("level", LEVELS)
def test_a_fabric_module_given_to_initialize(level: str) -> None:
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    bare, optimizer = CASE.start()
    model, _ = fabric.setup(bare, optimizer)
    xamp.initialize(model, optimizer, level, verbosity=0, op_policy="native")
    for _ in range(3):
        optimizer.zero_grad()
        with xamp.scale_loss(squares(model(X), {}), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    compare(bare, level, "lightning", "Fabric's module")


class Manual(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """Manual optimization, with the two lines of xamp in its step."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model = model
        self.held = [optimizer]

    def configure_optimizers(self) -> Any:
        return self.held[0]

    def training_step(self, batch: Any, index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        with xamp.scale_loss(squares(self.model(batch[0]), {}), optimizer) as scaled:
            self.manual_backward(scaled)
        optimizer.step()


@pytest.mark.parametrize("level", LEVELS)
def test_lightning_with_manual_optimization(level: str, tmp_path: pathlib.Path) -> None:
    bare, optimizer = CASE.start()
    xamp.initialize(bare, optimizer, level, verbosity=0, op_policy="native")
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X), batch_size=8)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(tmp_path),
    )
    trainer.fit(Manual(bare, optimizer), data)
    assert xamp.session(bare).stats.applied == 3
    compare(bare, level, "lightning", "Trainer, manual optimization")
