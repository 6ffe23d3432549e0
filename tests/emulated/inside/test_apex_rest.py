"""The rest of Apex on the emulated card: as on the CPU, in fp32 and with masters.

Covers: xamp.apex.normalization, xamp.apex.contrib.xentropy, xamp.apex.parallel.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from xamp.apex import amp, optimizers, parallel
from xamp.apex.contrib.xentropy import SoftmaxCrossEntropyLoss
from xamp.apex.normalization import FusedLayerNorm, MixedFusedRMSNorm

NAMES = (
    *("FusedAdam", "FusedLAMB", "FusedSGD", "FusedNovoGrad", "FusedAdagrad", "FusedMixedPrecisionLamb"),
    *("NpuFusedSGD", "NpuFusedAdam", "NpuFusedAdamW", "NpuFusedLamb", "NpuFusedBertAdam"),
)


def train(name: str, level: str, device: str) -> tuple[list[float], list[torch.Tensor]]:
    torch.manual_seed(0)
    layers = (nn.Linear(4, 8), parallel.SyncBatchNorm(8), FusedLayerNorm(8), nn.ReLU(), nn.Linear(8, 3))
    model: Any = nn.Sequential(*layers).to(device)
    optimizer = getattr(optimizers, name)(model.parameters(), lr=0.02)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, loss_scale=128.0, combine_grad=True if level == "O2" else None, verbosity=0
    )
    labels = (torch.arange(16) % 3).to(device)
    losses = []
    for seed in range(6):
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(seed % 3)).to(device)
        optimizer.zero_grad()
        loss = SoftmaxCrossEntropyLoss.apply(model(x).float(), labels, 0.1, -1).mean()  # type: ignore[no-untyped-call]
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, [param.detach().cpu().float() for param in amp.master_params(optimizer)]


@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore:float32 products")
def test_the_card_trains_as_the_cpu(name: str, level: str) -> None:
    mine, theirs = train(name, level, "npu"), train(name, level, "cpu")
    bound = 1e-4 if level == "O0" else 2e-2
    assert mine[0] == pytest.approx(theirs[0], rel=bound)
    assert mine[0][3] < mine[0][0]
    for a, b in zip(mine[1], theirs[1], strict=True):
        torch.testing.assert_close(a, b, rtol=bound, atol=bound)


def test_norms_take_mixed_dtypes() -> None:
    assert MixedFusedRMSNorm(8).to("npu")(torch.randn(2, 8).half().to("npu")).dtype == torch.float32
