"""Fetches the torch-npu that fits the installed torch, into a cache apart from the user's environment.

In the user's environment ``import torch`` would load torch_npu, and fail without CANN.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from xamp.backends.npu.emulation.library import EmulationError, cache_folder, publish

__all__ = ["folders"]

# Modules that torch_npu imports, and their packages; not every release of it declares all of these.
_NEEDS = {"numpy": "numpy", "yaml": "pyyaml", "packaging": "packaging", "setuptools": "setuptools"}
_PIP = ("--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:")
_WHEEL = re.compile(r"(?P<name>\w+)-(?P<version>[^-]+)(-\d[^-]*)?-(?P<python>[^-]+)-[^-]+-[^-]+\.whl")
_OLDEST_TORCH = (2, 7, 1)  # that xamp takes
_TAG = f"cp{sys.version_info.major}{sys.version_info.minor}"


def folders(wheels: Sequence[str] = ()) -> list[Path]:
    """The folders to put on the path: one with torch_npu, and one with its requirements that are not installed.

    This fetches what the cache does not hold yet. If torch_npu is installed in the environment, that one is used.

    Args:
        wheels: files to install in place of what pip would fetch, for a machine without a network.

    Raises:
        EmulationError: there is no torch, no torch-npu for it, a wheel does not fit, or pip fails.
    """
    torch = _torch_version()
    given = _by_package(wheels, torch)
    if outer := os.environ.get("XAMP_EMULATED_PATH"):  # inside an emulated command these are already on the path
        return [Path(folder) for folder in outer.split(os.pathsep)]
    found = [] if _installed("torch_npu") else [_torch_npu(torch, given)]
    missing = [package for module, package in _NEEDS.items() if not _installed(module)]
    if missing:
        found.append(_fetched(f"needs-{_TAG}-{'-'.join(missing)}", [given.get(name, name) for name in missing]))
    return found


def _by_package(wheels: Sequence[str], torch: str) -> dict[str, str]:
    """The paths of ``wheels`` by the name of their package."""
    found = {}
    takes = ("torch_npu", *_NEEDS.values())
    for wheel in wheels:
        path = Path(wheel)
        if not path.is_file():
            raise EmulationError(f"--wheel {wheel}: there is no such file")
        match = _WHEEL.fullmatch(path.name)
        if match is None or match["name"].lower() not in takes:
            raise EmulationError(f"--wheel {wheel}: the emulation takes wheels of {', '.join(takes)} only")
        name, version, python = match["name"].lower(), match["version"], match["python"]
        if name == "torch_npu" and (python != _TAG or re.split(r"\.post|rc", version)[0] != torch):
            raise EmulationError(
                f"--wheel {wheel}: it is for torch {version} and {python}, and this environment has torch {torch} and"
                f" {_TAG}"
            )
        found[name] = str(path.absolute())
    return found


def _torch_version() -> str:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise EmulationError(
            "torch is not installed in this environment: install it first, a build for CPUs or CUDA"
        ) from None
    return version.partition("+")[0]


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _torch_npu(torch: str, given: Mapping[str, str] = MappingProxyType({})) -> Path:
    # Any post-release of exactly this version; a release candidate if there is nothing else.
    name = f"torch_npu-{torch}-{_TAG}"
    try:
        return _fetched(name, [given.get("torch_npu", f"torch-npu=={torch}.*")])
    except EmulationError as error:
        if pairs := _pairs(str(error)):
            python, (newest, _) = ".".join(map(str, sys.version_info[:2])), pairs[-1]
            listed = ", ".join(f"{theirs} (torch-npu {own})" for theirs, own in pairs)
            raise EmulationError(
                f"there is no torch-npu for torch {torch} and Python {python}. For this Python there is one for torch"
                f" {listed}. Use an environment with one of these: pip install torch=={newest}"
            ) from None
        raise


def _pairs(text: str) -> list[tuple[str, str]]:
    """The versions of torch that xamp takes and that have a torch-npu, with the newest torch-npu of each, in order.

    They are read from the releases in pip's error message, which lists those for this Python, the oldest first.
    """
    listed = re.search(r"from versions: ([^)]*)\)", text)
    releases = re.finditer(r"(\d+\.\d+\.\d+)[^,\s]*", listed[1] if listed else "")
    found = {release[1]: release[0] for release in releases if _numbers(release[1]) >= _OLDEST_TORCH}
    return sorted(found.items(), key=lambda pair: _numbers(pair[0]))


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


def _fetched(name: str, packages: list[str]) -> Path:
    wanted = cache_folder() / name
    if wanted.is_dir():
        return wanted
    wanted.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix="fetching-", dir=wanted.parent))
    sys.stderr.write(f"xamp: fetching {', '.join(packages)} for the emulated Ascend card, once, into {wanted}\n")
    command = [sys.executable, "-m", "pip", "install", *_PIP, "--target", str(made), *packages]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise EmulationError(
                f"pip cannot fetch {', '.join(packages)}:\n{done.stderr.strip()}\n"
                "Without a network, name wheels that you brought along: xamp emulate --wheel FILE (docs/ascend.md)."
            )
        publish(made, wanted)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    return wanted
