"""``xamp doctor`` where torch is missing or breaks, and where what torch finds is not what it seems.

Covers: xamp.doctor.examine, xamp.doctor.machine, xamp.registry.find_torch.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from site_packages import (
    HANGS,
    INSTALLED,
    LIMIT,
    best_of,
    distribution,
    doctor_finds,
    plain_environment,
    row_of,
    run_doctor,
)
from torch_versions import MINIMUM

from xamp.cli._doctor_text import render, report
from xamp.doctor import examine
from xamp.registry.find_torch import NEWEST_TESTED, as_text
from xamp.registry.findings import NOTE
from xamp.registry.registry import BUILT_INS

PIP = 'pip install "xamp[torch]"'


def torch_in(folder: Path, body: str) -> Path:
    """A torch of one's own, in front of the real one."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(body)
    return folder


def same_cause(found: dict[str, Any]) -> bool:
    return {row["reason"] for row in found["backends"] if row["name"] not in INSTALLED} == {found["torch"]["reason"]}


# --- torch missing, torch broken


def test_without_torch_it_says_what_to_install_once(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None")
    found = doctor_finds(folder=tmp_path, code=1)
    assert found["torch"]["version"] is None
    assert found["torch"]["reason"] == "torch cannot be imported: it is not installed"
    assert PIP in found["torch"]["hint"]
    assert found["chosen"] == {
        "device": None,
        "backend": None,
        "reason": "torch cannot be imported: it is not installed",
    }
    assert (found["ok"], found["recommended"], same_cause(found)) == (False, None, True)
    text = render(found)
    assert "torch     torch cannot be imported: it is not installed\ncure      install it: " in text
    assert text.count(PIP) == 1
    assert "\nresult\n  found     torch cannot be imported: it is not installed\n\nto paste" in text


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise OSError('libacme.so')", "OSError: libacme.so"),
        ("print('Warning: a path is not set.')\nraise SystemExit(9)", "SystemExit: 9"),
        ("__version__ = '1.13.0'", None),
    ],
)
def test_whatever_torch_raises_is_reported_and_does_not_spoil_the_json(
    tmp_path: Path, body: str, reason: str | None
) -> None:
    found = doctor_finds(folder=torch_in(tmp_path, body), code=1)
    assert found["torch"]["reason"] == (
        f"torch cannot be imported: {reason}" if reason else f"torch 1.13.0 is older than {MINIMUM}"
    )
    assert found["torch"]["hint"]
    assert same_cause(found)
    assert found["torch"]["printed"] == (["Warning: a path is not set."] if "print" in body else [])
    assert "cause     as for torch, above" in render(found)


def test_a_torch_that_crashes_the_interpreter_is_reported_with_its_last_words(tmp_path: Path) -> None:
    folder = torch_in(tmp_path, "import os, signal\nprint('dying', flush=True)\nos.kill(os.getpid(), signal.SIGSEGV)")
    done = run_doctor(folder=folder)
    assert (done.returncode, done.stderr) == (1, "")
    text = done.stdout
    assert "torch     torch cannot be imported: it ends its process by SIGSEGV (segmentation fault)\n" in text
    assert "printed   dying\n          Fatal Python error: Segmentation fault\n" in text
    assert "`import torch` has to work first" in text
    assert text.count("cause     as for torch, above") == len(BUILT_INS) + len(INSTALLED)


def test_a_torch_that_hangs_is_reported(tmp_path: Path) -> None:
    found = doctor_finds(folder=torch_in(tmp_path, f"import time\n{HANGS}\ntime.sleep(1e6)"), code=1)
    assert found["torch"]["reason"] == f"torch cannot be imported: it does not finish within {LIMIT} s"
    assert "in <module>" in "".join(found["torch"]["printed"])
    assert same_cause(found)


def test_a_plugin_s_table_explains_a_torch_that_crashes_and_its_file_is_read_without_torch(tmp_path: Path) -> None:
    plugin = (
        "from xamp.contract import BackendSpec, Cause\n"
        "SPEC = BackendSpec('acme', ('cpu',), 'acme:Backend', causes='acme:CAUSES')\n"
        "CAUSES = [Cause('acme firmware (\\\\d)', r'the firmware \\1 is too old', 'flash it', kinds=('crash',))]\n"
    )
    distribution(tmp_path, "xamp-acme", "acme = acme:SPEC", acme=plugin)
    extension = "import os\ndef start():\n    print('acme firmware 3', flush=True)\n    os._exit(11)"
    distribution(tmp_path, "torch-acme", "torch_acme = torch_acme:start", "torch.backends", torch_acme=extension)
    found = doctor_finds(folder=tmp_path, code=1)
    assert found["torch"]["reason"] == "torch cannot be imported: the firmware 3 is too old"
    assert found["torch"]["hint"].startswith("flash it\ntorch ")
    assert (
        "with TORCH_DEVICE_BACKEND_AUTOLOAD=0, which leaves out torch_acme (of torch-acme 1.5)"
        in found["torch"]["hint"]
    )
    assert found["torch"]["detail"] == "it ends its process with exit code 11"
    assert found["torch"]["printed"] == ["acme firmware 3"]
    assert row_of(found, "acme", "xamp-acme 1.5")["reason"] == found["torch"]["reason"]
    assert "[it ends its process with exit code 11]\n  | acme firmware 3\n" in report(found)


def test_where_no_process_can_be_examined_that_is_the_finding(tmp_path: Path) -> None:
    """Every interpreter that starts here ends at once, but the one that asks."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif '-c' in sys.orig_argv and any('xamp.doctor.examine' in word for word in sys.orig_argv):\n"
        "    print('not today', flush=True)\n    os._exit(77)"
    )
    found = doctor_finds(folder=tmp_path, code=1)
    reason = "the process that examines it ends its process with exit code 77"
    assert found["torch"]["reason"] == reason
    assert found["torch"]["printed"] == ["not today"]
    assert same_cause(found)
    assert found["chosen"]["reason"] == reason


# --- what torch finds: an extension that loads itself with torch stands for a driver that is not here

GPU_BUILD = """
import torch
def start():
    def fails():
        raise RuntimeError({message!r})
    torch.version.cuda = "12.8"
    torch._C._cuda_getDeviceCount = lambda: 0
    torch._C._cuda_init = fails
    torch.cuda._cudart = object()
    torch._C._cuda_getCurrentRawStream = lambda index: 0  # an optimizer's step imports it in such a build
"""


@pytest.mark.parametrize(
    ("message", "variables", "cause", "cure"),
    [
        (
            "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver",
            {},
            "there is no NVIDIA driver",
            "in a container start it with the GPUs",
        ),
        (
            "No CUDA GPUs are available",
            {"CUDA_VISIBLE_DEVICES": "-1"},
            "no device is visible under CUDA_VISIBLE_DEVICES='-1'",
            "unset CUDA_VISIBLE_DEVICES, or name devices in it",
        ),
    ],
)
def test_a_cuda_build_without_a_gpu_gives_cause_and_cure_and_is_no_finding(
    tmp_path: Path, message: str, variables: dict[str, str], cause: str, cure: str
) -> None:
    distribution(tmp_path, "fake", "fake = fake:start", "torch.backends", fake=GPU_BUILD.format(message=message))
    found = doctor_finds(folder=tmp_path, code=0, **variables)
    row = row_of(found, "cuda")
    assert (row["usable"], row["broken"], row["reason"]) == (False, False, cause)
    assert cure in row["hint"]
    assert row["detail"] == f"RuntimeError: {message}"
    assert found["chosen"]["device"] == best_of(found)
    assert found["environment"] == variables
    assert f"cause     {cause}\n" in render(found)


TRANSFER = """
import os, sys, types
def start():
    if os.environ.get("TORCH_TRANSFER_TO_NPU") != "1":
        return
    import torch
    patch = types.ModuleType("torch_npu.contrib.transfer_to_npu")
    exec("def is_available(): return True\\ndef device_count(): return 8\\ndef current_device(): return 0\\n"
         "def init(): pass\\ndef set_device(index): pass\\ndef get_device_properties(device=None): return None\\n"
         "def get_device_name(device=None): return 'Ascend910B1'\\n"
         "def is_current_stream_capturing(): return False\\n"  # an optimizer's step asks it in a build with CUDA
         "def is_bf16_supported(including_emulation=True): return True", vars(patch))
    sys.modules["torch_npu.contrib.transfer_to_npu"] = patch
    for name in [name for name in vars(patch) if not name.startswith("__")]:
        setattr(torch.cuda, name, getattr(patch, name))
    torch.accelerator.current_accelerator = lambda check_available=False: None  # an optimizer's step asks it: not CUDA
"""
ASK = """
import json, torch, xamp
assert torch.cuda.is_available() and torch.cuda.device_count() == 8
(row,) = [row for row in xamp.available_backends() if row.name == "cuda"]
try:
    xamp.registry.registry.resolve("auto", "cuda")
except xamp.BackendUnavailable as error:
    print(json.dumps([row.reason, row.hint, str(error), str(xamp.device())]))
"""


@pytest.fixture(scope="module")
def transfer_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stand-in that overwrites the functions of torch.cuda in place, as torch_npu's transfer_to_npu does."""
    folder = tmp_path_factory.mktemp("transfer")
    distribution(folder, "fake-npu", "fake_npu = fake_npu:start", "torch.backends", fake_npu=TRANSFER)
    return folder


REASON = "torch.cuda is not torch's own: torch_npu.contrib.transfer_to_npu is active, and what it calls cuda is an NPU"


def test_transfer_to_npu_is_refused_in_the_process(transfer_site: Path) -> None:
    environment = plain_environment(transfer_site, TORCH_TRANSFER_TO_NPU="1")
    done = subprocess.run([sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, check=True)
    reason, hint, error, device = json.loads(done.stdout)
    assert reason == REASON
    assert "take out `from torch_npu.contrib import transfer_to_npu`, unset TORCH_TRANSFER_TO_NPU" in hint
    assert error == f"no backend for device type 'cuda' can be used:\ncuda: {REASON}\n{hint}"
    assert device != "cuda"


def test_transfer_to_npu_is_reported_by_the_doctor(transfer_site: Path) -> None:
    found = doctor_finds(folder=transfer_site, code=0, TORCH_TRANSFER_TO_NPU="1")
    row = row_of(found, "cuda")
    assert (row["usable"], row["reason"]) == (False, REASON)
    assert found["environment"] == {"TORCH_TRANSFER_TO_NPU": "1"}
    assert found["chosen"]["device"] == best_of(found)


def test_a_distribution_that_cannot_be_read_hides_nothing_else(tmp_path: Path) -> None:
    distribution(tmp_path, "damaged", "x = y:z")
    (tmp_path / "damaged-1.5.dist-info" / "entry_points.txt").write_bytes(b"[other]\n\xff\xfe = a:b\n")
    found = doctor_finds(folder=tmp_path, code=1, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    row = row_of(found, "xamp.backends", "importlib.metadata")
    assert (row["usable"], row["broken"]) == (False, True)
    assert row["reason"].startswith("entry points cannot be listed: UnicodeDecodeError")
    assert row_of(found, "cpu")["usable"] is True


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("2.99.1", "torch 2.99.1 is newer than tested ({})"),
        ("3.0.0a0+git1", "torch 3.0.0a0+git1 is newer than tested ({})"),
        *[(version, None) for version in (f"{MINIMUM}+cpu", f"{as_text(NEWEST_TESTED)}.9+cu130", "main")],
    ],
)
def test_a_torch_that_is_newer_than_all_tested_ones_is_taken_with_a_note(version: str, said: str | None) -> None:
    found = [(finding.severity, finding.text) for finding in examine.release_findings(version)]
    assert found == ([] if said is None else [(NOTE, said.format(as_text(NEWEST_TESTED)))])
