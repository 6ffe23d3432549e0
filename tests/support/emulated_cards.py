"""Runs test files and commands on an emulated card, in processes of their own, and counts what they report."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

TORCH = "2.13"
"""The torch that the emulation is proved with: another one brings another torch-npu."""

CHIPS = ("Ascend910B2", "Ascend910A")
INSIDE = Path(__file__).parent.parent / "emulated" / "inside"
counts: dict[str, Counter[str]] = {}
"""What was passed, failed and so on, by chip."""

_LAST_LINES = 60
# What torch_npu warns of by itself: its deepcopy of a tensor asks torch's old storage for its device; it has private
# formats of tensors, and does not use them unless told to.
_WARNED = (
    *("-W", "ignore:TypedStorage is deprecated:UserWarning"),
    *("-W", "ignore:Cannot create tensor with internal format:UserWarning"),
)
_COUNTED = re.compile(r"(\d+) (passed|failed|skipped|xfailed|xpassed|errors?)\b")


def need_emulation() -> None:
    """Skip where there is nothing to prove: with another torch, or one beside which torch_npu cannot be."""
    if not torch.__version__.startswith(TORCH) or torch.version.cuda or torch.version.hip:
        pytest.skip(f"the emulation is proved with a CPU build of torch {TORCH}, and this is {torch.__version__}")


def emulate(
    chip: str, *command: str | Path, devices: int = 1, timeout: float = 600, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run ``xamp emulate ascend:chip -- command``."""
    need_emulation()
    words = [sys.executable, "-m", "xamp", "emulate", f"ascend:{chip}", "--devices", str(devices), "--"]
    settings = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        [*words, *map(str, command)], capture_output=True, text=True, timeout=timeout, env=settings, check=False
    )


def emulated_pytest(chip: str, *arguments: str | Path, devices: int = 1, timeout: float = 600) -> str:
    """Run pytest there; what it said, and fail with the end of that where a test failed or none ran."""
    words = ["-q", "-p", "no:cacheprovider", "--tb=short", *_WARNED, *arguments]
    done = emulate(chip, "python", "-m", "pytest", *words, devices=devices, timeout=timeout)
    found = {
        name.removesuffix("s") if name == "errors" else name: int(n) for n, name in _COUNTED.findall(last(done, 1))
    }
    counts.setdefault(chip, Counter()).update(found)
    assert done.returncode == 0, f"on the emulated {chip}:\n{last(done)}"
    assert found.get("passed"), f"nothing was tested on the emulated {chip}:\n{last(done)}"
    return done.stdout


def last(done: subprocess.CompletedProcess[str], lines: int = _LAST_LINES) -> str:
    """The end of what a process wrote; of its errors too where it wrote little else."""
    said = done.stdout.strip().splitlines()
    if len(said) < lines:
        said = done.stderr.strip().splitlines()[-lines:] + said
    said = [line for line in said if "Warning: CAUTION: The operator" not in line][-lines:]
    return "\n".join(said)
