"""``xamp emulate``: what it runs, what it says where it cannot, and that it stays in its own processes.

Covers: xamp.cli.emulate, backends.npu.emulation, backends.npu.emulation.library, backends.npu.emulation.wheel.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from emulated_cards import CHIPS, INSIDE, emulate, emulated_pytest, need_emulation

from xamp.backends.npu import chips, emulation
from xamp.backends.npu.emulation import library, wheel
from xamp.registry.find_torch import MINIMUM_TORCH

A2, OLD = CHIPS
NAME = "import torch; print(torch.npu.get_device_name(), torch.npu.device_count())"


@pytest.fixture(autouse=True)
def _is_there() -> None:
    need_emulation()


def xamp_emulate(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "xamp", "emulate", *words],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )


def test_the_usual_chip_is_taken_where_none_is_named() -> None:
    done = xamp_emulate("ascend", "--", "python", "-c", NAME)
    assert done.stdout.split() == [chips.DEFAULT, "1"]
    # Behind what the first fetch of all says.
    assert f"xamp: emulated {chips.DEFAULT} (1); operators are computed on the CPU\n" in done.stderr


@pytest.mark.parametrize("words", [["ascend:910a", "--devices", "2"], ["--devices", "2", "ascend:Ascend910A"]])
def test_options_stand_before_the_name_or_after_it(words: list[str]) -> None:
    assert xamp_emulate(*words, "--", "python", "-c", NAME).stdout.split() == [OLD, "2"]


def test_what_stands_after_the_dashes_is_the_commands() -> None:
    show = "import sys; print(sys.argv[1:])"
    done = xamp_emulate("ascend", "--", "python", "-c", show, "--devices", "2", "--", "x")
    assert done.stdout.strip() == "['--devices', '2', '--', 'x']"


@pytest.mark.parametrize(
    ("command", "code"), [(["python", "-c", "raise SystemExit(7)"], 7), (["sh", "-c", "kill -9 $$"], 137)]
)
def test_the_exit_code_is_the_commands(command: list[str], code: int) -> None:
    assert xamp_emulate("ascend", "--", *command).returncode == code


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["ascend:Foo", "--", "true"], "unknown chip 'Foo': known are Ascend910PremiumA, "),
        (["ascend", "--devices", "99", "--", "true"], "99 devices cannot be emulated: 0 to 16 can"),
        (["ascend", "--", "no-such-command"], "cannot run no-such-command: No such file or directory"),
        (["ascend"], "no command given. Write it after --: xamp emulate ascend -- python train.py"),
        (["ascend", "--devices", "2"], "no command given."),
        (["abacus", "--", "true"], "'abacus': nothing of that name can be emulated. Choose one of ascend."),
        (["ascend", "--wheel", "none.whl", "--", "true"], "--wheel none.whl: there is no such file"),
    ],
)
def test_wrong_use_is_said_with_exit_code_2(words: list[str], text: str) -> None:
    done = xamp_emulate(*words)
    assert done.returncode == 2
    assert f"xamp emulate: {text}" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"PATH": "/nonexistent", "CC": ""}, "no C compiler was found, and the emulation compiles one C file"),
        ({"CC": "nocc -x"}, "CC names 'nocc -x', which is not there: set CC to a C compiler or unset it"),
        ({"CC": "false"}, "the C compiler fails: false -std=c11"),
    ],
    ids=["none", "missing", "failing"],
)
def test_without_a_compiler_that_works(environment: dict[str, str], text: str, tmp_path: Path) -> None:
    done = xamp_emulate("ascend", "--", "true", XAMP_CACHE=str(tmp_path), **environment)
    assert done.returncode == 2
    assert text in done.stderr
    assert list(tmp_path.iterdir()) == [], "nothing half made is left"


REFUSAL = "ERROR: Could not find a version that satisfies the requirement torch-npu==2.99.0.* (from versions: {})"


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (
            REFUSAL.format("2.6.0, 2.7.1rc1, 2.7.1.post2, 2.7.1.post10, 2.13.0"),
            r"there is no torch-npu for torch 2.99.0 and Python 3.\d+. For this Python there is one for torch"
            r" 2.7.1 \(torch-npu 2.7.1.post10\), 2.13.0 \(torch-npu 2.13.0\)\. .*: pip install torch==2.13.0$",
        ),
        (REFUSAL.format("2.5.1, 2.6.0"), r"pip cannot fetch torch-npu==2.99.0.\*"),
        ("ERROR: no route to host", r"pip cannot fetch torch-npu==2.99.0.\*:\nERROR: no route to host"),
    ],
)
def test_without_a_torch_npu_that_fits(said: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", said)

    monkeypatch.setenv("XAMP_CACHE", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", refuse)
    with pytest.raises(emulation.EmulationError, match=text):
        wheel._torch_npu("2.99.0")
    assert list(tmp_path.iterdir()) == []


def test_the_pairs_begin_with_the_oldest_torch_that_xamp_takes() -> None:
    assert wheel.OLDEST == MINIMUM_TORCH


def make_wheel(folder: Path, package: str, version: str, module: str, tag: str = "py3-none-any") -> str:
    """A wheel with one module, which knows its version."""
    path = folder / f"{package}-{version}-{tag}.whl"
    info = f"{package}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{module}.py", f"VERSION = {version!r}\n")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        file.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag}\n")
        file.writestr(f"{info}/RECORD", "")
    return str(path)


TAG = f"cp{sys.version_info.major}{sys.version_info.minor}"


def test_wheels_that_were_brought_along_need_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XAMP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(wheel, "_installed", lambda module: module not in ("torch_npu", "yaml"))
    with pytest.raises(emulation.EmulationError, match=r"(?s)pip cannot fetch torch-npu==.*--wheel FILE"):
        wheel.folders()
    brought = [
        make_wheel(tmp_path, "torch_npu", "2.13.0.post1", "torch_npu", f"{TAG}-none-any"),
        make_wheel(tmp_path, "pyyaml", "9.9", "yaml"),
    ]
    monkeypatch.setattr(wheel, "_torch_version", lambda: "2.13.0")
    card, needs = wheel.folders(brought)
    assert (card / "torch_npu.py").read_text() == "VERSION = '2.13.0.post1'\n"
    assert (needs / "yaml.py").read_text() == "VERSION = '9.9'\n"
    assert wheel.folders() == [card, needs], "what was taken is kept"


@pytest.mark.parametrize(
    ("package", "version", "tag", "text"),
    [
        (
            "torch_npu",
            "2.9.0",
            f"{TAG}-none-any",
            f"for torch 2.9.0 and {TAG}, and this environment has torch 2.13.0",
        ),
        ("torch_npu", "2.13.0", "cp27-none-any", f"it is for torch 2.13.0 and cp27, and .* torch 2.13.0 and {TAG}"),
        ("einops", "1.0", "py3-none-any", "takes wheels of torch_npu, numpy, pyyaml, packaging, setuptools only"),
    ],
)
def test_a_wheel_that_does_not_fit_is_refused(
    package: str, version: str, tag: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XAMP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(wheel, "_torch_version", lambda: "2.13.0")
    with pytest.raises(emulation.EmulationError, match=text):
        wheel.folders([make_wheel(tmp_path, package, version, package, tag)])
    assert not (tmp_path / "cache").exists()


def test_two_that_compile_at_a_time_end_with_one(tmp_path: Path) -> None:
    code = "from xamp.backends.npu.emulation.library import build; print(build())"
    environment = {**os.environ, "XAMP_CACHE": str(tmp_path)}
    both = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    folders = {process.communicate()[0].strip() for process in both}
    assert [process.returncode for process in both] == [0, 0]
    (folder,) = folders
    assert [str(path) for path in tmp_path.iterdir()] == [folder]
    assert {path.name for path in Path(folder).iterdir()} == {library.CORE, *library.SONAMES}


def test_a_function_that_the_stand_in_lacks_refuses_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (fetched,) = (Path(folder) for folder in wheel.folders() if folder.name.startswith("torch_npu"))
    (tmp_path / fetched.name).symlink_to(fetched)
    source = library._SOURCE.read_text()
    less = tmp_path / "less.c"
    less.write_text(source.replace("aclrtEventElapsedTime(", "aclrtEventElapsedTimeOther("))
    monkeypatch.setattr(library, "_SOURCE", less)
    monkeypatch.setenv("XAMP_CACHE", str(tmp_path))
    environment = {**os.environ, **emulation.prepare()}
    code = """
import torch
first, second = (torch.npu.Event(enable_timing=True) for _ in range(2))
first.record(), second.record()
print(torch.ones(1, device="npu").item(), flush=True)
first.elapsed_time(second)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.startswith("1.0\n")
    assert done.returncode != 0
    assert "emulated Ascend: the stand-in CANN does not serve aclrtEventElapsedTime" in done.stderr


def test_another_sitecustomize_runs_too(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("MARK = 41\n")
    code = "import sys, torch; print(sys.modules['sitecustomize'].MARK + torch.ones(1, device='npu').item())"
    done = emulate(A2, "python", "-c", code, PYTHONPATH=str(tmp_path))
    assert done.stdout.strip() == "42.0"


def test_an_emulated_command_may_emulate_another_chip() -> None:
    done = emulate(A2, "python", "-m", "xamp", "emulate", f"ascend:{OLD}", "--", "python", "-c", NAME)
    assert done.stdout.split() == [OLD, "1"]


def test_nothing_of_it_is_seen_outside() -> None:
    code = (
        "import importlib.util, torch; "
        "print(importlib.util.find_spec('torch_npu'), torch._C._get_privateuse1_backend_name(), hasattr(torch, 'npu'))"
    )
    emulation.prepare()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["None", "privateuseone", "False"]


@pytest.mark.parametrize(
    ("name", "number", "bf16"), [("Ascend910B", 104, False), ("Ascend910B1", 220, True), ("Ascend910_9391", 250, True)]
)
def test_a_figure_after_910b_makes_another_chip(name: str, number: int, bf16: bool) -> None:
    ask = "import torch; n = torch.npu; print(n.get_device_name(), n.get_soc_version(), n.is_bf16_supported())"
    assert emulate(name, "python", "-c", ask).stdout.split() == [name, str(number), str(bf16)]
    found = chips.find(name)
    assert found is not None
    assert (found.number, found.bf16, found.saturates) == (number, bf16, not bf16)


def test_saturation_that_was_asked_for_is_taken_and_shown() -> None:
    ask = (
        "import torch; from xamp.registry.registry import resolve; backend = resolve('npu', 'npu'); "
        "device = torch.device('npu', 0); print(backend.capabilities(device).overflow); "
        "print(*(row.name for row in backend.precision_settings(device)), sep='\\n')"
    )
    done = emulate(A2, "python", "-c", ask, INF_NAN_MODE_FORCE_DISABLE="1")
    assert done.stdout.splitlines() == [
        "flag",
        "torch.npu.conv.allow_hf32",
        "INF_NAN_MODE_FORCE_DISABLE (environment)",
    ]


@pytest.mark.slow
def test_a_newer_chip_that_is_told_to_saturate_trains_as_an_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INF_NAN_MODE_FORCE_DISABLE", "1")
    emulated_pytest(A2, INSIDE / "test_chip.py", INSIDE / "test_saturation.py")


def test_the_cache_is_where_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XAMP_CACHE", str(tmp_path / "mine"))
    assert library.cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("XAMP_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert library.cache_folder() == tmp_path / "xamp"
    built = library.build()
    assert built.parent == tmp_path / "xamp"
    shutil.rmtree(built)
