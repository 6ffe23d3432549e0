"""Each script of examples/ runs as it is, with ``--quick``, and at more than one level.

Covers: examples/*.py.
"""

from __future__ import annotations

import importlib
import math
import os
import subprocess
from pathlib import Path

import pytest
from forked_python import python

import xamp

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
NAMES = ("digits", "checkerboard", "gan", "gpt", "bert", "detection", "serve")
HELPERS = {"options", "ddp", "demo", "demo_report", "demo_tasks", "demo_train"}


@pytest.mark.parametrize("level", ["O1", "O5"])
@pytest.mark.parametrize("name", NAMES)
def test_it_runs(name: str, level: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("XAMP_DEVICE", "cpu")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    result = importlib.import_module(name).main(["--quick", "--level", level])
    assert math.isfinite(result)
    assert capsys.readouterr().out
    if name == "serve":
        assert result > 0.9


def test_the_gpt_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 20 steps it is better than guessing: ln of about 40 letters is 3.7."""
    monkeypatch.setenv("XAMP_DEVICE", "cpu")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    assert importlib.import_module("gpt").main(["--steps", "20", "--level", "O4"]) < 3.2


def test_ddp_runs() -> None:
    """In a process of its own, since a DDP outlives its process group."""
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    paths = os.pathsep.join([str(Path(xamp.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [python(), str(EXAMPLES / "ddp.py"), "--quick"],
        env={**env, "XAMP_DEVICE": "cpu", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "1 ranks, loss" in done.stdout


def test_none_is_left_out() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*NAMES, *HELPERS}
