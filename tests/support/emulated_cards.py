"""Runs test files and commands on an emulated card, in new processes, and counts the test results."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import measuring
import pytest
import torch

from xamp.registry.device_in_use import DEVICE_VARIABLE

CHIPS = ("Ascend910B2", "Ascend910A")
INSIDE = Path(__file__).parent.parent / "emulated" / "inside"
RELEASES = Path(__file__).parent.parent / "data" / "torch_npu" / "asked.json"
"""What each release of torch_npu asks of CANN; make.py beside it adds one."""

counts: dict[str, Counter[str]] = {}
"""The number of passed, failed and other tests, by chip."""

_LAST_LINES = 60
# Warnings that torch_npu causes itself: its deepcopy of a tensor asks torch's old storage for its device; it has
# private tensor formats and does not use them unless told to.
_WARNED = (
    *("-W", "ignore:TypedStorage is deprecated:UserWarning"),
    *("-W", "ignore:Cannot create tensor with internal format:UserWarning"),
)
_COUNTED = re.compile(r"(\d+) (passed|failed|skipped|xfailed|xpassed|errors?)\b")


def releases() -> list[str]:
    """The releases of torch that have a torch-npu, of those that are recorded: the oldest first."""
    recorded = json.loads(RELEASES.read_text(encoding="utf-8"))
    return list(dict.fromkeys(re.split(r"\.post|rc", version)[0] for version in recorded))


def need_emulation() -> None:
    """Skip where there is no torch-npu for this release of torch, and with a build that the emulation refuses."""
    release = torch.__version__.partition("+")[0]
    if release not in releases():
        pytest.skip(f"there is no torch-npu for torch {release}: {', '.join(releases())} have one ({RELEASES.name})")
    if torch.version.hip or torch.version.xpu:
        pytest.skip("the emulation takes builds of torch for CPUs and CUDA")


def emulate(
    chip: str,
    *command: str | Path,
    devices: int = 1,
    timeout: float = 600,
    strict: bool = False,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run ``xamp emulate ascend:chip -- command``. Its coverage is measured only if ``environment`` says so."""
    need_emulation()
    words = [sys.executable, "-m", "xamp", "emulate", f"ascend:{chip}", "--devices", str(devices)]
    words += ["--strict", "--"] if strict else ["--"]
    settings = {**measuring.without(os.environ.copy()), "OMP_NUM_THREADS": "1", **environment}
    if DEVICE_VARIABLE not in environment:
        settings.pop(DEVICE_VARIABLE, None)  # a test's own device is the CPU
    return subprocess.run(
        [*words, *map(str, command)], capture_output=True, text=True, timeout=timeout, env=settings, check=False
    )


def emulated_pytest(
    chip: str,
    *arguments: str | Path,
    devices: int = 1,
    timeout: float = 600,
    strict: bool = False,
) -> str:
    """Run pytest on the emulated chip and return its output; fail, with the end of it, if a test failed or none ran."""
    words = ["-q", "-p", "no:cacheprovider", "--tb=short", *_WARNED, *arguments]
    options: dict[str, Any] = {"devices": devices, "timeout": timeout, "strict": strict}
    done = emulate(chip, "python", "-m", "pytest", *words, **options)
    found = {
        name.removesuffix("s") if name == "errors" else name: int(n) for n, name in _COUNTED.findall(last(done, 1))
    }
    counts.setdefault(chip, Counter()).update(found)
    assert done.returncode == 0, f"on the emulated {chip}:\n{last(done)}"
    assert found.get("passed"), f"nothing was tested on the emulated {chip}:\n{last(done)}"
    return done.stdout


def emulated_files(chip: str, *files: Path, environment: Mapping[str, str], timeout: float = 1800) -> dict[str, str]:
    """Run pytest there for several files in one process; for each, by its name, what is wrong: mostly nothing.

    ``environment`` has variables beyond this process's own, among them those by which its coverage is measured.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        words = ["-q", "-p", "no:cacheprovider", "--tb=short", f"--junitxml={report}", *_WARNED]
        options: dict[str, Any] = {**environment, "timeout": timeout}
        done = emulate(chip, "python", "-m", "pytest", *words, *files, **options)
        assert report.exists(), f"on the emulated {chip}:\n{last(done)}"
        cases = list(ElementTree.parse(report).iter("testcase"))
    found: dict[str, Counter[str]] = {file.stem: Counter() for file in files}
    for case in cases:
        outcomes = {each.tag for each in case} & {"failure", "error", "skipped"}
        file = case.get("classname", "").rpartition(".")[2]
        found.setdefault(file, Counter()).update(outcomes or ["passed"])
    unknown = set(found) - {file.stem for file in files}
    for each in found.values():
        counts.setdefault(chip, Counter()).update({"failed" if k == "failure" else k: n for k, n in each.items()})
    ended = done.returncode in (0, 1) and not unknown
    return {
        file.stem: ""
        if ended and found[file.stem]["passed"] and not found[file.stem].keys() & {"failure", "error"}
        else f"{dict(found[file.stem])} on the emulated {chip}:\n{last(done)}"
        for file in files
    }


def last(done: subprocess.CompletedProcess[str], lines: int = _LAST_LINES) -> str:
    """The end of a process's output; if that is short, its errors too."""
    said = done.stdout.strip().splitlines()
    if len(said) < lines:
        said = done.stderr.strip().splitlines()[-lines:] + said
    said = [line for line in said if "Warning: CAUTION: The operator" not in line][-lines:]
    return "\n".join(said)
