"""Makes what the installed torch_npu asks of CANN and ``cann.c`` does not have, so that every release of it loads.

Releases differ in the functions of CANN that their libraries name: those of HCCL are named by torch_npu 2.9 and older,
and looked up when they are used by later ones. ``cann.c`` has what must do something. The rest is made here, from the
tables of the libraries that are installed: functions that refuse, which torch_npu reports with the function's name.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from xamp.backends.npu.emulation import cuda_half, elf
from xamp.backends.npu.emulation.library import CORE, SONAMES, built, files, is_found, remembered

__all__ = ["asked_of_cann", "find_torch_npu", "refusing", "stand_ins"]

MORE = "libxamp_emulated_cann_more.so"

_LINE = 'int {name}(void) {{ return xamp_emulated_refuse("{name}"); }}\n'
_C_NAME = re.compile(r"(?!_Z|_?Py)[A-Za-z_]\w*")  # neither C++, which lacks where torch is another, nor Python


def stand_ins(cann: Path, path: Iterable[Path]) -> list[Path]:
    """The folders of what to load before torch_npu: ``cann``, and a second one where that lacks something.

    Args:
        cann: the stand-in for CANN, as it is for every release.
        path: where torch_npu is looked for first.

    Raises:
        EmulationError: the compiler fails.
    """
    folder, torch = find_torch_npu(path), cuda_half.torch_folder()
    if folder is None or torch is None:
        return [cann]

    def make() -> Path:
        asked, needed = asked_of_cann(folder, torch)
        missing = sorted(asked - elf.read(cann / CORE).defined.keys())
        sonames = sorted(name for name in needed - {*SONAMES} if not is_found(name))
        if not missing and not sonames:
            return cann
        return refusing(missing, sonames)

    inputs = (str(cann), files(folder), files(folder / "lib"), files(torch / "lib"))
    return list(dict.fromkeys([cann, remembered("cann", inputs, make)]))


def refusing(functions: Iterable[str], libraries: Sequence[str]) -> Path:
    """A folder of libraries that have these functions, which refuse.

    Raises:
        EmulationError: the compiler fails.
    """
    declared = "int xamp_emulated_refuse(const char *function);\n"
    return built("cann-more", MORE, declared + "".join(_LINE.format(name=name) for name in functions), libraries)


def asked_of_cann(torch_npu: Path, torch: Path) -> tuple[set[str], set[str]]:
    """The functions, and the libraries, that ``import torch_npu`` asks for beyond torch and the system.

    Args:
        torch_npu: the folder of the package.
        torch: that of torch.

    Raises:
        ValueError, OSError: a library cannot be read.
    """
    roots = [file.name for file in torch_npu.glob("_C.*.so")]
    own = elf.read_all(roots, [torch_npu, torch_npu / "lib"])
    theirs = elf.read_all(cuda_half.ROOTS, [torch / "lib"])
    defined = {name for library in (*own, *theirs) for name in library.defined}
    system = ctypes.CDLL(None)
    asked = {
        name
        for library in own
        for name, provider in library.wanted.items()
        if not provider and name not in defined and _C_NAME.fullmatch(name) and not hasattr(system, name)
    }
    there = {library.path.name for library in (*own, *theirs)} | {*cuda_half.HALF}
    needed = {name for library in own for name in library.needed if name not in there and not is_found(name)}
    return asked, needed


def find_torch_npu(path: Iterable[Path]) -> Path | None:
    """The folder of torch_npu: in ``path``, or installed."""
    for folder in path:
        if (folder / "torch_npu" / "__init__.py").is_file():
            return folder / "torch_npu"
    spec = importlib.util.find_spec("torch_npu")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent
