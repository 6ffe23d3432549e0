"""ci/device_names.py: the core names no device, in any folder of whatever name; the places that may are exact."""

from __future__ import annotations

from pathlib import Path

from ci_scripts import ROOT, script

device_names = script("device_names")
NAMING = 'import torch\n\nKIND = "cuda:0"\nNAMES = {"npu": torch.npu}\n'


def test_the_core_names_none() -> None:
    assert list(device_names.found(ROOT / "xamp")) == []


NAMED = [
    "scaling/backends.py",
    "scaling/backends/inner.py",
    "sessions/cli/x.py",
    "cli/x.py",
    "apex/x.py",
    "port/x.py",
    "sessions/registry/registry.py",
    "registry/registry/x.py",
    "registry/registry.pyx.py",
    "registry/plugins.py",
    "backends.py",
]


def test_a_name_is_found(tmp_path: Path) -> None:
    for inside in NAMED:
        path = tmp_path / inside
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(NAMING, encoding="utf-8")
    found = [line.split(" in the core")[0] for line in device_names.found(tmp_path)]
    ends = ("3: 'cuda:0'", "4: 'npu'", "4: torch.npu")
    assert sorted(found) == sorted(f"xamp/{inside}:{end}" for inside in NAMED for end in ends)


EXEMPT = ["registry/registry.py", "backends/mine.py", "backends/mine/chips.py"]


def test_these_may(tmp_path: Path) -> None:
    for inside in EXEMPT:
        path = tmp_path / inside
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(NAMING, encoding="utf-8")
    assert list(device_names.found(tmp_path)) == []


def test_what_is_exempt_exists() -> None:
    assert [each for each in device_names.EXEMPT if not (ROOT / "xamp" / each).exists()] == []
