"""What can never run on another device is said, in whatever way a script uses it; so is why every other line stays.

Covers: xamp.port.vendor_only, xamp.port.vendor_names, xamp.port.rules.one_vendor, xamp.port.rules.mentions.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from gathering import cases

pytest.importorskip("libcst")  # the extra xamp[port]

from xamp.port.engine import port_text
from xamp.port.rule import Grade
from xamp.port.vendor_names import library_of, package_of
from xamp.port.vendor_only import LIBRARIES

FOLDER = Path(__file__).resolve().parents[2] / "data" / "port"

IMPORTS = (
    *("from numba import cuda", "import numba.cuda as nc", "from numba.cuda import jit", "import spconv.pytorch as sp"),
    *("import cupy as cp", "from cupyx.scipy import sparse", "import pynvml", "from flash_attn import flash_attn_func"),
    *("import xformers.ops", "import bitsandbytes as bnb", "import MinkowskiEngine as ME", "from mmcv.ops import nms"),
    *("from mmcv import ops", "import pycuda.autoinit", "from nvidia.dali.plugin.pytorch import DALIGenericIterator"),
    *("import triton", "import triton.language as tl", "import tensorrt as trt", "from torch2trt import torch2trt"),
    *("from transformer_engine import pytorch", "import cudf", "from faiss import StandardGpuResources"),
    *("import nvdiffrast.torch as dr", "from torch_scatter import scatter", "from pointnet2 import pointnet2_utils"),
    *("import acl", "from te.platform import cce", "from mindspeed.core import parallel", "import torchair as tng"),
    *("from cuda import cudart", "from torch.distributed import ProcessGroupNCCL", "from gpustat import *"),
)
USES = (
    ("import numba\n@numba.cuda.jit\ndef f(a):\n    pass", 2, Grade.UNSUPPORTED),
    ("import faiss\nr = faiss.index_cpu_to_gpu(r, 0, i)", 2, Grade.UNSUPPORTED),
    ("import cv2\ncv2.cuda.setDevice(0)", 2, Grade.UNSUPPORTED),
    ("import spconv\nclass Net(spconv.SparseModule):\n    pass", 2, Grade.UNSUPPORTED),
    ("import torch\nv = torch.version.cuda", 2, Grade.NOTED),
    ("from torch.profiler import ProfilerActivity as A\np = profile(activities=[A.CPU, A.CUDA])", 2, Grade.NOTED),
    ("import torch\nwith torch.autograd.profiler.profile(use_cuda=True) as p:\n    pass", 2, Grade.NOTED),
    ("t = p.key_averages().table(sort_by='cuda_time_total')", 1, Grade.NOTED),
    ("import os\nos.system('nvidia-smi -L')", 2, Grade.UNSUPPORTED),
    ("import subprocess as sp\nsp.Popen(['/usr/bin/nvidia-smi'])", 2, Grade.UNSUPPORTED),
    ("import os\nn = os.popen(f'nvidia-smi -i {i}').read()", 2, Grade.UNSUPPORTED),
    ("import shutil\nif shutil.which('nvcc'):\n    pass", 2, Grade.UNSUPPORTED),
    ("import os\nos.system('pip install -U flash-attn --no-build-isolation')", 2, Grade.UNSUPPORTED),
    (
        "import subprocess as s\ns.run([python, '-m', 'pip', 'install', 'spconv-cu118'])",
        2,
        Grade.UNSUPPORTED,
    ),
    ("import subprocess as s\ns.run(f'{python} -m pip install git+https://a.org/xformers.git')", 2, Grade.UNSUPPORTED),
    ("if not _is_package_available('xformers'):\n    pass", 1, Grade.NOTED),
    ("import ctypes\nctypes.CDLL('libcudart.so')", 2, Grade.NOTED),
    ("import importlib\ncupy = importlib.import_module('cupy')", 2, Grade.NOTED),
    ("import importlib.util\nhas = importlib.util.find_spec('flash_attn')", 2, Grade.NOTED),
    ("setup(install_requires=['torch', 'spconv-cu113>=2'])", 1, Grade.UNSUPPORTED),
    ("s = ort.InferenceSession(p, providers=['CUDAExecutionProvider'])", 1, Grade.NOTED),
    ("import torch\nn = torch._C._cuda_getDeviceCount()", 2, Grade.NOTED),
    ("a = x.__cuda_array_interface__", 1, Grade.NOTED),
    ("import torch\ntorch.ops.load_library('roi_cuda.so')", 2, Grade.NOTED),
    ("from torch.utils.cpp_extension import load\nm = load('m', ['a.cpp', 'a.cu'])", 2, Grade.UNSUPPORTED),
    ("from torch.utils import cpp_extension as c\ne = c.CUDAExtension('m', s)", 2, Grade.UNSUPPORTED),
    ("from . import roi_align_cuda", 1, Grade.NOTED),
    ("import os\nos.system('npu-smi info')", 2, Grade.UNSUPPORTED),
    ("import os\nos.system('pip install mindspeed')", 2, Grade.UNSUPPORTED),
    ("root = '/usr/local/Ascend/driver'", 1, Grade.NOTED),
    ("ray.init(resources={'NPU': 8})", 1, Grade.NOTED),
    ("bundles = [{'NPU': 1, 'CPU': n}]", 1, Grade.NOTED),
    ("import os\nos.system('msnpureport -g error')", 2, Grade.UNSUPPORTED),
    ("import os\nos.environ['RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES'] = '1'", 2, Grade.NOTED),
    ("import ort\ns = ort.InferenceSession(p, providers=['CANNExecutionProvider'])", 2, Grade.NOTED),
    ("from mypkg import _C", 1, Grade.NOTED),
)
NONE = (
    *("import mine.acl", "from .mindspeed import core", "acl = 1", "ascending = sorted(inputs)"),
    *("from mine import cupy", "from .triton import kernels", "import numba", "import mmcv", "from config import _C"),
)

ENVIRONMENT = (
    "os.environ['X'] = '0'",
    "os.environ.setdefault('X', '0')",
    "os.environ.update(X='0')",
    "os.environ.update({**more, 'X': '0'})",
    "os.environ.update([('X', '0')])",
    "os.environ |= {'X': '1'}",
    "os.environ |= dict(X='1')",
    "env = dict(os.environ, X='1')",
    "env = {**os.environ, 'X': '1'}",
    "env = os.environ | {'X': '1'}",
    "env['X'] = gpus",
    "os.putenv('X', '0')",
    "os.environ.pop('X', None)",
    "del os.environ['X']",
    "os.environb[b'X'] = b'0'",
    "n = len(os.environ['X'].split(','))",
    "if 'X' in os.environ:\n    pass",
    "os.system('X=0 python a.py')",
    "os.system(f'X={gpu} python a.py')",
    "cmd = 'export X=%d' % gpu",
    "monkeypatch.setenv('X', '0')",
    "KEY = 'X'",
    "with mock.patch.dict(os.environ, X='0'):\n    pass",
)


def graded(text: str) -> set[tuple[int, Grade]]:
    """The lines and grades of what is said."""
    return {(each.line, each.grade) for each in port_text(f"{text}\n").findings if each.text}


def test_an_import_of_a_library_for_cuda_is_unsupported() -> None:
    with cases() as case:
        for line in IMPORTS:
            with case(line):
                assert (1, Grade.UNSUPPORTED) in graded(line)
                guarded = f"try:\n    {line}\nexcept ImportError:\n    pass" if "*" not in line else ""
                assert not guarded or {grade for _, grade in graded(guarded)} == {Grade.NOTED}


def test_a_use_of_cuda_is_said() -> None:
    with cases() as case:
        for text, line, grade in USES:
            with case(text):
                assert (line, grade) in graded(text)


def test_what_only_looks_alike_is_not() -> None:
    with cases() as case:
        for text in NONE:
            with case(text):
                assert graded(text) == set()


def test_each_way_to_set_a_variable_is_told() -> None:
    with cases() as case:
        for text in ENVIRONMENT:
            for name in ("CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "ASCEND_RT_VISIBLE_DEVICES"):
                with case(text):
                    ported = port_text(f"import os\n{text.replace('X', name)}\n")
                    assert {each.rule for each in ported.findings} == {"visible-devices"}
                    assert not ported.changed


def test_a_part_of_a_path_and_a_message_are_no_variables() -> None:
    for text in ("p = os.path.join(d, 'ASCEND_PROFILER_OUTPUT')", "logger.error(f'no ASCEND_PROFILER_OUTPUT in {d}')"):
        stays = port_text(f"import os\n{text}\n").stays
        assert [each.text.partition(",")[0].startswith("a text") for each in stays] == [True]


def test_texts_that_people_read_are_none() -> None:
    for text in ("p.add_argument('-g', help='CUDA_VISIBLE_DEVICES')", "'CUDA_VISIBLE_DEVICES'", "print('nvidia-smi')"):
        ported = port_text(f"{text}\n")
        assert not ported.findings
        assert [each.text for each in ported.stays] == ["a text that people read"]


def test_a_line_that_names_ascend_stays_with_a_reason() -> None:
    text = "# npu\ncounts = {'NPU': 8}\nuse_npu = True\nprint('an Ascend card')\nimport our_npu.tools\n"
    reasons = {each.line: each.text.partition(",")[0] for each in port_text(f"import torch_npu\n{text}").stays}
    assert reasons == {
        2: "a comment",
        3: "a key",
        4: "a name of the script's own",
        5: "a text that people read",
        6: "a name of another file",
    }
    assert not port_text("inputs = model.input\ndescending = sorted(inputs, reverse=not ascending)\n").stays


def test_a_name_that_is_looked_up_is_no_text_for_people() -> None:
    for text in (
        "hasattr(options, 'FUSED_NPU')",
        "spec = find_spec('torch_npu')",
        "p = imp.find_module('torch_npu')[1]",
    ):
        assert [each.text for each in port_text(f"import torch_npu\n{text}\n").stays] == ["a name that is looked up"]


def test_a_project_that_has_a_library_of_its_own_is_not_told_of_it() -> None:
    text = "import mamba_ssm\nimport cupy\nimportlib.import_module('mamba_ssm')\n"
    assert [each.line for each in port_text(text, own=["mamba_ssm"]).findings] == [2]


GUARDS = {
    "a build": "if torch.cuda.is_available():\n    m = load('m', ['a.cu'])",
    "with more": "if torch.cuda.is_available() and CUDA_HOME is not None:\n    e = CUDAExtension\n",
    "or by force": "if torch.cuda.is_available() or os.getenv('FORCE_CUDA') == '1':\n    sources += ['a.cu']",
    "a choice": "m = load('m', ['a.cu']) if torch.cuda.is_available() else None",
    "the other branch": "if not torch.cuda.is_available():\n    m = None\nelse:\n    from . import m_cuda as m",
    "an early way out": "def f():\n    if not torch.cuda.is_available():\n        return\n    load('m', ['a.cu'])",
    "a name": "has = torch.cuda.is_available()\nif has:\n    import cupy",
    "a function": "def has():\n    return torch.cuda.is_available()\n\n\nif has():\n    from . import _C",
    "an assertion": "assert torch.cuda.is_available()\nm = load('m', ['a.cu'])",
    "a count": "if torch.cuda.device_count() > 0:\n    m = load('m', ['a.cu'])",
    "a helper": "if torch.cuda.is_available():\n    ext.append(make_cuda_ext('m', sources))",
    "an attribute": "self.has = torch.cuda.is_available()\nif self.has:\n    m = load('m', ['a.cu'])",
    "a method": "class A:\n    def has(self):\n        return torch.cuda.is_available()\n\n"
    "    def f(self):\n        return load('m', ['a.cu']) if self.has() else None",
    "a name in the test": "if (has := torch.cuda.is_available()):\n    m = load('m', ['a.cu'])",
    "a cast": "if bool(torch.cuda.is_available()):\n    m = load('m', ['a.cu'])",
    "an argument of a build": "m = load('m', ['a.cpp'], with_cuda=torch.cuda.is_available())",
    "a library": "if torch.cuda.is_available():\n    torch.ops.load_library('roi_cuda.so')",
    "a name that is imported": "from torch.cuda import is_available\nif is_available():\n    m = load('m', ['a.cu'])",
    "a module that is imported": "from torch import cuda\nif cuda.is_available():\n    m = load('m', ['a.cu'])",
    "a module by another name": "import torch.cuda as c\nif c.is_available():\n    m = load('m', ['a.cu'])",
}


def test_a_test_that_guards_a_build_stays_cudas() -> None:
    head = "import os\nimport torch\nfrom torch.utils.cpp_extension import CUDA_HOME, CUDAExtension, load\n"
    with cases() as case:
        for name, text in GUARDS.items():
            with case(name):
                ported = port_text(f"{head}{text}\n")
                assert "xamp" not in re.sub(r"TODO\(xamp\).*", "", ported.text)
                assert any("asks for CUDA itself" in each.text for each in ported.findings)


def test_other_uses_of_a_name_that_asks_for_cuda_itself_are_rewritten() -> None:
    text = "from torch import cuda\nif cuda.is_available():\n    from . import roi_cuda\ncuda.synchronize()\n"
    after = re.sub(r" *# TODO\(xamp\).*\n", "", port_text(text).text)
    assert after == text.replace("if", "import xamp\nif", 1).replace("cuda.sync", "xamp.accel.sync")


def test_a_device_whose_branch_imports_an_extension_stays_cudas() -> None:
    text = "if device.type == 'cuda':\n    from . import roi_cuda\n"
    ported = port_text(text)
    assert "if device.type == 'cuda':\n" in ported.text
    assert "xamp." not in ported.text


def test_a_test_of_a_build_and_of_other_things_is_noted() -> None:
    ported = port_text(
        "import torch\nhas = torch.cuda.is_available()\nif has:\n    from . import m_cuda\nif has:\n    x = x.cuda()\n"
    )
    assert "has = xamp.is_available()" in ported.text
    assert any("guards what is built for CUDA only, and other things" in each.text for each in ported.findings)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_no_line_that_names_cuda_goes_without_a_word(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    ported = port_text(text)
    told = {each.line for each in (*ported.findings, *ported.stays)}
    lines = enumerate(text.splitlines(), 1)
    named = [number for number, line in lines if re.search(r"(?i)cuda|nccl|nvidia|cudnn|\bapex\b", line)]
    kept = set(ported.text.splitlines())
    assert [number for number in named if number not in told and text.splitlines()[number - 1] in kept] == []


def test_the_table_is_sound() -> None:
    for library in LIBRARIES:
        assert library.instead
        assert not library.instead.endswith(".")
        assert library.modules or library.packages
        for module in library.modules.split():
            assert library_of(f"{module}.x") == (module, library)
        for package in library.packages.split():
            assert package == package.lower()
            assert package_of(package.replace("*", "1").replace("-", "_").upper()) is not None
