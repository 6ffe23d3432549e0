"""Shows that ``pip install .`` leaves torch, and all else that an environment has, as it was.

    python -m ci.versions.untouched PYTHON

PYTHON is that of the environment, which stays as it is: xamp goes into a new one, which sees the packages of the first.
Exit code 1 where a package is another one afterwards, was added or is gone.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from ci.devices_data import ROOT
from ci.tree import files

__all__ = ["main"]

_SOURCES = ("xamp", "backends", "docs/package.md", "setup.cfg", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in")
_THERE = """
import importlib.metadata, json
found = list(importlib.metadata.distributions())[::-1]  # of two with one name the first counts
print(json.dumps({one.metadata["Name"]: one.version for one in found}))
"""
_SEES = 'import os, sys; print(*filter(os.path.isdir, sys.path), sep="\\n")'
_SITE = 'import sysconfig; print(sysconfig.get_path("purelib"))'
_PIP = "-m pip install --quiet --disable-pip-version-check --no-build-isolation"


def main(words: Sequence[str]) -> int:
    """Compare; see the module. Returns the exit code."""
    (python,) = words
    with tempfile.TemporaryDirectory(prefix="xamp-untouched-") as folder:
        new = _beside(python, Path(folder) / "venv")
        source = _copied(Path(folder) / "source")
        for what in (str(source), f"{source}[torch]"):
            before = _packages(new)
            _call([new, *_PIP.split(), what])
            if changed := _changed(before, _packages(new)):
                print(f"pip install {what.replace(str(source), '.')} changed what was there: {'; '.join(changed)}")
                return 1
        print(f"pip install . and '.[torch]' left torch {_packages(new)['torch']} and all else as it was")
    return 0


def _beside(python: str, folder: Path) -> str:
    """The Python of a new environment that sees the packages of ``python``, its pip among them."""
    _call([python, "-m", "venv", "--without-pip", str(folder)])
    new = str(folder / "bin" / "python")
    site, seen = (
        _call([each, "-I", "-c", code], stdout=subprocess.PIPE) for each, code in ((new, _SITE), (python, _SEES))
    )
    Path(site.strip(), "beside.pth").write_text(seen, encoding="utf-8")
    return new


def _copied(to: Path) -> Path:
    """What a package of the checkout is made of, since building leaves files behind."""
    for name in (name for place in _SOURCES for name in files(ROOT, place)):
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, to / name, follow_symlinks=False)
    return to


def _packages(python: str) -> dict[str, str]:
    found: dict[str, str] = json.loads(_call([python, "-c", _THERE], stdout=subprocess.PIPE))
    return found


def _call(words: Sequence[str], stdout: int | None = None) -> str:
    """Run a command that sees no checkout; what it printed, if that was asked for."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(words, env=environment, stdout=stdout, text=True, check=True, cwd="/").stdout


def _changed(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """What is another one but xamp, in words."""
    names = sorted({*before, *after} - {"xamp"})
    pairs = [(name, before.get(name, "none"), after.get(name, "none")) for name in names]
    return [f"{name} {old} -> {new}" for name, old, new in pairs if old != new]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
