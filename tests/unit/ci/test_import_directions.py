"""What must load without torch does. That imports run downward says lint-imports, which ci/lint.sh calls.

Covers: pyproject.toml.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from ci_scripts import ROOT

FORBIDDEN = {  # an import that a contract forbids, by the file that gets it
    "scaling/scale": "from xamp.sessions import formats",
    "values/log": "if TYPE_CHECKING:\n    from xamp.contract import Backend",
    "contract": "def late():\n    import xamp.registry.causes",
    "casting/region_mark": "from xamp.distributed import ranks",
    "distributed/wrappers": "import xamp.registry.causes",
    "updates": "import xamp.distributed.ddp",
    "scaling/weights": "import xamp.onepass.rules",
    "scaling/masters": "from xamp.scaling import gradients",
    "accel/used_device": "import xamp.backends.cpu",
    "../backends/mps": "import xamp.accel.used_device",
    "sessions/session": "import xamp.debug.recorder",
    "casting/ops/__init__": "import xamp.apex._regions",
}


def test_each_contract_is_broken_by_an_import_that_it_forbids(tmp_path: Path) -> None:
    """All of them at once."""
    for name in ("xamp", "backends"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name, added in FORBIDDEN.items():
        with (tmp_path / "xamp" / f"{name}.py").open("a", encoding="utf-8") as file:
            file.write(f"\n\n{added}\n")
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-logo", "--no-cache"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, " KEPT" in done.stdout) == (1, False), done.stdout


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
