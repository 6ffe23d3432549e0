"""The time of ``import xamp`` and of its public names after ``import torch``, each time in a new process."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import bounds
from benchmarks.report import Figure

_CODE = """
import gc, time, torch
gc.collect()  # else one of its passes over all of torch's objects, 70 ms, falls into this or into what comes next
start = time.perf_counter()
import xamp
bare = time.perf_counter()
for name in xamp.__all__:
    getattr(xamp, name)
end = time.perf_counter()
print((bare - start) * 1e3, (end - start) * 1e3)
"""


def run(processes: int = 7) -> list[Figure]:
    root = str(Path(__file__).resolve().parent.parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as compiled:  # modules are compiled, as pip does when it installs
        environment["PYTHONPYCACHEPREFIX"] = compiled
        _import(environment)
        times = [_import(environment) for _ in range(processes)]
    everything = statistics.median(names for _, names in times)
    largest = f"largest {max(names for _, names in times):.1f}"
    return [
        Figure("import xamp", statistics.median(bare for bare, _ in times), "ms"),
        Figure("import xamp and every name", everything, "ms", bounds.IMPORT_MS, largest),
    ]


def _import(environment: dict[str, str]) -> tuple[float, float]:
    """Milliseconds for ``import xamp``, and for that and every public name."""
    out = subprocess.run(
        [sys.executable, "-c", _CODE], capture_output=True, text=True, check=True, env=environment, timeout=300
    ).stdout
    bare, names = map(float, out.split())
    return bare, names
