"""ci/versions/untouched.py: a package whose installation changes what an environment has is found out."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ci.versions import untouched

SETUP = """
[metadata]
name = xamp
version = 1

[options]
packages =
install_requires = {}

[options.extras_require]
torch = {}
"""
META = "Metadata-Version: 2.1\nName: torch\nVersion: {}\n"


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The Python of an environment with torch 1, beside an index that has torch 2."""
    index = tmp_path / "index"
    index.mkdir()
    with zipfile.ZipFile(index / "torch-2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("torch-2.dist-info/METADATA", META.format(2))
        wheel.writestr("torch-2.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("torch-2.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    # The first torch that is found on the path counts, so this one hides that of the tests.
    torch = tmp_path / "site" / "torch-1.dist-info"
    torch.mkdir(parents=True)
    (torch / "METADATA").write_text(META.format(1))
    (torch / "RECORD").write_text("")
    (torch / "INSTALLER").write_text("pip\n")
    seen = untouched._beside(sys.executable, tmp_path / "venv")
    for path in (tmp_path / "venv").rglob("beside.pth"):
        path.write_text(f"{tmp_path / 'site'}\n{path.read_text()}")
    return seen


def project(folder: Path, needs: str = "", torch: str = "") -> Path:
    """A checkout of a package that is called xamp."""
    folder.mkdir()
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    (folder / "setup.cfg").write_text(SETUP.format(needs, torch))
    (folder / "pyproject.toml").write_text('[build-system]\nrequires = ["setuptools"]\n')
    return folder


def test_a_torch_that_is_there_stays(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(untouched, "ROOT", project(tmp_path / "good", torch="torch>=1"))
    assert untouched.main([python]) == 0
    assert "pip install . and '.[torch]' left torch 1 and all else as it was" in capfd.readouterr().out
    monkeypatch.setattr(untouched, "ROOT", project(tmp_path / "extra", torch="torch>=2"))
    assert untouched.main([python]) == 1
    assert "pip install .[torch] changed what was there: torch 1 -> 2\n" in capfd.readouterr().out
    monkeypatch.setattr(untouched, "ROOT", project(tmp_path / "always", needs="torch>=2"))
    assert untouched.main([python]) == 1
    assert "pip install . changed what was there: torch 1 -> 2\n" in capfd.readouterr().out
