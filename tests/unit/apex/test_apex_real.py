"""What a package named ``apex`` is: the real one, the real one without amp, or PyPI's of the same name."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from forked_python import python
from site_packages import plain_environment

from xamp.apex import _real

KINDS = {
    "real": (("amp/__init__.py", "optimizers/__init__.py"), True, "an Apex with apex.amp"),
    "real, amp a file": (("amp.py",), True, "an Apex with apex.amp"),
    "without amp": (("normalization/__init__.py", "optimizers/__init__.py"), False, "removed in 2025"),
    "impostor": (("interfaces.py", "lib/__init__.py"), False, "Pyramid"),
}


@pytest.fixture
def site(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A folder with a package of one kind that raises when it is imported."""
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("raise RuntimeError('imported')\n", encoding="utf-8")
    for name in KINDS[request.param][0]:
        (tmp_path / "apex" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "apex" / name).touch()
    info = tmp_path / "apex-0.9.10.dev0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: apex\nVersion: 0.9.10.dev0\n", encoding="utf-8")
    return tmp_path


def test_none_is_here() -> None:
    assert _real.find() is None


@pytest.mark.parametrize(("site", "kind"), [(kind, kind) for kind in KINDS], indirect=["site"])
def test_it_is_told_without_being_imported(site: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(site)
    found = _real.find()
    _, has_amp, says = KINDS[kind]
    assert found is not None
    assert (found.has_amp, found.version) == (has_amp, "0.9.10.dev0")
    assert says in found.says


@pytest.mark.slow
@pytest.mark.parametrize("site", ["impostor"], indirect=True)
@pytest.mark.parametrize("option", ["--json", "--report", ""])
def test_doctor_names_it(site: Path, option: str) -> None:
    command = [python(), "-m", "xamp", "doctor", *option.split()]
    done = subprocess.run(command, env=plain_environment(site), capture_output=True, text=True, check=True)
    said = json.loads(done.stdout)["apex"]["says"] if option == "--json" else " ".join(done.stdout.split())
    assert "pip uninstall apex" in said
    assert "from xamp.apex import amp" in said
