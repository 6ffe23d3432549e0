"""The options of ``xamp run``: they stand before the script, and what follows is the script's.

Covers: xamp.cli.run.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from xamp.cli import main


def test_options_after_the_script_are_the_scripts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XAMP_DEVICE", "cpu")
    script = tmp_path / "train.py"
    script.write_text("import sys; print(sys.argv[1:])")
    assert main(["run", str(script), "--pretend-cuda", "-m", "x", "--help"]) == 0
    assert main(["run", "--", str(script), "--", "y"]) == 0
    said = capsys.readouterr()
    assert said.out == "['--pretend-cuda', '-m', 'x', '--help']\n['--', 'y']\n"
    assert said.err == ""


def test_help_names_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help"]) == 0
    said = capsys.readouterr().out
    for option in ("--device", "--pretend-cuda", "--prefer", "-m MODULE"):
        assert option in said
    assert main(["run", "--prefer", "mine", "x.py"]) == 2


@pytest.mark.parametrize("device", ["gpu", "the gpu", "cpu:"])
def test_a_device_that_is_not_there_is_the_options_fault(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No variable was set, so none is blamed, and none is to be unset."""
    assert main(["run", "--device", device, "x.py"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"xamp run: --device {device}: ")
    assert "Or leave it out" in said
    assert "XAMP_DEVICE" not in said
    assert "xpu'?" not in said
