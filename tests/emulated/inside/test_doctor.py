"""What ``doctor`` shows of a card: chip, CANN, driver, what is set; and ``exact_fp32``, which sets it for level O0.

Covers: backends.npu.backend, xamp.cli.doctor, xamp.casting.exact_fp32.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import xamp
from xamp.backends.npu import chips
from xamp.cli import main
from xamp.contract import Backend

CARDS_OWN_FP32 = True
npu: Any = torch.get_device_module("npu")
NPU = torch.device("npu", 0)
FAMILIES = {"Ascend910B2": "221 (Atlas A2)", "Ascend910A": "102 (Atlas training series)"}
NARROWED = {
    "Ascend910B2": ["torch.npu.conv.allow_hf32"],
    "Ascend910A": ["ACL_PRECISION_MODE"],
}


def doctor(**variables: str) -> dict[str, Any]:
    """What doctor finds, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "xamp", "doctor", "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
        check=False,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def card(report: dict[str, Any]) -> dict[str, Any]:
    return next(row for row in report["backends"] if row["name"] == "npu")


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return doctor()


def test_chip_cann_and_driver_are_named_and_all_of_it_is_emulated(report: dict[str, Any], chip: chips.Chip) -> None:
    row = card(report)
    assert row["usable"]
    assert row["devices"] == [f"{chip.name} (emulated)"]
    below = {name: value for name, value in row["versions"].items() if not name.startswith("torch")}
    assert below == {
        "CANN": "9.1.0 (emulated)",
        "driver": "25.5.0 (emulated)",
        "chip": f"{FAMILIES[chip.name]} (emulated)",
    }
    assert row["capabilities"]["overflow"] == ("flag" if chip.saturates else "inf")
    assert ("bfloat16" in row["capabilities"]["dtypes"]) == chip.bf16
    assert report["environment"][chips.EMULATED] == chip.name


def test_a_person_is_shown_it_too(report: dict[str, Any], chip: chips.Chip, monkeypatch: pytest.MonkeyPatch) -> None:
    from xamp.cli import doctor as command

    monkeypatch.setattr(command, "examine", lambda limit: report)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["doctor"]) == 0
    text = " ".join(printed.getvalue().split())
    assert f"devices {chip.name} (emulated)" in text
    assert f"CANN 9.1.0 (emulated), driver 25.5.0 (emulated), chip {FAMILIES[chip.name]} (emulated)" in text
    assert ("overflow saturates and raises a flag" if chip.saturates else "overflow gives inf or nan") in text
    assert ("levels O0, O1, O2, O3, O4, O5 fast" if chip.bf16 else "levels O0, O1, O2, O3 fast") in text
    assert "xamp.exact_fp32() in a program sets back what takes digits from float32" in text


def test_what_is_not_known_is_said_to_be(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    utils = sys.modules["torch_npu"].npu.utils
    monkeypatch.setattr(utils, "get_cann_version", lambda module: "" if module == "CANN" else 1 / 0)
    monkeypatch.setattr(npu, "get_device_name", lambda device=None: "Ascend999")
    below = {name: value for name, value in backend.versions().items() if not name.startswith("torch")}
    assert below == {
        "CANN": "unknown (emulated)",
        "driver": "unknown (emulated)",
        "chip": f"{npu.get_soc_version()} (newer than this xamp) (emulated)",
    }


def test_a_saturating_mode_that_was_asked_for_is_shown(chip: chips.Chip) -> None:
    row = card(found := doctor(INF_NAN_MODE_FORCE_DISABLE="1"))
    assert row["capabilities"]["overflow"] == "flag"
    assert found["environment"]["INF_NAN_MODE_FORCE_DISABLE"] == "1"
    shown = [setting["name"] for setting in row["settings"]]
    asked = [] if chip.saturates else ["INF_NAN_MODE_FORCE_DISABLE (environment)"]
    assert shown == [*NARROWED[chip.name], *asked]


# --- exact_fp32


def state() -> tuple[object, ...]:
    mode = sys.modules["torch_npu"]._C._npu_getOption("ACL_PRECISION_MODE")
    return npu.conv.allow_hf32, npu.matmul.allow_hf32, npu.matmul.cube_math_type, mode


@pytest.fixture
def _as_it_was() -> Iterator[None]:
    yield
    npu.conv.allow_hf32, npu.matmul.allow_hf32 = True, False
    kinds = sys.modules["torch_npu"].npu.npu_config._CubeMathType
    if npu.matmul.cube_math_type is not None:
        npu.matmul.cube_math_type = kinds.KEEP_DTYPE
    if find_chip().mixed_fp32:
        npu.set_option({"ACL_PRECISION_MODE": "allow_fp32_to_fp16"})


def find_chip() -> chips.Chip:
    found = chips.find(npu.get_device_name())
    assert found is not None
    return found


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    xamp.initialize(nn.Linear(2, 2).to(NPU), level="O0")
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.usefixtures("_as_it_was")
def test_o0_is_made_exact_and_back(backend: Backend, chip: chips.Chip, caplog: pytest.LogCaptureFixture) -> None:
    (line,) = warned(caplog)
    assert line.endswith(", or xamp.exact_fp32()")
    before = state()
    exact = xamp.exact_fp32()
    assert exact.changed == (*NARROWED[chip.name], *(["torch.npu.conv.allow_hf32"] if chip.mixed_fp32 else []))
    assert state() == (False, False, None, b"must_keep_origin_dtype" if chip.mixed_fp32 else before[3])
    assert backend.precision_settings(NPU) == []
    assert warned(caplog) == []
    exact.close()
    after = state()
    assert after[:3] == before[:3]
    assert after[3] == (b"allow_fp32_to_fp16" if chip.mixed_fp32 else before[3])
    assert warned(caplog) == [line]


@pytest.mark.usefixtures("_as_it_was")
def test_what_the_user_has_set_is_given_back(backend: Backend, chip: chips.Chip) -> None:
    kinds = sys.modules["torch_npu"].npu.npu_config._CubeMathType
    npu.set_option({"ACL_PRECISION_MODE": "must_keep_origin_dtype"})
    npu.matmul.allow_hf32 = True
    npu.matmul.cube_math_type = kinds.USE_HF32
    before = state()
    names = [row.name for row in backend.precision_settings(NPU)]
    assert names == [f"torch.npu.{name}" for name in ("conv.allow_hf32", "matmul.allow_hf32", "matmul.cube_math_type")]
    with xamp.exact_fp32("npu:0") as exact:
        assert list(exact.changed) == names
        assert state() == (False, False, kinds.KEEP_DTYPE, b"must_keep_origin_dtype")
    assert state() == before
