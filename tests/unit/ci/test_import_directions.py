"""import-linter's contracts: they hold, and each fails where an import is added that it forbids."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gathering import cases

ROOT = Path(__file__).resolve().parents[3]

DOWNWARD = "Imports run downward"
FORBIDDEN = [  # the contract, the file, what is added to it, what is told of it
    (DOWNWARD, "xamp/scaling/scale.py", "from xamp.sessions import formats", "scaling.scale -> xamp.sessions.formats"),
    (
        DOWNWARD,
        "xamp/values/log.py",
        "if TYPE_CHECKING:\n    from xamp.contract import Backend",
        "values.log -> xamp.contract",
    ),
    (DOWNWARD, "xamp/torch_compat/norms.py", "import xamp.values.undo", "torch_compat.norms -> xamp.values.undo"),
    (
        DOWNWARD,
        "xamp/contract.py",
        "def late():\n    import xamp.registry.causes",
        "contract -> xamp.registry.causes",
    ),
    (
        DOWNWARD,
        "xamp/scaling/counts.py",
        "from xamp.casting import region_mark",
        "scaling.counts -> xamp.casting.region_mark",
    ),
    (
        DOWNWARD,
        "xamp/casting/region_mark.py",
        "from xamp.sessions import metrics",
        "casting.region_mark -> xamp.sessions.metrics",
    ),
    (
        "The casts know neither the step nor ranks nor kernels",
        "xamp/casting/features_in_use.py",
        "if TYPE_CHECKING:\n    from xamp.distributed import ranks",
        "casting.features_in_use -> xamp.distributed.ranks",
    ),
    (
        "Ranks know no devices",
        "xamp/distributed/wrappers.py",
        "import xamp.registry.causes",
        "distributed.wrappers -> xamp.registry.causes",
    ),
    ("Kernels know no ranks", "xamp/updates.py", "import xamp.distributed.ddp", "updates -> xamp.distributed.ddp"),
    (
        "One module of the step calls kernels",
        "xamp/scaling/weights.py",
        "import xamp.onepass.rules",
        "scaling.weights -> xamp.onepass.rules",
    ),
    (
        "No modules import each other in a circle",
        "xamp/scaling/masters.py",
        "from xamp.scaling import gradients",
        ".masters -> .gradients",
    ),
    (
        "Backends are reached through the registry only",
        "xamp/accel/used_device.py",
        "import xamp.backends.cpu",
        "accel.used_device -> xamp.backends.cpu",
    ),
    (
        "Backends import what third parties may import, and each other",
        "backends/mps.py",
        "import xamp.accel.used_device",
        "mps -> xamp.accel.used_device",
    ),
    (
        "No part of the core reaches a tool",
        "xamp/sessions/session.py",
        "import xamp.debug.recorder",
        "sessions.session -> xamp.debug.recorder",
    ),
    (
        "Nothing below imports xamp.apex",
        "xamp/casting/ops/__init__.py",
        "import xamp.apex._regions",
        "casting.ops -> xamp.apex._regions",
    ),
    (
        "These load where torch is missing or broken",
        "xamp/registry/findings.py",
        "import torch",
        "registry.findings -> torch",
    ),
]


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-logo", "--no-cache"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tree")
    for name in ("xamp", "backends", "ci"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def test_the_contracts_hold(tree: Path) -> None:
    done = lint(tree)
    assert done.returncode == 0, done.stdout


def test_each_forbidden_import_breaks_its_contract(tree: Path) -> None:
    """All of them at once: what is told names each."""
    with contextlib.ExitStack() as mended:
        for _, name, added, _ in FORBIDDEN:
            before = (tree / name).read_text(encoding="utf-8")
            mended.callback((tree / name).write_text, before, encoding="utf-8")
            (tree / name).write_text(f"{before}\n\n{added}\n", encoding="utf-8")
        done = lint(tree)
    assert done.returncode == 1
    with cases() as case:
        for contract, name, _, arrow in FORBIDDEN:
            with case(f"{contract}: {name}"):
                head = f"\n{contract}\n{'-' * len(contract)}\n"
                assert arrow in re.split(r"\n[^\n]+\n-{5,}\n", done.stdout.partition(head)[2])[0]
