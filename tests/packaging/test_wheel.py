"""The package as it is installed: editable in a plain run, from the wheel and outside the checkout in ci/wheel.sh.

Covers: setup.cfg, xamp.values.version.
"""

from __future__ import annotations

import configparser
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch
from gathering import cases
from torch_versions import MINIMUM

import xamp

ROOT = pathlib.Path(__file__).resolve().parents[2]
FROM_WHEEL = os.environ.get("XAMP_WHEEL_TEST") == "1"
HOMES = {"xamp": ROOT / "xamp", "xamp.backends": ROOT / "backends"}


def sources() -> dict[str, pathlib.Path]:
    """Every module of the checkout, by the name it must have where it is installed."""
    found = {}
    for prefix, folder in HOMES.items():
        for path in sorted(folder.rglob("*.py")):
            inside = path.relative_to(folder)
            if prefix == "xamp" and inside.parts[0] == "backends":
                continue  # the link xamp/backends
            parts = [*inside.parts[:-1], inside.stem]
            found[".".join([prefix, *(part for part in parts if part != "__init__")])] = path
    return found


SOURCES = sources()


@pytest.fixture(scope="module")
def distribution() -> importlib.metadata.Distribution:
    try:
        return importlib.metadata.distribution("xamp")
    except importlib.metadata.PackageNotFoundError:
        if FROM_WHEEL:
            raise
        pytest.skip("xamp runs from a checkout that is not installed; ci/test.sh installs it")


@pytest.fixture(scope="module")
def setup_cfg() -> configparser.ConfigParser:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    return config


def test_setup_cfg_lists_every_package(setup_cfg: configparser.ConfigParser) -> None:
    packages = {name for name, path in SOURCES.items() if path.name == "__init__.py"}
    assert set(setup_cfg["options"]["packages"].split()) == packages


def test_every_module_stands_in_a_package() -> None:
    for name, path in SOURCES.items():
        assert (path.parent / "__init__.py").is_file(), f"{name}: {path.parent} has no __init__.py"


def test_every_module_is_installed() -> None:
    assert len(SOURCES) >= 400
    with cases() as case:
        for name in SOURCES:
            with case(name):
                spec = importlib.util.find_spec(name)
                assert spec is not None
                assert spec.origin is not None
                if FROM_WHEEL:
                    assert ROOT not in pathlib.Path(spec.origin).resolve().parents


def test_typed() -> None:
    assert (pathlib.Path(xamp.__file__).parent / "py.typed").is_file()


def test_console_script(distribution: importlib.metadata.Distribution) -> None:
    (script,) = (entry for entry in distribution.entry_points if entry.group == "console_scripts")
    assert (script.name, script.value) == ("xamp", "xamp.cli:main")
    assert callable(script.load())


def test_version(distribution: importlib.metadata.Distribution) -> None:
    assert distribution.version == xamp.__version__


def test_torch_is_no_hard_dependency(distribution: importlib.metadata.Distribution) -> None:
    assert [needed for needed in distribution.requires or () if "extra ==" not in needed] == []


def test_extras(distribution: importlib.metadata.Distribution) -> None:
    extras = set(distribution.metadata.get_all("Provides-Extra") or ())
    assert {"torch", "npu", "demo", "test", "dev"} <= extras
    assert "apex" not in extras


def test_extras_that_have_two_names(setup_cfg: configparser.ConfigParser) -> None:
    """Those who test a device need little, those who test xamp need much."""
    extras = setup_cfg["options.extras_require"]
    assert (extras["testing"], extras["test"]) == ("xamp[conformance]", "xamp[project-tests]"), "the names they had"
    assert {"pytest>=8", "rich>=13"} == set(extras["conformance"].split("\n")) - {""}
    assert "hypothesis>=6.100" in extras["project-tests"]


def test_the_extras_take_the_oldest_torch_and_any_newer_one(setup_cfg: configparser.ConfigParser) -> None:
    extras = setup_cfg["options.extras_require"]
    assert extras["torch"].strip() == f"torch>={MINIMUM}"
    assert extras["npu"].split()[0] == f"torch-npu>={MINIMUM}"


def test_pages_name_the_oldest_torch() -> None:
    pages = ("README.md", "README.zh-CN.md", "docs/start.md", "docs/zh/start.md")
    assert [page for page in pages if f"torch {MINIMUM} " not in (ROOT / page).read_text(encoding="utf-8")] == []


def test_license(distribution: importlib.metadata.Distribution) -> None:
    metadata = distribution.metadata
    assert (metadata.get_all("License-Expression") or metadata.get_all("License")) == ["BSD-3-Clause"]


def test_pyproject_has_no_project_table() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(r"^\s*\[\s*project\b", text, re.MULTILINE) is None


def test_backends_cannot_be_imported_twice() -> None:
    """From the root of the checkout, backends/ would be a second package with the same classes."""
    command = [sys.executable, "-c", "import backends"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ImportError" in done.stderr
    assert "xamp.backends" in done.stderr


def test_importing_xamp_imports_no_torch() -> None:
    code = "import sys, xamp; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_trains() -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = xamp.initialize(model, optimizer, level="O5", verbosity=0)
    before = model.weight.detach().clone()
    with xamp.scale_loss(model(torch.ones(2, 4)).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert not torch.equal(before, model.weight.detach())
    assert xamp.session(optimizer).last_step is xamp.StepOutcome.APPLIED
