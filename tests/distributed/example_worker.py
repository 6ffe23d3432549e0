"""examples/distributed/train.py on a CPU, whatever else the machine has: what each process of test_example.py runs."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "distributed" / "train.py"

if __name__ == "__main__":
    os.environ["XAMP_DEVICE"] = "cpu"
    runpy.run_path(str(SCRIPT), run_name="__main__")
    sys.stdout.flush()
    os._exit(0)  # see ddp_worker.py
