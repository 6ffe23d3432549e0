"""Adapters that meet a model a second time: another Trainer, another plugin.

Covers: xamp.integrations.transformers, xamp.integrations._lightning_fabric.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import xamp
from xamp.errors import StateError
from xamp.integrations._lightning_fabric import FabricRules
from xamp.integrations.transformers import TrainerMixin


class Accelerator:
    """The part of accelerate's that the mixin uses."""

    mixed_precision = "no"
    distributed_type = "NO"

    def backward(self, loss: torch.Tensor, **_: Any) -> None:
        loss.backward()


class Base:
    def __init__(self, model: nn.Module) -> None:
        self.model, self.accelerator = model, Accelerator()

    def create_optimizer(self) -> torch.optim.Optimizer:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        return self.optimizer


class Trainer(TrainerMixin, Base):
    pass


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_second_trainer_of_a_model_trains_it_too(level: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1, bias=False)
    by_hand, x = model.weight.detach().clone(), torch.ones(2, 4)
    for _ in range(2):
        trainer: Any = Trainer(model, xamp_settings={"level": level, "init_scale": 128.0, "verbosity": 0})
        optimizer = trainer.create_optimizer()
        optimizer.zero_grad()
        trainer.accelerator.backward(model(x).sum())
        optimizer.step()
        by_hand -= 0.5 * x.sum(0)
        assert torch.allclose(model.state_dict()["weight"], by_hand, atol=1e-6)
        assert xamp.session(optimizer).last_step is xamp.StepOutcome.APPLIED


def test_a_second_plugin_scales_too_and_another_level_is_refused() -> None:
    model = nn.Linear(4, 1)
    plugins = [FabricRules("O1"), FabricRules("O1")]
    for plugin in plugins:
        plugin.convert_module(model)
        assert plugin.scaler is not None
    with pytest.raises(StateError, match=r"this model is at level O1 already, and the plugin's is O4"):
        FabricRules("O4").convert_module(model)
