"""What makes one chip another: number, dtypes, levels, what an overflow does, and a training at each level.

Covers: backends.npu.chips, backends.npu.emulation.arithmetic.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

import xamp
from xamp.contract import Backend
from xamp.errors import UnsupportedPolicy

npu: Any = torch.get_device_module("npu")
NPU = torch.device("npu", 0)
# Number, bfloat16, saturates: as torch_npu's sources have them.
FACTS = {
    "Ascend910A": (102, False, True),
    "Ascend910B": (104, False, True),
    "Ascend310P3": (202, False, True),
    "Ascend910B1": (220, True, False),
    "Ascend910B2": (221, True, False),
    "Ascend310B1": (240, True, True),
    "Ascend910_9391": (250, True, False),
    "Ascend950DT": (260, True, False),
}
NUMBER, BF16, SATURATES = FACTS[npu.get_device_name()]
SATURATES = SATURATES or os.environ.get("INF_NAN_MODE_FORCE_DISABLE") == "1"
LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")[: 6 if BF16 else 4]


def test_it_is_what_it_is_called(backend: Backend) -> None:
    (report,) = (report for report in xamp.available_backends() if report.name == "npu")
    assert report.usable
    assert report.devices == (f"{npu.get_device_name()} (emulated)",)
    assert (npu.get_soc_version(), npu.is_bf16_supported()) == (NUMBER, BF16)
    can = backend.capabilities(NPU)
    assert can.levels == LEVELS
    assert can.dtypes == ("float16", "bfloat16")[: 1 + BF16]
    assert can.overflow == ("flag" if SATURATES else "inf")


def test_an_overflow_is_inf_or_the_largest_number() -> None:
    large = torch.full((1,), 60000.0, dtype=torch.float16, device=NPU)
    assert (large + large).item() == (65504.0 if SATURATES else torch.inf)
    assert (large.float() * 1e38).item() == torch.inf, "what is known of these chips is of float16"


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_a_training_at_every_level(level: str, backend: Backend) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1)).to(NPU)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-4)
    if level not in LEVELS:
        with pytest.raises(UnsupportedPolicy, match="Levels there: O0, O1, O2, O3"):
            xamp.initialize(model, optimizer, level, verbosity=0)
        return
    xamp.initialize(model, optimizer, level, verbosity=0)
    scales, losses, applied = level in ("O1", "O2"), [], []
    x = torch.randn(32, 6).to(NPU)
    for step in range(12):
        optimizer.zero_grad()
        loss = (model(x).float() - x[:, :1]).square().mean()
        with xamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
            if scales and step == 4:
                backend.make_overflow_(next(model.parameters()).grad)  # type: ignore[arg-type]
        optimizer.step()
        losses.append(loss.item())
        applied.append(xamp.session(optimizer).last_step is xamp.StepOutcome.APPLIED)
    assert losses[-1] < 0.9 * losses[0]
    assert applied == [not (scales and step == 4) for step in range(12)]
    assert xamp.loss_scale(optimizer) == (32768.0 if scales else 1.0)
