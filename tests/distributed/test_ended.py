"""A rank that is killed and one that raises, under torchrun: the others end long before the timeout of 10 minutes.

Covers: xamp.distributed.wrappers, xamp.scaling.fellows.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).parent / "ended_worker.py"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("killed", r"Signal 9 \(SIGKILL\)"),
        pytest.param("raised", "ValueError: a bad batch", marks=pytest.mark.thorough),
    ],
)
def test_the_others_end_and_the_rank_is_named(how: str, said: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(WORKER), how]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
    assert done.returncode != 0
    assert re.search(said, done.stderr), done.stderr[-3000:]
    root = done.stderr.partition("Root Cause")[2]
    assert re.search(r"rank +: 1 ", root), done.stderr[-3000:]
