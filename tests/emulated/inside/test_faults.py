"""What a user meets on a card and is told the cure of: formats and foreach, states of scalers, ends of refusals.

Covers: backends.npu.backend, backends.npu.torch_npu_features.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import xamp
from xamp.errors import UnsupportedPolicy

npu: Any = torch.get_device_module("npu")
NPU = torch.device("npu", 0)
torch_npu: Any = sys.modules["torch_npu"]
FRACTAL_NZ = 29


@pytest.fixture
def _formats_allowed() -> Iterator[None]:
    before = torch_npu._C._npu_getOption("ALLOW_INTERNAL_FORMAT")
    torch_npu._C._npu_setOption({"ALLOW_INTERNAL_FORMAT": "enable"})
    yield
    torch_npu._C._npu_setOption({"ALLOW_INTERNAL_FORMAT": "disable" if before == b"disable" else "enable"})


def with_formats() -> nn.Linear:
    model = nn.Linear(32, 32).to(NPU)
    model.weight.data = torch.ops.npu.npu_format_cast(model.weight.data, FRACTAL_NZ)
    assert torch.ops.npu.get_npu_format(model.weight) == FRACTAL_NZ
    return model


@pytest.mark.usefixtures("_formats_allowed")
@pytest.mark.parametrize("level", ["O0", "O1"])
def test_private_formats_with_foreach_are_refused_with_the_cure(level: str) -> None:
    model = with_formats()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    with pytest.raises(UnsupportedPolicy, match=r"(?s)private storage format.*allow_internal_format = False.*foreach="):
        xamp.initialize(model, optimizer, level, verbosity=0)
    assert optimizer.param_groups[0]["foreach"] is True
    plain = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    xamp.initialize(model, plain, level, verbosity=0)
    before = model.weight.detach().clone()
    with xamp.scale_loss(model(torch.ones(2, 32, device=NPU)).float().square().mean(), plain) as scaled:
        scaled.backward()
    plain.step()
    assert not torch.equal(before.cpu(), model.weight.detach().cpu())


@pytest.mark.usefixtures("_formats_allowed")
def test_levels_that_cast_take_private_formats_with_foreach() -> None:
    model = with_formats()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    xamp.initialize(model, optimizer, "O2", verbosity=0)
    with xamp.scale_loss(model(torch.ones(2, 32, device=NPU)).float().square().mean(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()


def test_the_state_of_a_scaler_loads_into_torch_npus() -> None:
    """As docs/ascend.md has it: torch_npu's asks for one key more than torch's."""
    scaler = xamp.GradScaler(init_scale=512.0, growth_interval=3)
    theirs = torch_npu.npu.amp.GradScaler(init_scale=8.0)
    with pytest.raises(KeyError, match="dynamic"):
        theirs.load_state_dict(scaler.state_dict())
    theirs.load_state_dict({**scaler.state_dict(), "dynamic": True})
    assert theirs.get_scale() == 512.0
    assert theirs.get_growth_interval() == 3


def test_a_static_state_in_a_dynamic_session_is_told(caplog: pytest.LogCaptureFixture) -> None:
    theirs = torch_npu.npu.amp.GradScaler(init_scale=64.0, dynamic=False)
    theirs.scale(torch.ones((), device=NPU))
    model = nn.Linear(2, 2).to(NPU)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    xamp.initialize(model, optimizer, "O1", verbosity=0)
    with caplog.at_level(logging.WARNING, "xamp"):
        xamp.load_state_dict(theirs.state_dict(), optimizer)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "loss scale of 64.0 is static and was not loaded" in line
    assert "initialize(loss_scale=64.0)" in line
    assert xamp.loss_scale(optimizer) == 65536.0


def test_a_card_has_no_compute_capability_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    xamp.accel._tell_no_capability.cache_clear()
    with caplog.at_level(logging.INFO, "xamp"):
        for _ in range(2):
            with pytest.warns(UserWarning, match="TORCH_NPU_DEVICE_CAPABILITY"):
                assert xamp.accel.get_device_capability() == (0, 0)
    said = [record.getMessage() for record in caplog.records]
    assert [line.startswith("accel.get_device_capability(): npu has no CUDA compute cap") for line in said] == [True]


def test_a_refusal_ends_in_its_own_words_and_a_run_says_nothing_of_padding() -> None:
    code = "import torch; torch.ops.npu.npu_sort_v2(torch.ones(2, 4, device='npu'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    said = (done.stdout + done.stderr).strip()
    assert said.splitlines()[-1] == "NotImplementedError: npu::npu_sort_v2 is not served on an emulated Ascend card"
    assert "padding" not in said
    assert "UNKNOWN" not in said


def test_an_idle_card_is_not_utilized() -> None:
    assert npu.utilization(0) == 0
