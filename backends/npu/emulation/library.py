"""Builds stand-ins for libraries with the machine's C compiler, once, into a cache: that for CANN, and others."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from xamp.errors import BackendUnavailable

__all__ = [
    "CORE",
    "SONAMES",
    "EmulationError",
    "build",
    "built",
    "cache_folder",
    "files",
    "find_compiler",
    "is_found",
    "publish",
    "remembered",
]

SONAMES = (
    "libascendcl.so",
    "libhccl.so",
    "libacl_op_compiler.so",
    "libge_runner.so",
    "libgraph.so",
    "libacl_tdt_channel.so",
)
"""The libraries of CANN without which torch_npu does not load."""

CORE = "libxamp_emulated_cann.so"
"""The library with all functions. The others are empty and depend on it."""

_SOURCE = Path(__file__).with_name("cann.c")
_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-std=c11", "-O2", "-fPIC", "-shared", "-pthread", "-fexceptions")


class EmulationError(BackendUnavailable):
    """The emulation cannot run here; the text says why and what to do."""


def cache_folder() -> Path:
    """Where xamp keeps what it builds or fetches: ``XAMP_CACHE``, else a folder in the user's cache."""
    if chosen := os.environ.get("XAMP_CACHE"):
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "xamp"


def publish(made: Path, wanted: Path) -> None:
    """Rename the finished folder ``made`` to ``wanted``, atomically. If another process was first, its folder stays."""
    try:
        made.rename(wanted)
    except OSError:
        if not wanted.is_dir():
            raise
        shutil.rmtree(made, ignore_errors=True)


def build() -> Path:
    """The folder with the stand-in for CANN; it is built if it does not exist yet.

    Raises:
        EmulationError: this is not Linux, there is no C compiler, or the compiler fails.
    """
    return built("cann", CORE, _SOURCE.read_text(encoding="utf-8"), SONAMES)


def built(name: str, core: str, source: str, sonames: Sequence[str]) -> Path:
    """A folder of libraries in the cache, built if it does not exist yet.

    Args:
        name: what the folder's name begins with.
        core: the library that is compiled from ``source``. It holds everything.
        source: C.
        sonames: the libraries for which it stands in: of each an empty one is built, which depends on ``core``.

    Raises:
        EmulationError: this is not Linux, there is no C compiler, or the compiler fails.
    """
    compiler = find_compiler()
    inputs = [source.encode(), _version(compiler), repr((_FLAGS, core, tuple(sonames))).encode()]
    wanted = cache_folder() / f"{name}-{hashlib.sha256(b''.join(inputs)).hexdigest()[:16]}"
    if wanted.is_dir():
        return wanted
    wanted.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix="building-", dir=wanted.parent))
    try:
        _compile(compiler, made, core, source, sonames)
        publish(made, wanted)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    return wanted


def remembered(name: str, inputs: object, make: Callable[[], Path]) -> Path:
    """What ``make`` gave for these ``inputs``; the cache remembers it, for ``make`` reads large files."""
    known = cache_folder() / f"{name}-for-{hashlib.sha256(repr(inputs).encode()).hexdigest()[:16]}"
    if known.is_file() and (made := Path(known.read_text(encoding="utf-8"))).is_dir():
        return made
    made = make()
    part = known.with_suffix(f".{os.getpid()}")
    part.write_text(str(made), encoding="utf-8")
    part.replace(known)
    return made


def files(folder: Path) -> list[tuple[str, int, int]]:
    """The libraries in a folder, each with its size and time: what tells whether they are others than before."""
    stats = [(file.name, file.stat()) for file in sorted(folder.glob("*.so*"))]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def is_found(name: str) -> bool:
    """Whether the dynamic linker finds the library by itself."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def find_compiler() -> list[str]:
    """The words with which the C compiler is called.

    Raises:
        EmulationError: this is not Linux, or there is none.
    """
    if not sys.platform.startswith("linux"):
        raise EmulationError(f"torch-npu exists for Linux only, and this is {sys.platform}")
    return _compiler()


def _compile(compiler: list[str], folder: Path, core: str, source: str, sonames: Sequence[str]) -> None:
    library = folder / core
    text = library.with_suffix(".c")
    text.write_text(source, encoding="utf-8")
    _run([*compiler, *_FLAGS, str(text), f"-Wl,-soname,{core}", "-ldl", "-o", str(library)])
    text.unlink()
    # --no-as-needed: these libraries hold nothing but the dependency, and linkers drop one that nothing refers to.
    link = ("-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN", "-x", "c", os.devnull, "-x", "none", str(library))
    for soname in sonames:
        _run([*compiler, *_FLAGS, f"-Wl,-soname,{soname}", *link, "-o", str(folder / soname)])


def _compiler() -> list[str]:
    if named := os.environ.get("CC"):
        command = shlex.split(named)
        if command and shutil.which(command[0]):
            return command
        raise EmulationError(f"CC names {named!r}, which is not there: set CC to a C compiler or unset it")
    for name in _COMPILERS:
        if found := shutil.which(name):
            return [found]
    raise EmulationError(
        "no C compiler was found, and the emulation compiles one C file: install one (Debian, Ubuntu: apt install gcc;"
        " Fedora: dnf install gcc), or name yours in CC"
    )


def _version(compiler: Sequence[str]) -> bytes:
    return subprocess.run([*compiler, "--version"], capture_output=True, check=False).stdout


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EmulationError(f"the C compiler fails: {shlex.join(command)}\n{done.stderr.strip()}")
