"""A torch that is built for CUDA, and what stands in for its half: of one that is made here, and of the installed.

Covers: backends.npu.emulation.cuda_half, backends.npu.emulation.elf.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from emulated_cards import CHIPS, emulate, need_emulation

from xamp.backends.npu import emulation
from xamp.backends.npu.emulation import cuda_half, elf, library

A2, _ = CHIPS
VERSION = "__version__ = '2.99.0+cu990'\ncuda: Optional[str] = '99.0'\nhip: Optional[str] = None\nxpu = None\n"
needs_cuda_build = pytest.mark.skipif(not torch.version.cuda, reason="torch is not built for CUDA")

# A torch of four libraries: what it asks of CUDA's half and of two of CUDA's libraries, one of which is not installed.
KEPT = """
extern signed char _ZN3c104cuda12device_countEv(void);
extern void *_ZN4half7getListEv(void);
extern void _ZN4half7OptionsC1Eb(void **object);
extern void *_ZTIN4half7OptionsE[2];
extern char _ZN4half5stateE[24];
extern int cudaFree(void *), cudnnGetVersion(void);
__attribute__((constructor)) static void loaded(void) { *(void **)_ZN4half7getListEv() = (void *)loaded; }
int cards(void) { return _ZN3c104cuda12device_countEv(); }
void *list(void) { return _ZN4half7getListEv(); }
void **options(void) { static void *object[4]; _ZN4half7OptionsC1Eb(object); return object; }
const char *type_of(void **object) { return ((const char ***)*object)[-1][1]; }
const char *name(void) { return _ZTIN4half7OptionsE[1]; }
char *state(void) { return _ZN4half5stateE; }
int from_cuda(void) { return cudaFree(0); }
int from_cudnn(void) { return cudnnGetVersion(); }
"""
HALF = """
signed char _ZN3c104cuda12device_countEv(void) { return 7; }
void *_ZN4half7getListEv(void) { return 0; }
void _ZN4half7OptionsC1Eb(void **object) { *object = 0; }
void *_ZTIN4half7OptionsE[2];
char _ZN4half5stateE[24] = {1};
int _ZN4half9extensionEv(void) { return 1; }
__attribute__((weak)) int _ZN4half6inlineEv(void) { return 1; }
"""


def compile_c(made: Path, source: str, *flags: str) -> None:
    text = made.with_suffix(".c")
    text.write_text(source)
    words = [*library.find_compiler(), "-shared", "-fPIC", f"-Wl,-soname,{made.name}", "-Wl,--no-as-needed", str(text)]
    subprocess.run([*words, *flags, "-o", str(made)], check=True)
    text.unlink()


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a torch that is built for CUDA, which is the one that is found."""
    folder = tmp_path / "site" / "torch"
    libraries, cudnn = folder / "lib", tmp_path / "site" / "nvidia" / "cudnn" / "lib"
    libraries.mkdir(parents=True)
    cudnn.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "version.py").write_text(VERSION)
    compile_c(libraries / "libcudart.so.99", "int cudaFree(void *each) { return 0; }")
    compile_c(cudnn / "libcudnn.so.99", "int cudnnGetVersion(void) { return 5; }")
    half = libraries / "libtorch_cuda.so"
    compile_c(libraries / "libc10_cuda.so", "")
    compile_c(half, HALF)
    used = [
        str(half),
        str(libraries / "libc10_cuda.so"),
        str(libraries / "libcudart.so.99"),
        str(cudnn / "libcudnn.so.99"),
    ]
    compile_c(libraries / "libtorch_python.so", KEPT, *used, f"-Wl,-rpath,{cudnn}")
    compile_c(libraries / "libtorch_global_deps.so", "")
    (libraries / "libcudart.so.99").unlink()
    monkeypatch.setenv("XAMP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cuda_half, "torch_folder", lambda: folder)
    return folder


def in_a_child(stand_in: Path, torch_folder: Path, code: str) -> str:
    begin = f"""
import ctypes, pathlib
loaded = {{file.name: ctypes.CDLL(str(file)) for file in sorted(pathlib.Path({str(stand_in)!r}).iterdir())}}
torch = ctypes.CDLL({str(torch_folder / "lib" / "libtorch_python.so")!r})
torch.list.restype = torch.options.restype = torch.state.restype = ctypes.c_void_p
torch.type_of.restype = torch.name.restype = ctypes.c_char_p
"""
    done = subprocess.run([sys.executable, "-c", begin + code], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_what_torch_asks_of_cudas_half_is_there(made: Path) -> None:
    stand_in = cuda_half.stand_in()
    assert stand_in is not None
    code = """
print(torch.cards(), torch.from_cuda(), torch.from_cudnn())
print(ctypes.c_void_p.from_address(torch.list()).value is not None, "what registers has a place")
print(torch.type_of(ctypes.c_void_p(torch.options())), torch.name(), ctypes.string_at(torch.state(), 24).strip(b"\\0"))
"""
    assert in_a_child(stand_in, made, code).splitlines() == [
        "0 100 5",  # no card; no device, by the missing libcudart; the libcudnn that is installed
        "True what registers has a place",
        "b'N4half7OptionsE' b'N4half7OptionsE' b''",
    ]
    assert cuda_half.stand_in() == stand_in, "what was made is kept"


@pytest.mark.parametrize(("call", "name"), [("list", "_ZN4half7getListEv"), ("options", "_ZN4half7OptionsC1Eb")])
def test_what_is_called_once_torch_is_loaded_is_refused_by_its_name(made: Path, call: str, name: str) -> None:
    stand_in = cuda_half.stand_in()
    assert stand_in is not None
    said = in_a_child(stand_in, made, f"loaded[{cuda_half.CORE!r}].xamp_emulated_torch_is_loaded(); torch.{call}()")
    # Beside a real torch it is torch's own error.
    assert said == f"emulated Ascend: CUDA's half of torch is not there, and {name} was called\n"


def test_extensions_find_what_the_half_alone_defines(made: Path) -> None:
    stand_in = cuda_half.stand_in()
    assert stand_in is not None
    defined = elf.read(stand_in / cuda_half.CORE).defined
    assert "_ZN4half9extensionEv" in defined
    assert "_ZN4half6inlineEv" not in defined, "an extension has its own copy of an inline function"
    assert defined["_ZN4half5stateE"].size == 24


def test_the_stand_in_is_made_anew_for_another_torch(made: Path) -> None:
    first = cuda_half.stand_in()
    compile_c(made / "lib" / "libtorch_cuda.so", HALF + "int _ZN4half5newerEv(void) { return 1; }")
    second = cuda_half.stand_in()
    assert first is not None
    assert second is not None
    assert first != second
    assert "_ZN4half5newerEv" in elf.read(second / cuda_half.CORE).defined


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("hip: Optional[str] = None", "hip: Optional[str] = '7.0'", "is built for ROCm 7.0, and torch_npu does not"),
        ("xpu = None", "xpu = '20250300'", "is built for XPU 20250300, and torch_npu does not load beside that"),
    ],
)
def test_another_build_is_refused_before_anything_is_fetched(
    made: Path, old: str, new: str, text: str, tmp_path: Path
) -> None:
    (made / "version.py").write_text(VERSION.replace(old, new))
    with pytest.raises(emulation.EmulationError, match=text) as caught:
        emulation.prepare()
    assert "pip install torch==2.99.0; for CPUs add --index-url https://download.pytorch.org/whl/cpu" in str(
        caught.value
    )
    assert not (tmp_path / "cache").exists()


def test_a_half_that_cannot_be_taken_out_is_refused(made: Path, tmp_path: Path) -> None:
    (made / "lib" / "libtorch_cuda.so").unlink()
    with pytest.raises(emulation.EmulationError, match=r"built for CUDA 99.0, .* has no libtorch_cuda.so: use"):
        emulation.prepare()
    assert not (tmp_path / "cache").exists()


def test_without_a_compiler_nothing_is_fetched(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(emulation.EmulationError, match="CC names 'no-such-compiler', which is not there"):
        emulation.prepare()
    assert not (tmp_path / "cache").exists()


def test_a_build_for_cpus_needs_nothing(made: Path) -> None:
    (made / "version.py").write_text(VERSION.replace("'99.0'", "None"))
    assert cuda_half.stand_in() is None


def test_the_tables_are_those_that_the_loader_sees() -> None:
    """Of libraries that are installed: what a table says is defined is found, and what it says is needed is loaded."""
    file = next(Path(torch.__file__).with_name("lib").glob("libc10.so"))
    found = elf.read(file)
    loaded = ctypes.CDLL(str(file))
    assert len(found.defined) > 500
    assert all(hasattr(loaded, name) for name, symbol in found.defined.items() if symbol.kind == symbol.FUNCTION)
    maps = Path("/proc/self/maps").read_text()
    assert {*found.needed} >= {"libstdc++.so.6", "libc.so.6"}
    assert all(name.partition(".so")[0] in maps for name in found.needed if name.startswith("libstdc++"))
    assert found.wanted["malloc"] == "libc.so.6"


def test_what_is_no_library_is_refused(tmp_path: Path) -> None:
    for content in (b"text of more than sixty-four bytes, which a header of ELF has, and then some", b"\x7fELF\2\1"):
        (tmp_path / "libx.so").write_bytes(content)
        with pytest.raises(ValueError, match=r"libx\.so is not a shared library that can be read"):
            elf.read(tmp_path / "libx.so")


ASK = """
import torch
def ask(*_):
    return torch.cuda.is_available(), torch.cuda.device_count(), torch.version.cuda, torch.ones(1, device="npu").item()
"""
CHILDREN = """
import multiprocessing, sys, torch
from torch.utils.data import DataLoader
from asked import ask
class Data(torch.utils.data.Dataset):
    def __len__(self): return 1
    def __getitem__(self, index): return str(ask())
if __name__ == "__main__":
    print("main", ask())
    for method in ("spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(method, *pool.map(ask, [0]))
    for each in DataLoader(Data(), num_workers=1, multiprocessing_context="spawn"):
        print("worker", each[0])
"""


@needs_cuda_build
def test_every_process_is_without_cuda(tmp_path: Path) -> None:
    (tmp_path / "asked.py").write_text(ASK)
    (tmp_path / "children.py").write_text(CHILDREN)
    expected = f"(False, 0, {torch.version.cuda!r}, 1.0)"
    done = emulate(A2, "python", tmp_path / "children.py")
    lines = done.stdout.splitlines()
    assert lines == [f"{name} {expected}" for name in ("main", "spawn", "forkserver", "worker")], done.stderr
    (tmp_path / "rank.py").write_text("from asked import ask\nprint(ask(), flush=True)\n")
    done = emulate(A2, "torchrun", "--standalone", "--nproc-per-node=2", tmp_path / "rank.py", devices=2)
    assert done.stdout.splitlines() == [expected] * 2, done.stderr


@needs_cuda_build
def test_what_needs_cuda_is_an_error_that_says_so() -> None:
    code = """
import torch
for call in ("torch.ones(1, device='cuda')", "torch.cuda.init()", "torch._C._cuda_getCurrentStream(0)"):
    try:
        print("taken", eval(call))
    except RuntimeError as error:
        print(str(error).splitlines()[0][:40])
"""
    done = emulate(A2, "python", "-c", code)
    first, second, third = done.stdout.splitlines()
    assert first.startswith("Cannot initialize CUDA without ATen_cuda")
    assert second.startswith("Cannot initialize CUDA without ATen_cuda")
    assert third.startswith("emulated Ascend: CUDA's half of torch is")


def test_the_environment_of_the_command_alone_is_without_cuda() -> None:
    need_emulation()
    found = emulation.prepare()
    assert bool(found["XAMP_EMULATED_NO_CUDA"]) == bool(torch.version.cuda)
    assert "XAMP_EMULATED_NO_CUDA" not in os.environ
