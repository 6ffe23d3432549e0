"""Makes folders that act as a site-packages with distributions, and starts processes that see them."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from forked_python import python

ROOT = Path(__file__).resolve().parents[2]
_PIP = "-m pip install --quiet --no-deps --no-build-isolation --no-index --no-compile --disable-pip-version-check"
_STEERING = re.compile(
    r"XAMP_.*|(PY)?TORCH_.*|.*VISIBLE_DEVICES|.*(TF32|FPMATH|CPU_ISA|CPU_CAPABILITY|WORKSPACE_CONFIG).*"
)

INSTALLED = frozenset(entry.name for entry in importlib.metadata.entry_points(group="xamp.backends"))
"""The names of backends that stand in this environment beside xamp's: of a device that this machine has, mostly."""


LIMIT = 3
"""Seconds that a step of the doctor's may take in :func:`run_doctor`, once it has said that it hangs."""

HANGS = "import pathlib, sys; pathlib.Path(sys.argv[1]).with_name('hangs').touch()"
"""For a module that a child of the doctor imports."""

_DOCTOR = """
import sys, time
from xamp.cli import main
from xamp.doctor import children

def wait(process, journal, limit, wait=children._wait):
    while process.poll() is None and not journal.with_name("hangs").exists():  # it may be slow for as long as it is
        time.sleep(0.02)
    return wait(process, journal, limit)

children._wait = wait
sys.exit(main(sys.argv[1:]))
"""


def distribution(folder: Path, name: str, entry_points: str, group: str = "xamp.backends", /, **modules: str) -> None:
    """Install version 1.5 of ``name`` into ``folder``, with entry points of ``group`` and with modules."""
    info = folder / f"{name.replace('-', '_')}-1.5.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{entry_points}\n")
    for module, text in modules.items():
        (folder / f"{module}.py").write_text(text)


def install(site: Path, *packages: Path) -> Path:
    """Install ``packages``, folders with a setup.cfg, into ``site``; from copies, as building leaves files behind."""
    for package in packages:
        source = site.parent / "source" / package.name
        shutil.copytree(package, source, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
        subprocess.run([sys.executable, *_PIP.split(), "--target", site, source], check=True, capture_output=True)
    return site


def plain_environment(*folders: Path, **variables: str) -> dict[str, str]:
    """This process's variables without those that affect xamp or torch; imports come from ``folders`` and this xamp."""
    kept = {name: value for name, value in os.environ.items() if not _STEERING.fullmatch(name)}
    return {**kept, "PYTHONPATH": os.pathsep.join(map(str, [*folders, ROOT])), **variables}


def run_doctor(*arguments: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """``xamp doctor`` in a new process that sees the distributions in ``folder``; so are those that it starts.

    What hangs has to say so, by :data:`HANGS`.
    """
    command = [python(), "-c", _DOCTOR, "doctor", "--timeout", str(LIMIT), *arguments]
    environment = plain_environment(folder, **variables)
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)


def doctor_finds(*arguments: str, folder: Path, code: int, **variables: str) -> dict[str, Any]:
    """The JSON of ``xamp doctor`` in ``folder``, which must end with ``code``."""
    done = run_doctor("--json", *arguments, folder=folder, **variables)
    assert done.returncode == code, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def best_of(found: dict[str, Any]) -> str:
    """The type of the device that the doctor has to choose, by its own rows: the CPU only where nothing else is usable.

    A test that means "not this device" says so by this: the machine may have any other.
    """
    usable = [row["device_types"][0] for row in found["backends"] if row["usable"]]
    return next((kind for kind in usable if kind != "cpu"), "cpu")


def row_of(found: dict[str, Any], name: str, source: str = "xamp") -> dict[str, Any]:
    """The one row with this name from this source."""
    (row,) = [row for row in found["backends"] if row["name"] == name and row["source"] == source]
    plain: dict[str, Any] = row
    return plain
