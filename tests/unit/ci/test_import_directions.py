"""import-linter's contracts: they hold, and each fails where an import is added that it forbids.

Covers: pyproject.toml.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from ci_scripts import ROOT
from gathering import cases

DOWN, LATE = "Imports run downward", "if TYPE_CHECKING:\n    "
FORBIDDEN = [  # the contract, the file, what is added to it, what is told of it
    (DOWN, "scaling/scale", "from xamp.sessions import formats", "scale -> xamp.sessions.formats"),
    (DOWN, "values/log", f"{LATE}from xamp.contract import Backend", "log -> xamp.contract"),
    (DOWN, "contract", "def late():\n    import xamp.registry.causes", "contract -> xamp.registry"),
    (DOWN, "scaling/counts", "from xamp.casting import region_mark", "counts -> xamp.casting"),
    ("The casts know neither", "casting/region_mark", f"{LATE}from xamp.distributed import ranks", "mark -> xamp.dist"),
    ("Ranks know no devices", "distributed/wrappers", "import xamp.registry.causes", "wrappers -> xamp.registry"),
    ("Kernels know no ranks", "updates", "import xamp.distributed.ddp", "updates -> xamp.distributed"),
    ("One module of the step calls", "scaling/weights", "import xamp.onepass.rules", "weights -> xamp.onepass"),
    ("No modules import each other", "scaling/masters", "from xamp.scaling import gradients", ".masters -> .gradients"),
    ("Backends are reached", "accel/used_device", "import xamp.backends.cpu", "used_device -> xamp.backends"),
    ("Backends import what third", "../backends/mps", "import xamp.accel.used_device", "mps -> xamp.accel"),
    ("No part of the core reaches", "sessions/session", "import xamp.debug.recorder", "session -> xamp.debug"),
    ("Nothing below imports", "casting/ops/__init__", "import xamp.apex._regions", "casting.ops -> xamp.apex"),
]


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-logo", "--no-cache"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_each_contract_holds_and_is_broken_by_an_import_that_it_forbids(tmp_path: Path) -> None:
    """All of them at once: what is told names each."""
    for name in ("xamp", "backends"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    done = lint(tmp_path)
    assert done.returncode == 0, done.stdout
    for _, name, added, _ in FORBIDDEN:
        with (tmp_path / "xamp" / f"{name}.py").open("a", encoding="utf-8") as file:
            file.write(f"\n\n{added}\n")
    done = lint(tmp_path)
    assert done.returncode == 1
    told = re.split(r"\n([^\n]+)\n-{5,}\n", done.stdout)
    with cases() as case:
        for contract, name, _, arrow in FORBIDDEN:
            with case(f"{contract}: {name}"):
                assert any(
                    arrow in text
                    for head, text in zip(told[1::2], told[2::2], strict=True)
                    if head.startswith(contract)
                )


WITHOUT_TORCH = """
xamp xamp.apex._install xamp.cli xamp.cli.compare xamp.cli.doctor xamp.cli.port xamp.cli.run xamp.contract
xamp.doctor.machine xamp.errors xamp.policy xamp.port.engine xamp.port.files xamp.registry.causes xamp.registry.findings
xamp.registry.find_torch xamp.registry.plugins xamp.registry.probe xamp.registry.registry xamp.backends.cuda_causes
xamp.backends.npu.causes
"""


def test_these_load_where_torch_is_missing_or_broken() -> None:
    code = "import importlib, sys\nfor each in ('torch', 'numpy'): sys.modules[each] = None\n"
    code += f"for each in {WITHOUT_TORCH.split()}: importlib.import_module(each)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
