"""What releases of torch_npu ask of CANN: recorded for each, and there for the one that fits the installed torch.

Covers: backends.npu.emulation.asked, backends.npu.emulation.elf, backends.npu.emulation.library.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
from ci_scripts import module_at
from emulated_cards import RELEASES, need_emulation

from xamp.backends.npu import emulation
from xamp.backends.npu.emulation import asked, cuda_half, elf, library, wheel
from xamp.registry.find_torch import MINIMUM_TORCH

REFUSED = 500000  # ACL_ERROR_INTERNAL_ERROR: torch_npu raises; of 207000, not supported, it may only warn


@pytest.fixture(scope="module")
def recorded() -> Any:
    """The script that records, as a module."""
    return module_at(RELEASES.with_name("make.py"))


def test_the_record_of_the_installed_one_is_as_its_libraries_say(recorded: Any) -> None:
    need_emulation()
    version, found = recorded.installed()
    known = recorded.read()
    assert version in known, f"torch_npu {version} is not recorded: run {RELEASES.with_name('make.py')} here"
    assert known[version] == found


def test_everything_that_the_installed_one_asks_for_is_there() -> None:
    need_emulation()
    folders = [Path(folder) for folder in emulation.prepare()["XAMP_EMULATED_CANN"].split(":")]
    there = {name for folder in folders for file in folder.iterdir() for name in elf.read(file).defined}
    version = emulation.prepare()["XAMP_EMULATED_PATH"].split(":")
    folder = asked.find_torch_npu([Path(each) for each in version])
    torch = cuda_half.torch_folder()
    assert folder is not None
    assert torch is not None
    functions, libraries = asked.asked_of_cann(folder, torch)
    assert len(functions) > 50
    assert functions <= there
    assert libraries <= {file.name for each in folders for file in each.iterdir()}


def test_what_a_release_asks_for_beyond_the_stand_in_refuses_by_its_name(
    recorded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every recorded release: so each loads, and none of these functions does nothing without a word."""
    monkeypatch.setenv("XAMP_CACHE", str(tmp_path))
    cann = library.build()
    known = recorded.read()
    has = elf.read(cann / library.CORE).defined
    lacking = sorted({name for entry in known.values() for name in entry["functions"]} - has.keys())
    assert "HcclReduceScatter" in lacking, "torch_npu 2.8 names it"
    more = asked.refusing(lacking, ["libsome_new.so"])
    core = ctypes.CDLL(str(cann / library.CORE), mode=ctypes.RTLD_GLOBAL)
    core.aclGetRecentErrMsg.restype = ctypes.c_char_p
    loaded = ctypes.CDLL(str(more / "libsome_new.so"))
    for name in lacking:
        assert getattr(loaded, name)() == REFUSED
        assert core.aclGetRecentErrMsg() == f"emulated Ascend: the stand-in CANN does not serve {name}\n".encode()


def test_no_release_asks_for_a_library_that_the_stand_in_has_not(recorded: Any) -> None:
    assert {name for entry in recorded.read().values() for name in entry["libraries"]} == {*library.SONAMES}


def test_the_oldest_torch_is_that_of_the_core() -> None:
    assert wheel.OLDEST == MINIMUM_TORCH
