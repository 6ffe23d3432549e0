"""docs/backends.md: the backends on it, as they stand there, pass the suite; here on the CPU.

Covers: xamp.contract, xamp.backend_kit, xamp.registry.registry, xamp.testing.ledger.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import docs_blocks
import op_entries
import pytest

import xamp
from xamp.contract import Backend, BackendSpec, Capabilities
from xamp.registry.registry import REGISTRY, register_backend
from xamp.testing import TIERS
from xamp.testing.lane import open_lane
from xamp.testing.ledger import read_ledger
from xamp.testing.run import OUTCOMES, run

TEXT = (docs_blocks.DOCS / "backends.md").read_text(encoding="utf-8")
FLAG = """
import torch
_flag = []

def clear_overflow_flag(device):
    _flag.clear()

def read_overflow_flag(device):
    return torch.full((), float(bool(_flag)), device=device)

class Chip(SaturatingBackend):
    def capabilities(self, device=None):
        return Capabilities(overflow="flag")

    def make_overflow_(self, grad):
        super().make_overflow_(grad)
        assert not grad.isfinite().any(), "what the page does is no overflow"
        _flag.append(1)
        grad.fill_(65504.0)  # what the chip would have given
"""


@pytest.fixture
def specs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[BackendSpec]]:
    """The page's module with its two classes, written to a file that can be imported; a spec for each."""
    first, saturating = (
        code for code in docs_blocks.blocks("backends.md") if "class" in code and "Conformance" not in code
    )
    code = first.replace('DEVICE = "mydevice"', 'DEVICE = "cpu"').replace("priority=60", "priority=-1")
    (tmp_path / "xamp_mydevice.py").write_text(code + saturating + FLAG, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    import xamp_mydevice  # type: ignore[import-not-found]

    whole: BackendSpec = xamp_mydevice.SPEC
    chip = BackendSpec("chip", ("cpu",), "xamp_mydevice:Chip", priority=-2)
    for spec in (whole, chip):
        register_backend(spec)
    with op_entries.anew():  # their entries on the CPU's key go with them
        yield [whole, chip]
    for spec in (whole, chip):
        REGISTRY._specs.pop(spec.name)
        REGISTRY._sources.pop(spec.name)
        REGISTRY._outcomes.pop(spec, None)
    del sys.modules["xamp_mydevice"]


def test_the_backends_pass(specs: list[BackendSpec]) -> None:
    lanes = [open_lane(spec.name) for spec in specs]
    results = run(lanes, ["probe.*", "levels.effective", "scaling.*"])
    failed = [(result.lane, result.clause, result.reason) for result in results if result.outcome == "failed"]
    assert not failed
    assert {result.lane for result in results if result.outcome == "passed"} == {"mydevice", "chip"}


def test_the_script_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XAMP_DEVICE", "cpu")
    names = docs_blocks.run("backends.md", {}, "xamp.scale_loss")
    assert xamp.session(names["model"]).stats.applied == 10


def test_the_module_imports_nothing_heavy() -> None:
    tree = ast.parse(next(code for code in docs_blocks.blocks("backends.md") if "SPEC =" in code))
    imported = {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
    assert imported == {"xamp.contract", "xamp.errors"}
    assert not [node for node in tree.body if isinstance(node, ast.Import)]


def test_the_tables_name_all_there_is() -> None:
    fields = re.findall(r"^\| `(\w+)` \|", TEXT.partition("## What to override")[0], re.MULTILINE)
    assert set(fields) == set(Capabilities.__dataclass_fields__)
    methods = re.findall(r"^\| `(\w+)\(", TEXT, re.MULTILINE)
    public = {name for name, found in vars(Backend).items() if callable(found) and not name.startswith("_")}
    assert set(methods) == public
    outcomes = TEXT.partition("ends in one of five ways")[2].partition("`--require")[0]
    assert re.findall(r"^\| ([a-z ]+) \|", outcomes, re.MULTILINE)[1:] == list(OUTCOMES)
    tiers = TEXT.partition("### Reading a failure")[2].partition("\n## ")[0]
    assert re.findall(r"^\| (\w+) \|", tiers, re.MULTILINE)[1:] == list(TIERS)


def test_the_ledger_can_be_read(tmp_path: Path) -> None:
    (block,) = re.findall(r"^```json\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
    path = tmp_path / "ledger.json"
    path.write_text(block, encoding="utf-8")
    (entry,) = read_ledger(str(path)).entries
    assert entry.names("operators.result_dtype[rms_norm-float16]")
    assert json.loads(block)


def test_the_package_installs_as_printed(tmp_path: Path) -> None:
    """The three files of the page, built by the tool that they name; xamp's entry point is in the result."""
    (toml,) = re.findall(r"^```toml\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
    (ini,) = re.findall(r"^```ini\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
    module = next(code for code in docs_blocks.blocks("backends.md") if "SPEC =" in code)
    for name, text in (("pyproject.toml", toml), ("setup.cfg", ini), ("xamp_mydevice.py", module)):
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "out").mkdir()
    code = "import setuptools.build_meta as b; b.prepare_metadata_for_build_wheel('out')"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, timeout=120)
    (written,) = tmp_path.glob("out/*.dist-info/entry_points.txt")
    assert "mydevice = xamp_mydevice:SPEC" in written.read_text(encoding="utf-8")
    (names,) = tmp_path.glob("out/*.dist-info/top_level.txt")
    assert names.read_text(encoding="utf-8").split() == ["xamp_mydevice"]
