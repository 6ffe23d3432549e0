"""What has nothing to do with xamp computes the same bits before and after the portable policy is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

WORKER = Path(__file__).resolve().parents[2] / "support" / "foreign_code.py"


def test_foreign_code_is_bit_identical_also_beside_a_region_in_another_thread() -> None:
    done = subprocess.run([sys.executable, str(WORKER)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    ran, changed, beside = map(int, done.stdout.split())
    assert ran >= 60  # computations in bfloat16, each in three states of autocast
    assert changed >= 20  # what a region makes of the same ones
    assert beside == 1000
