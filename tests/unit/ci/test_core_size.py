"""How large the core may be: what a person can hold in the head."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from ci_scripts import script

ROOT = Path(__file__).resolve().parents[3]


TOOLS: tuple[str, ...] = script("architecture_picture").TOOLS
ABOVE = ("apex", "averages", "integrations")
"""What stands above the core, beside the tools."""


def files_of(package: str) -> list[Path]:
    return sorted((ROOT / "xamp" / package).rglob("*.py"))


def core() -> list[Path]:
    """Every file of the core, wherever it is moved to."""
    others = {*ABOVE, *TOOLS, "backends", "__main__", "__init__", "backend_kit"}
    inside = [path for path in (ROOT / "xamp").iterdir() if path.stem not in others]
    return [file for path in inside for file in ([path] if path.suffix == ".py" else path.rglob("*.py"))]


def lines(found: list[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in found)


def test_the_core_keeps_its_measure() -> None:
    found = core()
    assert {"scaling", "sessions", "casting", "registry"} <= {path.parent.name for path in found}
    assert lines(found) <= 24_100


def test_apex_keeps_its_measure() -> None:
    found = files_of("apex")
    assert 0 < len(found) <= 60
    assert lines(found) <= 8_200


@pytest.mark.parametrize("package", ["scaling", "distributed"])
def test_no_module_describes_the_engine_again(package: str) -> None:
    bases = [
        (path.name, ast.unparse(base))
        for path in files_of(package)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
        for base in node.bases
    ]
    assert bases
    assert not [pair for pair in bases if "Protocol" in pair[1]]
