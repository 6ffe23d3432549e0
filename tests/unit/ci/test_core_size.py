"""How large the core may be: what a person can hold in the head."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def files_of(package: str) -> list[Path]:
    return sorted((ROOT / "xamp" / package).rglob("*.py"))


@pytest.mark.parametrize(
    ("package", "files", "lines"),
    [("scaling", 18, 4800), ("sessions", 16, 3700), ("distributed", 6, 1300), ("apex", 60, 8200)],
)
def test_a_package_keeps_its_measure(package: str, files: int, lines: int) -> None:
    found = files_of(package)
    assert 0 < len(found) <= files
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in found) <= lines


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
