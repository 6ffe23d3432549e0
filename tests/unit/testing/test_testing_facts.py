"""What is recorded of a device: here of the CPU, which refuses nothing. tests/conformance/test_standin.py has gaps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from xamp.testing import facts


def test_the_cpu_lacks_only_capturable_forms(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "facts.json"
    assert facts.main(["--device", "cpu", "--json", str(path)]) == 0
    assert capfd.readouterr().out == ""
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["about"]["torch"] == torch.__version__
    assert found["dtypes"] == ["float16", "bfloat16"]
    assert found["refuses"] == {}
    assert found["fp32_numbers"] == []
    assert found["fused"] == dict.fromkeys(("Adagrad", "Adam", "AdamW", "SGD"), "")
    assert found["capturable"].keys() >= {"Adam", "AdamW", "NAdam", "RMSprop"}
    assert all("capturable=True" in error for error in found["capturable"].values())
    assert {"linear", "mm", "conv2d"} <= set(found["autocast"]["lower"].split())
    rest = ("recurrent", "copies", "waits", "fork")
    assert [found[key] for key in rest] == ["", {"late_by": 0}, [], ""]


def test_facts_go_to_the_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert facts.main(["--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["cards"] == 1


def test_a_device_that_torch_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    assert facts.main(["--device", "nosuch"]) == 2
    assert capsys.readouterr().err.startswith("python -m xamp.testing.facts: --device nosuch: Expected one of ")
