"""The backend npu over the real torch_npu: what it declares of each chip, and what it refuses.

Covers: backends.npu.backend, backends.npu.chips.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import xamp
from xamp.backends.npu import chips
from xamp.contract import Backend
from xamp.errors import UnsupportedPolicy

npu: Any = torch.get_device_module("npu")
CARDS_OWN_FP32 = True
NPU = torch.device("npu", 0)
A2, OLD = "Ascend910B2", "Ascend910A"
FP16_LEVELS = ("O0", "O1", "O2", "O3")


def pair() -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(4, 3).to(NPU)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_the_card_is_found_and_called_emulated(backend: Backend, chip: chips.Chip) -> None:
    assert list(backend.devices()) == [f"{chip.name} (emulated)"]
    assert xamp.device() == torch.device("npu")
    assert xamp.device_type() == "npu"
    assert xamp.distributed_backend() == "hccl"
    assert npu.get_soc_version() == chip.number


def test_levels_and_dtypes_are_those_of_the_chip(backend: Backend, chip: chips.Chip) -> None:
    can = backend.capabilities(NPU)
    assert can.levels == ((*FP16_LEVELS, "O4", "O5") if chip.name == A2 else FP16_LEVELS)
    assert can.dtypes == (("float16", "bfloat16") if chip.name == A2 else ("float16",))
    assert can.overflow == ("inf" if chip.name == A2 else "flag")
    assert can.fused_optimizers == ("Adam",), "AdamW ignores found_inf, SGD wants momentum"
    reason = "" if chip.bf16 else " bfloat16 is not there because the device has no arithmetic of its own for it."
    assert can.why_not("bfloat16") == reason


def test_auto_is_bf16_where_the_chip_has_it(chip: chips.Chip) -> None:
    model, optimizer = pair()
    xamp.initialize(model, optimizer, verbosity=0)
    assert xamp.session(model).policy.level == ("O4" if chip.name == A2 else "O1")


@pytest.mark.parametrize("asked", [{"level": "O4"}, {"level": "O5"}, {"level": "O1", "dtype": "bf16"}])
def test_bf16_is_run_or_refused_with_the_levels_there_are(asked: dict[str, Any], chip: chips.Chip) -> None:
    model, optimizer = pair()
    if chip.bf16:
        xamp.initialize(model, optimizer, verbosity=0, **asked)
        assert xamp.session(model).policy.dtype == torch.bfloat16
        return
    there = "Lower dtypes there: float16" if "dtype" in asked else "Levels there: O0, O1, O2, O3"
    with pytest.raises(UnsupportedPolicy, match=there):
        xamp.initialize(model, optimizer, verbosity=0, **asked)
    assert model.weight.dtype == torch.float32


def test_what_torch_npu_says_of_the_chip_is_what_the_table_says(chip: chips.Chip) -> None:
    utils = sys.modules["torch_npu"].npu.utils
    assert npu.is_bf16_supported() == chip.bf16
    assert utils.is_support_inf_nan() == (not chip.saturates)


def test_doctor_names_chip_versions_and_what_takes_digits_from_fp32(chip: chips.Chip) -> None:
    command = [sys.executable, "-m", "xamp", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)
    npu = next(row for row in report["backends"] if row["name"] == "npu")
    assert npu["usable"]
    assert npu["devices"] == [f"{chip.name} (emulated)"]
    assert npu["versions"]["torch"] == torch.__version__
    assert npu["versions"]["torch_npu"] == sys.modules["torch_npu"].__version__
    told = [(row["severity"], row["text"][:63]) for row in npu["findings"]]
    gone = "bfloat16 is not declared, and so neither are O4 and O5: the dev"
    assert told == ([] if chip.bf16 else [("warning", gone)])
    (setting,) = npu["settings"]
    if chip.mixed_fp32:
        assert (setting["name"], setting["value"]) == ("ACL_PRECISION_MODE", "allow_fp32_to_fp16")
        assert setting["severity"] == "warning"
    else:
        assert (setting["name"], setting["value"]) == ("torch.npu.conv.allow_hf32", "True")
        assert setting["undo"] == "torch.npu.conv.allow_hf32 = False"
        assert setting["severity"] == "note", "it is torch_npu's default"
    assert report["chosen"]["device"] == "npu"
    assert report["recommended"]["level"] == ("O4" if chip.bf16 else "O1")


def said_at(level: str, caplog: pytest.LogCaptureFixture, verbosity: int = 1) -> list[str]:
    caplog.clear()
    model, optimizer = pair()
    with caplog.at_level(logging.WARNING, "xamp"):
        xamp.initialize(model, optimizer, level=level, verbosity=verbosity)
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_o0_warns_of_what_takes_digits_from_fp32(chip: chips.Chip, caplog: pytest.LogCaptureFixture) -> None:
    (line,) = said_at("O0", caplog)
    if chip.mixed_fp32:
        assert line.startswith("O0 on npu:0: ACL_PRECISION_MODE is allow_fp32_to_fp16")
        assert 'torch.npu.set_option({"ACL_PRECISION_MODE": "must_keep_origin_dtype"})' in line
    else:
        assert line.startswith("O0 on npu:0: torch.npu.conv.allow_hf32 is True")
        assert "torch.npu.conv.allow_hf32 = False" in line
    assert said_at("fp32", caplog) == [line]
    assert said_at("O0", caplog, verbosity=0) == []
    assert said_at("O1", caplog) == []


def test_o0_is_quiet_once_what_it_named_is_done(caplog: pytest.LogCaptureFixture) -> None:
    undo = 'torch.npu.set_option({"ACL_PRECISION_MODE": "must_keep_origin_dtype"}); torch.npu.conv.allow_hf32 = False'
    train = "model = torch.nn.Linear(4, 3).npu(); xamp.initialize(model, None, 'O0')"
    command = [sys.executable, "-c", f"import torch, xamp; {undo}; {train}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "xamp: level O0" in done.stderr
    assert "O0 on npu" not in done.stderr


def test_a_switch_of_the_user_is_warned_of_too(chip: chips.Chip, caplog: pytest.LogCaptureFixture) -> None:
    if chip.mixed_fp32:
        pytest.skip("products run in fp16 there already")
    npu.matmul.allow_hf32 = True
    try:
        lines = said_at("O0", caplog)
    finally:
        npu.matmul.allow_hf32 = False
    assert [line.split(" is ")[0] for line in lines] == [
        "O0 on npu:0: torch.npu.conv.allow_hf32",
        "O0 on npu:0: torch.npu.matmul.allow_hf32",
    ]


def test_nothing_is_said_of_a_cpu(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(4, 3)
    with caplog.at_level(logging.WARNING, "xamp"):
        xamp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), level="O0")
    assert caplog.records == []
