"""Lets torch_npu load beside a torch that is built for CUDA, such as the one that PyPI serves for Linux.

Both register the same names with torch's C++, which ends the process: in such a build ``import torch`` loads CUDA's
half, ``libtorch_cuda.so`` and ``libc10_cuda.so``, whether there is a card or not. Here two small libraries of these
names are loaded before it. The dynamic linker takes what is loaded under a name, so torch's own two stay where they
are, and nothing registers. What torch then lacks is a stub: it tells that there is no card, or it refuses by name.
``torch.cuda.is_available()`` is False, and ``torch.version.cuda`` is as ever. Nothing of the user's environment is
changed or copied, and PyPI's wheels need not be exchanged for others that not every release has.

The stubs are made from the tables of the libraries that are installed, so that no list of a release is kept: all that
the rest of torch asks of the two, and what they alone define, for extensions. CUDA's own libraries (``libcudart`` and
so on) stay in use where they are installed. Those that are missing are stood in for in the same way.
"""

from __future__ import annotations

import ast
import ctypes
import importlib.machinery
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from xamp.backends.npu.emulation import elf
from xamp.backends.npu.emulation.library import EmulationError, built, files, is_found, remembered

__all__ = ["check", "find_spec", "stand_in", "torch_folder"]

HALF = ("libtorch_cuda.so", "libc10_cuda.so")
CORE = "libxamp_no_cuda.so"
ROOTS = ("libtorch_python.so", "libtorch_global_deps.so")
"""What ``import torch`` loads."""

_SOURCE = Path(__file__).with_name("cuda.c")
_CUDAS = re.compile(r"(lib)?(cu|nccl|nv)")  # how CUDA's libraries, and the functions in them, are named
_NAME = re.compile(r"[A-Za-z_]\w*")
_BUILDS = {"hip": "ROCm", "xpu": "XPU"}
_CURE = "use an environment with a build for CPUs or CUDA: pip install torch=={}; for CPUs add --index-url {}"
_CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def check() -> bool:
    """Whether the installed torch is built for CUDA, and must be stood in for; False where there is no torch.

    torch is not imported.

    Raises:
        EmulationError: it is built for something else, or its half for CUDA cannot be taken out.
    """
    folder = torch_folder()
    if folder is None:
        return False
    build = _build(folder / "version.py")
    for attribute, name in _BUILDS.items():
        if build.get(attribute):
            raise _refusal(build, f"{name} {build[attribute]}, and torch_npu does not load beside that")
    if not build.get("cuda"):
        return False
    lacking = [name for name in (*HALF, *ROOTS) if not (folder / "lib" / name).is_file()]
    if lacking:
        why = f"which torch_npu does not load beside; the emulation takes that half out, but {folder / 'lib'} has no"
        raise _refusal(build, f"CUDA {build['cuda']}, {why} {lacking[0]}")
    return True


def stand_in() -> Path | None:
    """The folder of what to load before torch; None for a torch that is built for CPUs.

    It is built if it does not exist yet.

    Raises:
        EmulationError: see :func:`check`; or there is no C compiler, or it fails.
    """
    folder = torch_folder()
    if folder is None or not check():
        return None
    libraries = folder / "lib"
    inputs = (files(libraries), sys.path, _SOURCE.read_bytes())

    def make() -> Path:
        try:
            source, sonames = _written(libraries)
        except (OSError, ValueError) as error:
            raise _refusal(_build(folder / "version.py"), f"CUDA, and its libraries cannot be read: {error}") from error
        return built("cuda", CORE, source, sonames)

    return remembered("cuda", inputs, make)


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads torch after what :func:`stand_in` has built."""

    def __init__(self, real: importlib.machinery.SourceFileLoader, folder: str) -> None:
        super().__init__(real.name, real.path)
        self._folder = Path(folder)

    def exec_module(self, module: ModuleType) -> None:
        libraries = {file.name: ctypes.CDLL(str(file)) for file in sorted(self._folder.iterdir())}
        super().exec_module(module)
        libraries[CORE].xamp_emulated_torch_is_loaded()


class _ExtensionLoader(importlib.machinery.ExtensionFileLoader):
    """Loads ``torch._C``, which then says that it is built without CUDA: some of torch's modules ask it on import."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        vars(module)["_has_cuda"] = False


def find_spec(name: str, path: Sequence[str] | None) -> importlib.machinery.ModuleSpec | None:
    """The spec of torch or of ``torch._C``, with a loader that derives from its own loader.

    None beside a torch that is built for CPUs.
    """
    folder = os.environ.get("XAMP_EMULATED_NO_CUDA")
    spec = importlib.machinery.PathFinder.find_spec(name, path) if folder else None
    loader = spec and spec.loader
    if spec is not None and isinstance(loader, importlib.machinery.SourceFileLoader):
        spec.loader = _Loader(loader, folder or "")
    elif spec is not None and isinstance(loader, importlib.machinery.ExtensionFileLoader):
        spec.loader = _ExtensionLoader(loader.name, loader.path)
    return spec


def torch_folder() -> Path | None:
    """Where torch is; it is not imported."""
    spec = importlib.util.find_spec("torch")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _build(file: Path) -> dict[str, str]:
    """The constants in torch/version.py: ``__version__``, and what torch is built for."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return {}
    found = {}
    for line in tree.body:
        target = line.targets[0] if isinstance(line, ast.Assign) else getattr(line, "target", None)
        value = getattr(line, "value", None)
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant) and isinstance(value.value, str):
            found[target.id] = value.value
    return found


def _refusal(build: Mapping[str, str], what: str) -> EmulationError:
    version = build.get("__version__", "")
    cure = _CURE.format(version.partition("+")[0] or "VERSION", _CPU_INDEX)
    return EmulationError(f"torch {version} is built for {what}: {cure}")


def _written(libraries: Path) -> tuple[str, list[str]]:
    """The source of the stand-in, and the libraries that it is one for."""
    kept = elf.read_all(ROOTS, [libraries], without=HALF)
    half = elf.read_all(HALF, [libraries], without=[library.path.name for library in kept])
    defined = {name for library in kept for name in library.defined}
    wanted = {name: by for library in kept for name, by in library.wanted.items() if name not in defined}
    of_torch = {
        name: symbol
        for library in half
        for name, symbol in library.defined.items()
        if name in wanted or (symbol.strong and name not in defined)
    }
    missing = _missing(kept)
    of_cuda = {name for name, by in wanted.items() if (by in missing) or (not by and missing and _CUDAS.match(name))}
    source = _SOURCE.read_text(encoding="utf-8")
    by_hand = set(re.findall(r"(\w+)\(", source))
    lines = [_line(name, symbol) for name, symbol in sorted(of_torch.items()) if name not in by_hand]
    lines += [f"NO_CARD({name})" for name in sorted(of_cuda - of_torch.keys() - by_hand)]
    return "\n".join([source, *filter(None, lines), ""]), [*HALF, *missing]


def _missing(kept: Iterable[elf.Library]) -> list[str]:
    """The libraries of CUDA that ``kept`` load and that are nowhere."""
    folders = [Path(folder) for library in kept for folder in library.folders]
    folders += [found for entry in sys.path for found in Path(entry).glob("nvidia/*/lib")]
    needed = {name for library in kept for name in library.needed if _CUDAS.match(name)}
    return sorted(
        name for name in needed if not any((folder / name).exists() for folder in folders) and not is_found(name)
    )


def _line(name: str, symbol: elf.Symbol) -> str:
    if not _NAME.fullmatch(name):
        return ""
    if symbol.kind == symbol.FUNCTION:
        made = _made_by(name)
        return f'MAKER({name}, "{made}")' if made else f"REFUSED({name})"
    if name.startswith("_ZTI"):
        return f'TYPE({name}, "{name[4:]}")'
    return f"{'THREAD' if symbol.kind == symbol.THREAD else 'DATA'}({name}, {max(symbol.size, 1)})"


def _made_by(name: str) -> str:
    """The class of which a function is a constructor, both as C++ writes them; empty for other functions."""
    at = len("_ZN")
    while name.startswith("_ZN") and (length := re.compile(r"\d+").match(name, at)):
        at = length.end() + int(length[0])
    return f"{name[2:at]}E" if name[at : at + 3] in ("C1E", "C2E") else ""
