"""Files that are no Python: what is written beside CUDA's, what is told of, and that no line goes without a word.

Covers: xamp.port.other.*.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from gathering import cases

pytest.importorskip("libcst")  # the extra xamp[port]

from xamp.cli import main
from xamp.port.other.kinds import Kind, kind_of
from xamp.port.other.port import port_lines
from xamp.port.rule import Grade

Output = pytest.CaptureFixture[str]
VARIABLE, NPU = "CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"

# X is CUDA's variable, Y the NPU's.
WRITTEN = (
    (Kind.SHELL, "X=0 torchrun a.py", "X=0 Y=0 torchrun a.py"),
    (Kind.SHELL, "export X=0,1", "export X=0,1 Y=0,1"),
    (Kind.SHELL, "export X='0,1'  # two", "export X='0,1' Y='0,1'  # two"),
    (Kind.SHELL, 'A=1 X="$1" python a.py', 'A=1 X="$1" Y="$1" python a.py'),
    (Kind.SHELL, "X=${GPUS:-0,1} python a.py", "X=${GPUS:-0,1} Y=${GPUS:-0,1} python a.py"),
    (Kind.SHELL, "export X=${X:-0}", "export X=${X:-0} Y=${Y:-0}"),
    (Kind.SHELL, "for g in 0 1; do X=$g python a.py & done", "for g in 0 1; do X=$g Y=$g python a.py & done"),
    (Kind.SHELL, "(cd a && X=1 python a.py)", "(cd a && X=1 Y=1 python a.py)"),
    (Kind.SHELL, "nohup env X=0 python a.py", "nohup env X=0 Y=0 python a.py"),
    (Kind.SHELL, "X=0 \\", "X=0 Y=0 \\"),
    (Kind.SHELL, "export X", "export X Y"),
    (Kind.SHELL, "unset X", "unset X Y"),
    (Kind.SHELL, "setenv X 0", "setenv X 0; setenv Y 0"),
    (Kind.SHELL, "set -gx X 0; python a.py", "set -gx X 0; set -gx Y 0; python a.py"),
    (Kind.DOCKER, "ENV X=0", "ENV X=0 Y=0"),
    (Kind.DOCKER, "ENV X 0", "ENV X 0\nENV Y 0"),
    (Kind.DOCKER, "RUN X=0 python a.py", "RUN X=0 Y=0 python a.py"),
    (Kind.MAKE, "export X := 0,1", "export X := 0,1\nexport Y := 0,1"),
    (Kind.MAKE, "\t@X=$(GPU) python a.py", "\t@X=$(GPU) Y=$(GPU) python a.py"),
    (Kind.MAKE, "\tX=$$g python a.py", "\tX=$$g Y=$$g python a.py"),
    (Kind.VARIABLES, "X=0", "X=0\nY=0"),
    (Kind.YAML, '  X: "0,1"', '  X: "0,1"\n  Y: "0,1"'),
    (Kind.YAML, "    - X=0", "    - X=0\n    - Y=0"),
    (Kind.YAML, "  run: X=0 python a.py", "  run: X=0 Y=0 python a.py"),
    (Kind.YAML, "_target_: apex.optimizers.FusedAdam", "_target_: xamp.apex.optimizers.FusedAdam"),
    (Kind.JSON, '{"scaler": "torch.cuda.amp.GradScaler"}', '{"scaler": "xamp.GradScaler"}'),
)

TOLD = (
    (Kind.SHELL, 'X="" python a.py', "hides all of CUDA's devices, and no NPU"),
    (Kind.SHELL, "X=-1 python a.py", "hides all of CUDA's devices, and no NPU"),
    (Kind.SHELL, "X=3,1 python a.py", "3,1 does not ascend"),
    (Kind.SHELL, "X=$(pick) python a.py", "may be no list of indices"),
    (Kind.SHELL, "X=`pick` python a.py", "may be no list of indices"),
    (Kind.SHELL, "X=`pick` python a.py", "the output of a command"),
    (Kind.SHELL, "set -gx X 0 1", "set Y beside it"),
    (Kind.SHELL, "device=${1:-cuda}", "on an NPU write npu,"),
    (Kind.SHELL, "BACKEND=${BACKEND:=nccl}", "on an NPU write hccl"),
    (Kind.SHELL, "module load gcc/9 cuda", "CANN's set_env.sh"),
    (Kind.SHELL, "module load cuda/11.3 cudnn", "CANN's set_env.sh"),
    (Kind.SHELL, "docker run -e X=0 image", "set Y beside it"),
    (Kind.SHELL, "sbatch --export=ALL,X=0 a.sh", "set Y beside it"),
    (Kind.SHELL, 'bash -c "X=0 python a.py"', "set Y beside it"),
    (Kind.SHELL, "if [ -z $X ]; then", "reads what one vendor's devices are told; Y says it for the other's"),
    (Kind.MAKE, "train: export X=0", "set Y beside it"),
    (Kind.JSON, '"env": {"X": "0"}', "set Y beside it"),
    (Kind.BATCH, "set X=0", "set Y beside it"),
    (Kind.YAML, "    - name: X", "set Y beside it"),
    (Kind.YAML, "device: 'cuda:0'", "on an NPU write npu:0"),
    (Kind.YAML, "devices: [cuda:0, cuda:1]", "on an NPU write npu:1"),
    (Kind.JSON, '{"device": "cuda", "cuda": true}', "on an NPU write npu,"),
    (Kind.TOML, 'device = "cuda"', "on an NPU write npu,"),
    (Kind.INI, "device=cuda:1", "on an NPU write npu:1"),
    (Kind.SHELL, "python a.py --device=cuda", "leave the option out"),
    (Kind.YAML, "dist_params: {backend: nccl}", "on an NPU write hccl"),
    (Kind.SHELL, "python a.py --dist-backend nccl", "on an NPU write hccl"),
    (Kind.SHELL, "x=$(nvidia-smi -L | wc -l)", "npu-smi info shows NPUs"),
    (Kind.SHELL, "nsys profile python a.py", "NVIDIA's profiler"),
    (Kind.SHELL, "export LD_LIBRARY_PATH=/usr/local/cuda/lib64", "a folder of CUDA"),
    (Kind.SHELL, "git clone https://github.com/NVIDIA/apex", "xamp takes Apex's place"),
    (Kind.SHELL, "docker run --gpus all image", "Ascend Docker Runtime"),
    (Kind.DOCKER, "FROM nvidia/cuda:11.3-cudnn8-devel", "an image with CUDA"),
    (Kind.DOCKER, "ADD apex /apex/", "xamp takes Apex's place"),
    (Kind.YAML, "nvidia.com/gpu: 1", "huawei.com/Ascend910"),
    (Kind.PACKAGES, "torch==1.9.0+cu111", "a build for CUDA"),
    (Kind.CMAKE, "find_package(CUDA REQUIRED)", "builds for CUDA"),
    (Kind.NATIVE, '#include "cuda_utils.h"', "this source names a device"),
    (Kind.OTHER, "backend nccl", "on an NPU write hccl"),
    (Kind.SHELL, "export Y=0,1", "set X beside it"),
    (Kind.SHELL, "python a.py --device npu:1", "on CUDA write cuda:1"),
    (Kind.SHELL, "DEVICE=${1:-npu}", "on CUDA write cuda,"),
    (Kind.SHELL, "python a.py --dist-backend hccl", "on CUDA write nccl"),
    (Kind.SHELL, "npu-smi info -t usages", "nvidia-smi shows GPUs"),
    (Kind.SHELL, "source /usr/local/Ascend/ascend-toolkit/set_env.sh", "a folder of CANN"),
    (Kind.SHELL, "docker run --device=/dev/davinci0 image", "a card of Ascend"),
    (Kind.SHELL, "docker run --device=/dev/hisi_hdc image", "a card of Ascend"),
    (Kind.YAML, "device_map: 'npu:0'", "on CUDA write cuda:0"),
    (Kind.YAML, "dist_params: {backend: hccl}", "on CUDA write nccl"),
    (Kind.YAML, "huawei.com/Ascend910: 8", "nvidia.com/gpu"),
    (Kind.NATIVE, '#include "torch_npu/csrc/aten/NPUNativeFunctions.h"', "this source names a device"),
    (Kind.SHELL, "grep Epoch train.log | grep npu | awk '{print $2}'", "cuda may stand there on CUDA"),
    (Kind.SHELL, "grep -c 'nccl' train.log", "hccl may stand there on an NPU"),
    (Kind.SHELL, "msnpureport -g error -d 0", "the NPU driver's tool"),
    (Kind.SHELL, "ray start --resources='{\"NPU\": 8}'", "Ray's name for NPUs"),
    (Kind.SHELL, "CONF='/etc/Ascend/ascend_cann_install.info'", "a folder of CANN"),
    (Kind.SHELL, "docker run -v /var/log/npu/slog:/var/log/npu/slog image", "a folder of CANN"),
    (Kind.YAML, 'run: python -c "import torch; print(torch.version.cuda)"', "version.cuda"),
    (Kind.PATCH, "+        # patch this for npu", "apply it, and port what comes out"),
)

UNSUPPORTED = (
    (Kind.PACKAGES, "spconv-cu113==2.1"),
    (Kind.PACKAGES, "  - pytorch::pytorch-cuda=11.8"),
    (Kind.PACKAGES, "Flash_Attn>=2 ; sys_platform == 'linux'"),
    (Kind.PACKAGES, "nvidia-cublas-cu12==12.1"),
    (Kind.PACKAGES, "-e git+https://github.com/facebookresearch/xformers#egg=xformers"),
    (Kind.PACKAGES, "https://a.org/b/flash_attn-2.3+cu118-cp310-linux_x86_64.whl"),
    (Kind.PACKAGES, "./wheels/spconv_cu118-2.3.whl"),
    (Kind.SHELL, "pip install wheels/flash_attn-2.3-cp310.whl"),
    (Kind.SHELL, "pip install -U 'cupy-cuda11x' && python a.py"),
    (Kind.DOCKER, "RUN conda install -y cudatoolkit=10.2"),
    (Kind.TOML, 'dependencies = ["torch", "bitsandbytes>=0.4"]'),
    (Kind.TOML, 'triton = "^2.0"'),
    (Kind.INI, "    nvidia-dali-cuda110"),
    (Kind.CUDA, "__global__ void k() {}"),
    (Kind.PACKAGES, "torch_npu==2.1.0.post6"),
    (Kind.SHELL, "pip install torch-npu mindspeed"),
)

STAYS = (
    (Kind.SHELL, "# cuda", "a comment"),
    (Kind.SHELL, 'echo "X=0"', "a text that people read"),
    (Kind.SHELL, 'echo "launch the triton server"', "a text for people"),
    (Kind.OTHER, "# Copyright NVIDIA", "a comment"),
    (Kind.OTHER, "// Copyright NVIDIA", "a comment"),
    (Kind.SHELL, "X=0 Y=0 python a.py", "X stands beside it", "Y stands beside it"),
    (Kind.SHELL, "export NCCL_DEBUG=INFO", "is read by the software of one vendor's devices only"),
    (Kind.SHELL, "export HCCL_CONNECT_TIMEOUT=1200", "is read by the software of one vendor's devices only"),
    (Kind.SHELL, 'export HCCL_RANGE="HCCL PORT RANGE"', "is read by the software of one vendor's devices only"),
    (Kind.SHELL, "export VLLM_ASCEND_ENABLE_NZ=0", "is read by the software of one vendor's devices only"),
    (Kind.SHELL, "mkdir -p out/$ASCEND_DEVICE_ID", "reads a variable of one vendor's software"),
    (Kind.YAML, "- name: Set CUDA and PyTorch versions", "a text for people"),
    (Kind.YAML, "  with all of [CUDA](https://example.com)", "a text for people"),
    (Kind.YAML, "order: ascend", "a name of the project's own"),
    (Kind.VARIABLES, "ASCEND_GLOBAL_LOG_LEVEL=3", "is read by the software of one vendor's devices only"),
    (Kind.SHELL, "bash run_npu.sh", "a name of the project's own"),
    (Kind.YAML, "use_npu: true", "a name of the project's own"),
    (Kind.TEXT, "Needs CANN 8 and an Ascend 910B.", "a text for people"),
    (Kind.SHELL, "python a.py --no-cuda", "a name of the project's own"),
    (Kind.YAML, "use_cuda: true", "a name of the project's own"),
    (Kind.YAML, "cuda: true", "a name of the project's own"),
    (Kind.JSON, '"keywords": ["cuda"]', "a text for people"),
    (Kind.TEXT, "Needs CUDA 11 and an NVIDIA GPU.", "a text for people"),
    (Kind.INI, "; device = cuda", "a comment"),
    (Kind.CUDA, "// a comment about cuda", "a comment"),
)


def spelled(text: str) -> str:
    """The text with the names of the variables."""
    return text.replace("X", VARIABLE).replace("Y", NPU)


def test_what_is_certain_is_written() -> None:
    with cases() as case:
        for kind, before, after in WRITTEN:
            with case(before):
                before, after = f"{spelled(before)}\n", f"{spelled(after)}\n"
                ported = port_lines(kind, before)
                assert ported.text == after
                assert [finding.grade for finding in ported.findings] == [Grade.CERTAIN]
                assert port_lines(kind, after).text == after
                assert port_lines(kind, before.replace("\n", "\r\n")).text == after.replace("\n", "\r\n")


def test_what_is_to_be_decided_is_told() -> None:
    with cases() as case:
        for kind, line, note in TOLD:
            with case(line):
                ported = port_lines(kind, f"{spelled(line)}\n")
                assert not ported.changed
                assert spelled(note) in " ".join(finding.text for finding in ported.findings)
                assert {finding.grade for finding in ported.findings} == {Grade.NOTED}


def test_what_never_runs_counts() -> None:
    with cases() as case:
        for kind, line in UNSUPPORTED:
            with case(line):
                ported = port_lines(kind, f"{line}\n")
                assert not ported.changed
                assert Grade.UNSUPPORTED in {finding.grade for finding in ported.findings}


def test_what_stays_has_a_reason() -> None:
    with cases() as case:
        for kind, line, *reasons in STAYS:
            with case(line):
                ported = port_lines(kind, f"{spelled(line)}\n")
                assert not ported.changed
                assert {stay.text.partition(",")[0] for stay in ported.stays} == set(map(spelled, reasons))
                assert not ported.findings or kind is Kind.CUDA


def test_a_source_and_a_patch_are_told_of_once() -> None:
    for kind in (Kind.NATIVE, Kind.PATCH):
        ported = port_lines(kind, "x = npu;\n  y = cuda;\n")
        assert [each.line for each in ported.findings] == [1]
        assert [(each.line, each.text) for each in ported.stays] == [(2, "a part of what line 1 tells of")]


def test_a_value_that_reads_a_variable_is_told_of_too() -> None:
    ported = port_lines(Kind.SHELL, "export HCCL_LIST=$CUDA_VISIBLE_DEVICES\n")
    assert [each.column for each in ported.findings] == [len("export HCCL_LIST=$") + 1]


def test_a_name_of_the_project_in_another_file_is_no_library() -> None:
    text = "class_name: mindspeed_rl.tools.ReTool\n"
    assert [each.grade for each in port_lines(Kind.YAML, text).findings] == [Grade.NOTED]
    ported = port_lines(Kind.YAML, text, own={"mindspeed_rl"})
    assert not ported.findings
    assert [each.text for each in ported.stays] == ["a name of the project's own"]


def test_words_that_hold_a_vendors_are_none() -> None:
    assert not port_lines(Kind.SHELL, "--unpublished --nonpublic --inputs --ascending\n").stays


def test_a_package_on_the_next_line_of_an_installation_is_found() -> None:
    found = port_lines(
        Kind.DOCKER, "RUN pip install numpy \\\n    spconv-cu111 \\\n    scipy\nRUN echo spconv\n"
    ).findings
    assert [(each.line, each.grade) for each in found if each.grade is Grade.UNSUPPORTED] == [(2, Grade.UNSUPPORTED)]


NAMES = {
    Kind.SHELL: "run.sh train.slurm job.sbatch x/.envrc a.fish",
    Kind.DOCKER: "Dockerfile Dockerfile.gpu x.dockerfile Containerfile",
    Kind.MAKE: "Makefile GNUmakefile x.mk justfile",
    Kind.VARIABLES: ".env .env.local gpu.env",
    Kind.YAML: "config.yaml docker-compose.yml x.yaml.j2 .github/workflows/test.yml",
    Kind.PACKAGES: "requirements.txt requirements-gpu.txt requirements/base.txt environment.yml "
    "env/environment_gpu.yaml Pipfile poetry.lock constraints.txt dev-requirements.in",
    Kind.TEXT: "README LICENSE README.md notes.txt results.csv train.log",
    Kind.CUDA: "a.cu a.cuh",
    Kind.NATIVE: "a.cpp a.h",
    Kind.CMAKE: "CMakeLists.txt x.cmake",
    Kind.PYTHON: "a.py a.pyw",
    Kind.PATCH: "a.patch a.diff",
    Kind.OTHER: "a.lua tool",
}


@pytest.mark.parametrize("kind", NAMES)
def test_what_a_file_is(kind: Kind) -> None:
    assert [name for name in NAMES[kind].split() if kind_of(name) is not kind] == []


def test_a_file_without_an_ending_is_what_its_first_line_says() -> None:
    assert kind_of("bin/train", b"#!/usr/bin/env python3\n") is Kind.PYTHON
    assert kind_of("bin/train", b"#!/bin/bash -e\n") is Kind.SHELL


REPOSITORY = {
    "train": "#!/usr/bin/env python\nimport torch\nx = torch.zeros(3).cuda()\n",
    "run.sh": "CUDA_VISIBLE_DEVICES=0 python train.py\n# cuda\n",
    "conf/a.yaml": "device: 'cuda:0'\nuse_cuda: true\n",
    "requirements.txt": "numpy\ncupy-cuda11x\n",
    "Dockerfile": "FROM nvidia/cuda:11.0-base\n",
    "README.md": "Needs CUDA.\n",
    "kernel.cu": "__global__ void k() {}\n",
    "data.json": '{"name": "x"}\n',
    "odd.sh": "# \udcff\nexport CUDA_VISIBLE_DEVICES=1\n",
}


def test_a_repository_is_ported_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in REPOSITORY.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
    (tmp_path / "image.bin").write_bytes(b"\0cuda")
    assert main(["port", ".", "--write", "--report", "out.json"]) == 1
    error = capsys.readouterr().err
    assert "./conf/a.yaml:1: noted: names a device: on an NPU write npu:0" in error
    assert "./requirements.txt:2: unsupported: cupy-cuda11x: CuPy has no NPUs" in error
    assert "3 more places name a device and stay" in error
    assert error.endswith("8 files: 3 ported, 0 not readable.\n")
    assert (tmp_path / "run.sh").read_text() == (
        "CUDA_VISIBLE_DEVICES=0 ASCEND_RT_VISIBLE_DEVICES=0 python train.py\n# cuda\n"
    )
    assert (tmp_path / "odd.sh").read_bytes() == (
        b"# \xff\nexport CUDA_VISIBLE_DEVICES=1 ASCEND_RT_VISIBLE_DEVICES=1\n"
    )
    assert "import xamp" in (tmp_path / "train").read_text()
    files = {file["path"]: file for file in json.loads((tmp_path / "out.json").read_text())["files"]}
    assert [(row["line"], row["note"]) for row in files["./run.sh"]["stays"]] == [(2, "a comment")]
    assert "./data.json" not in files
    assert main(["port", ".", "--check"]) == 1  # what is unsupported stays so
    assert "would port" not in capsys.readouterr().out


def test_folders_that_are_not_read_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    monkeypatch.chdir(tmp_path)
    code = "x = y.cuda()\n"
    for name in ("dist/a.py", "build/b.py", "venv/c.py", "env/d.py", "__pycache__/e.py", "old/build/lib/f.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text(code)
    (tmp_path / "env" / "pyvenv.cfg").touch()
    (tmp_path / "old" / "setup.py").touch()
    assert main(["port", ".", "--check"]) == 1
    out, error = capsys.readouterr()
    assert out.splitlines() == [f"would port ./{name}" for name in ("build/b.py", "dist/a.py", "venv/c.py")]
    assert "left out: ./env (an environment of Python), ./old/build (a build made it). Name a folder" in error
    assert main(["port", "env", "--check"]) == 1
    assert capsys.readouterr().out == "would port env/d.py\n"
    subprocess.run(["git", "init", "-q"], check=True)
    (tmp_path / ".gitignore").write_text("dist/\n")
    assert main(["port", ".", "--check"]) == 1
    assert "./dist (git ignores it)" in capsys.readouterr().err
