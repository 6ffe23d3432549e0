"""What a run of the benchmarks writes: a file of figures, and a picture.

Covers: benchmarks.report, benchmarks.timing, benchmarks.picture, benchmarks.machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ci_scripts import ROOT

sys.path.append(str(ROOT))  # benchmarks/ is not installed

import xamp
from benchmarks import __main__ as command
from benchmarks import machine, picture, report, timing
from benchmarks.report import Figure
from xamp.testing import measure

CPU = torch.device("cpu")
FIGURES = {
    "step": [Figure("SGD, 1", 0.75, "ratio", 0.9, "3 us : 4 us", (0.7, 0.8)), Figure("Adam, 1", 0.95, "ratio", 0.9)],
    "models": [
        Figure("MLP: over torch.amp", 1.01, "ratio", None, "", (0.9, 1.1)),
        Figure("MLP: Apex is not there", 0, ""),
    ],
}


@pytest.mark.parametrize("quick", [False, True])
def test_a_run_writes_its_figures(quick: bool, tmp_path: Path) -> None:
    about = {**machine.described(CPU), "load at the end": 0.0}
    files = {"json": tmp_path / "a.json", "png": tmp_path / "a.png"}
    command._write(argparse.Namespace(quick=quick, **files), about, FIGURES)
    found = json.loads(files["json"].read_text(encoding="utf-8"))
    assert [(each["case"], each["value"], each["missed"]) for each in found["found"]["step"]] == [
        ("SGD, 1", 0.75, False),
        ("Adam, 1", 0.95, True),
    ]
    assert found["machine"]["versions"]["torch"] == torch.__version__
    assert found["machine"]["quick"] is quick
    assert files["png"].read_bytes().startswith(b"\x89PNG")


def test_nothing_to_draw_is_no_picture(tmp_path: Path) -> None:
    assert not picture.draw({"step": [Figure("bytes", 3.0, "bytes")]}, "", tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()


def test_a_pair_has_the_quartiles_of_its_rounds() -> None:
    """On a clock of our own: one side takes 1 s for a call, the other 1 to 5 s by the round."""
    now, took = [0.0], iter([1.0] * 3 + [1.0, 2.0, 3.0, 4.0, 5.0])

    def ours() -> None:
        now[0] += 1.0

    def theirs() -> None:
        now[0] += next(took)

    times = measure.rounds_of(ours, theirs, lambda: None, calls=1, rounds=5, warm_up=3, clock=lambda: now[0])
    pair = measure.Pair.of(times)
    assert (pair.ours, pair.theirs, pair.difference) == (1e6, 3e6, -2e6)
    assert pair.difference_spread == (-3e6, -1e6)
    assert pair.ratio_spread == pytest.approx((1 / 4, 1 / 2))
    figure = report.of_ratio("x", pair)
    assert (figure.value, figure.spread) == (pair.ratio, pair.ratio_spread)


def test_a_wait_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device with a sync debug mode; a stand-in for its module says which mode it is in."""
    modes: list[str] = []

    class Module:
        set_sync_debug_mode = modes.append

    def waits() -> None:
        if modes[-1] == "error":
            raise RuntimeError("called a synchronizing operation\nhere")

    monkeypatch.setattr(timing, "module_of", lambda _: Module)
    device = torch.device("meta")
    assert timing.first_wait(waits, device, 2) == "called a synchronizing operation"
    assert timing.first_wait(lambda: None, device, 2) == ""
    assert modes == ["error", "default"] * 2
    assert timing.first_wait(waits, CPU, 2) is None


def test_the_script_names_its_options() -> None:
    done = subprocess.run([ROOT / "ci" / "bench.sh", "--fast"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "--fast: there are --quick and names of benchmarks" in done.stderr


def test_the_machine_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = machine.described(CPU)
    assert found["versions"]["torch"] == torch.__version__
    assert found["type"] == "cpu"
    monkeypatch.setattr(xamp.accel, "get_device_name", lambda: "NVIDIA H100 (80GB)")
    assert machine.slug() == "nvidia-h100-80gb"
