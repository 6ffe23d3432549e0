"""A backend needs nothing of xamp that is not public: no third party's, and but for two none that ships with it.

Covers: xamp.backend_kit, xamp.contract.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from docs_blocks import DOCS
from site_packages import ROOT

from xamp import backend_kit, contract
from xamp.contract import Backend

PUBLIC = {
    "xamp",
    "xamp.accel",
    "xamp.backend_kit",
    "xamp.contract",
    "xamp.errors",
    "xamp.policy",
    "xamp.testing",
}
OWN = ("host.py", "host_memory.py")
"""xamp.accel on the CPU, which is made of the same parts as xamp.accel itself."""

THIRD_PARTY = sorted((ROOT / "tests" / "outside" / "abacus").rglob("*.py"))
OURS = [
    path for path in sorted((ROOT / "backends").rglob("*.py")) if "emulation" not in path.parts and path.name not in OWN
]


def imported(source: str) -> Iterator[str]:
    """The modules of xamp that are imported, anywhere in it; ``from xamp.x import y`` is ``xamp.x``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] == "xamp")
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "xamp":
            if node.module == "xamp":
                yield from (name for name in (f"xamp.{alias.name}" for alias in node.names) if is_module(name))
            else:
                yield node.module


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def private(path: Path) -> set[str]:
    found = set(imported(path.read_text(encoding="utf-8")))
    return {name for name in found if name not in PUBLIC}


@pytest.mark.parametrize("path", THIRD_PARTY, ids=lambda path: path.name)
def test_a_third_party_s(path: Path) -> None:
    assert private(path) == set()


@pytest.mark.parametrize("path", OURS, ids=lambda path: str(path.relative_to(ROOT)))
def test_ours(path: Path) -> None:
    beside = {name for name in private(path) if name == "xamp.backends" or name.startswith("xamp.backends.")}
    assert private(path) - beside == set()


def test_there_are_some() -> None:
    assert {"backend.py", "setup.py"} & {path.name for path in THIRD_PARTY}
    assert {"cpu.py", "cuda.py", "native.py", "mps.py", "xpu.py", "backend.py"} <= {path.name for path in OURS}


def test_a_private_one_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "backend.py"
    path.write_text(
        "import xamp\nfrom xamp import scaling, initialize\nfrom xamp.backend_kit import masked\n\n\n"
        "def probe():\n    import xamp.casting.ops\n    from xamp.registry.causes import one_line\n",
        encoding="utf-8",
    )
    assert private(path) == {"xamp.scaling", "xamp.casting.ops", "xamp.registry.causes"}


def test_the_page_names_the_kit() -> None:
    """docs/backends.md tells of each function of ``xamp.backend_kit``."""
    text = (DOCS / "backends.md").read_text(encoding="utf-8")
    part = text.partition("### What a class may use")[2].partition("\n### ")[0]
    told = [name for line in re.findall(r"^- (`.*?): ", part, re.MULTILINE) for name in re.findall(r"`(\w+)\(", line)]
    assert sorted(told) == sorted(backend_kit.__all__)


def test_the_contract_lists_its_calls() -> None:
    """What the module's text says of the order of calls names every method, each once."""
    listed = re.findall(r"^    (\w+) {2,}\S", str(contract.__doc__), re.MULTILINE)
    methods = [name for name, found in vars(Backend).items() if callable(found) and not name.startswith("_")]
    assert sorted(listed) == sorted(methods)
