"""Adds to asked.json what torch_npu asks of CANN: to be run once in an environment of each release of torch.

    python tests/data/torch_npu/make.py
    python tests/data/torch_npu/make.py UNPACKED/torch_npu SITE/torch

It fetches torch_npu as ``xamp emulate`` does, unless folders are named, and reads the tables of its libraries, and of
torch's. Each entry is by
the version of torch_npu: the first has all names, a later one those that it has more and fewer than the one before it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from xamp.backends.npu.emulation import asked, cuda_half, wheel

FILE = Path(__file__).with_name("asked.json")
_KINDS = ("functions", "libraries")


def installed() -> tuple[str, dict[str, list[str]]]:
    """The version of the torch_npu that fits the installed torch, and what it asks for."""
    folder, torch = asked.find_torch_npu(wheel.folders()), cuda_half.torch_folder()
    assert folder is not None
    assert torch is not None
    return in_folders(folder, torch)


def in_folders(folder: Path, torch: Path) -> tuple[str, dict[str, list[str]]]:
    """The version of the torch_npu in ``folder``, and what it asks for beside the torch in the other."""
    version = (folder / "version.py").read_text(encoding="utf-8").split("'")[1].partition("+")[0]
    return version, {
        kind: sorted(found) for kind, found in zip(_KINDS, asked.asked_of_cann(folder, torch), strict=True)
    }


def read() -> dict[str, dict[str, list[str]]]:
    """All that each recorded version asks for."""
    whole: dict[str, dict[str, list[str]]] = {}
    last: dict[str, set[str]] = {kind: set() for kind in _KINDS}
    for version, entry in json.loads(FILE.read_text(encoding="utf-8")).items():
        last = {kind: last[kind] - {*entry[kind]["gone"]} | {*entry[kind]["new"]} for kind in _KINDS}
        whole[version] = {kind: sorted(last[kind]) for kind in _KINDS}
    return whole


def write(whole: dict[str, dict[str, list[str]]]) -> None:
    """Write all of it as differences, the oldest first."""
    entries: dict[str, Any] = {}
    last: dict[str, set[str]] = {kind: set() for kind in _KINDS}
    for version in sorted(whole, key=_order):
        now = {kind: {*whole[version][kind]} for kind in _KINDS}
        entries[version] = {
            kind: {"new": sorted(now[kind] - last[kind]), "gone": sorted(last[kind] - now[kind])} for kind in _KINDS
        }
        last = now
    FILE.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")


def _order(version: str) -> list[int]:
    return [int(part) for part in version.replace("post", "").replace("rc", "-1.").split(".")]


if __name__ == "__main__":
    version, found = in_folders(*map(Path, sys.argv[1:])) if sys.argv[1:] else installed()
    known = read() if FILE.is_file() else {}
    write({**known, version: found})
    print(f"torch_npu {version}: {len(found['functions'])} functions, {len(found['libraries'])} libraries")
