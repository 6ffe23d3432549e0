"""Real signals at any moment of a training run: no session is lost, and autocast is left on no more than by torch.

Covers: xamp.sessions.session, xamp.casting.outside, xamp.scaling.writing_mark.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from site_packages import plain_environment

LEVELS = ("O1", "O2", "O5")


def storm(seed: int, signals: int, folder: Path) -> dict[str, Any]:
    """What ``signals`` signals did at each level, and to a loop of torch's own."""
    command = [sys.executable, str(Path(__file__).with_name("signal_worker.py")), str(seed), str(signals)]
    environment = plain_environment(OMP_NUM_THREADS="1")
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(found)
    return found


@pytest.mark.sample
def test_a_short_storm(tmp_path: Path) -> None:
    found = storm(1, 80, tmp_path)
    assert found["signals"] >= 320
    assert [found[level]["dead"] for level in LEVELS] == [0, 0, 0]
    assert sum(found[level]["autocast"] for level in LEVELS) <= 2


@pytest.mark.thorough
def test_a_storm_of_5000_signals(tmp_path: Path) -> None:
    found = storm(2, 1700, tmp_path)
    assert found["signals"] >= 6800
    assert [found[level]["dead"] for level in LEVELS] == [0, 0, 0]
    for level in LEVELS:
        assert found[level]["autocast"] <= max(found["bare"]["autocast"], 2)
