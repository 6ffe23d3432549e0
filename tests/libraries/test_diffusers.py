"""diffusers: a UNet and an autoencoder, and its average of weights.

Covers: xamp.averages, xamp.casting.export, xamp.casting.forward.
"""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from library_loop import LEVELS, Case, by_hand, check, distance, library
from torch import nn
from torch.nn.functional import mse_loss

import xamp

diffusers = library("diffusers")
training = library("diffusers.training_utils")


def unet() -> nn.Module:
    made: nn.Module = diffusers.UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(16, 32),
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
    )
    return made


def vae() -> nn.Module:
    made: nn.Module = diffusers.AutoencoderKL(
        in_channels=1,
        out_channels=1,
        latent_channels=2,
        block_out_channels=(16,),
        norm_num_groups=8,
        down_block_types=("DownEncoderBlock2D",),
        up_block_types=("UpDecoderBlock2D",),
        layers_per_block=1,
    )
    return made


def loss(output: Any, batch: dict[str, Any]) -> torch.Tensor:
    return mse_loss(output.sample.float(), batch["sample"])


CASES = [
    Case(
        "diffusers",
        "UNet2DModel",
        unet,
        lambda: {"sample": torch.randn(2, 1, 8, 8), "timestep": torch.tensor([3, 700])},
        loss,
    ),
    Case("diffusers", "AutoencoderKL", vae, lambda: {"sample": torch.randn(2, 1, 8, 8)}, loss),
]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_trains_as_by_hand_and_resumes(case: Case, level: str) -> None:
    check(case, level)


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_the_average_of_masters(level: str) -> None:
    case = CASES[0]
    model, optimizer = case.start()
    xamp.initialize(model, optimizer, level, verbosity=0, op_policy="native")
    average = training.EMAModel(list(xamp.master_params(optimizer)), decay=0.5)
    decays = []
    for step in range(3):
        batch = case.inputs(step)
        optimizer.zero_grad()
        with xamp.scale_loss(case.loss(model(**batch), batch), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        average.step(list(xamp.master_params(optimizer)))
        decays.append(average.cur_decay_value)
    start, _ = case.start()
    expected = [p.detach().clone() for p in start.parameters()]
    for decay, weights in zip(decays, by_hand(case, level, steps=3), strict=True):
        expected = [decay * old + (1 - decay) * weights[n] for old, n in zip(expected, weights, strict=True)]
    found = dict(enumerate(average.shadow_params))
    assert distance(found, dict(enumerate(expected))) < 1e-5


@pytest.mark.parametrize("level", LEVELS)
def test_files_come_back_exact(level: str, tmp_path: pathlib.Path) -> None:
    model: Any = unet()
    xamp.initialize(model, level=level, verbosity=0)
    model.save_pretrained(tmp_path)
    again = diffusers.UNet2DModel.from_pretrained(tmp_path)
    mine = model.state_dict()
    assert all(torch.equal(value, mine[key]) for key, value in again.state_dict().items())
