"""A script in the shape of Apex's ImageNet example on an emulated card: O1, O3 and ``--resume``, against the CPU.

Covers: xamp.apex.amp, backends.npu.emulation.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from emulated_cards import need_emulation

from xamp.registry.device_in_use import DEVICE_VARIABLE

SCRIPT = Path(__file__).parents[1] / "data" / "apex" / "imagenet_shape.py.txt"


@pytest.fixture(autouse=True)
def _is_there() -> None:
    need_emulation()


def weights(folder: Path, device: str, *arguments: str) -> tuple[str, float]:
    """Run the script; return the epochs that it trained and the sum of its weights."""
    script = shutil.copy(SCRIPT, folder / "main_amp.py")
    run = [sys.executable, "-m", "xamp", "run", script, *arguments]
    emulated = [sys.executable, "-m", "xamp", "emulate", "ascend:Ascend910B2", "--", *run]
    command = emulated if device == "npu" else run
    environment = {**os.environ, DEVICE_VARIABLE: device}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = re.search(rf"epochs (\S+) on {device}, weights (\S+)", done.stdout)
    assert found is not None, done.stdout
    return found[1], float(found[2])


@pytest.mark.thorough
@pytest.mark.parametrize("level", ["O1", "O3"])
def test_imagenet_trains_and_resumes_on_a_card_as_on_a_cpu(level: str, tmp_path: Path) -> None:
    options = ("--opt-level", level)
    epochs, whole = weights(tmp_path, "npu", *options, "--epochs", "2")
    assert epochs == "0..2"
    assert weights(tmp_path, "cpu", *options, "--epochs", "2")[1] == pytest.approx(whole, rel=1e-3)
    resumed = (*options, "--resume", str(tmp_path / "checkpoint.pt"))
    weights(tmp_path, "npu", *resumed, "--epochs", "1")
    epochs, found = weights(tmp_path, "npu", *resumed, "--epochs", "2")
    assert epochs == "1..2"
    assert found == whole
