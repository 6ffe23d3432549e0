"""Handles the import of torch_npu in an emulated process: loads the stand-in CANN before it, the kernels after it."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.machinery
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import cast

__all__ = ["find_spec"]


def find_spec(path: Sequence[str] | None) -> importlib.machinery.ModuleSpec | None:
    """The spec of the real torch_npu, with a loader that wraps its own loader."""
    spec = importlib.machinery.PathFinder.find_spec("torch_npu", path)
    if spec is not None and spec.loader is not None:
        spec.loader = _Loader(cast(importlib.machinery.SourceFileLoader, spec.loader))
    return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, real: importlib.machinery.SourceFileLoader) -> None:
        super().__init__(real.name, real.path)

    def exec_module(self, module: ModuleType) -> None:
        os.environ.setdefault("TASK_QUEUE_ENABLE", "0")  # prepare says why
        for folder in os.environ["XAMP_EMULATED_CANN"].split(os.pathsep):
            load_cann(Path(folder))
        with _installed_cann():
            try:
                super().exec_module(module)
            except ImportError as error:
                raise _explained(error) from error
        from xamp.backends.npu.emulation import arithmetic, kernels

        kernels.install()
        _end_refusals_plainly()
        module.npu._lazy_call(arithmetic.decide)
        module.npu._lazy_call(_allocate_silently)


def _end_refusals_plainly() -> None:
    """Keep torch_npu from ending a refusal of the emulation with its line of an unknown application exception."""
    handler = sys.modules["torch_npu.utils._error_code"]._except_handler
    end = handler.handle_exception

    def handle_exception() -> None:
        if "emulated" not in (handler.exception or ""):
            end()

    handler.handle_exception = handle_exception


def _allocate_silently() -> None:
    """Make the first allocation, which warns, once in a process, of the padding of a real card's memory.

    It makes a context on the current card. With ``ACL_OP_INIT_MODE`` a script asks to be spared that, and is warned.
    """
    import torch

    if os.environ.get("ACL_OP_INIT_MODE", "0") != "0":
        return
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        torch.empty(1, device="npu")
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
    memory = sys.modules["torch_npu"].npu
    memory.empty_cache()
    memory.reset_peak_memory_stats()
    memory.reset_accumulated_memory_stats()


def load_cann(folder: Path) -> None:
    """Load the stand-in libraries of a folder, so that torch_npu finds CANN's libraries already loaded."""
    for library in sorted(folder.iterdir()):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


@contextlib.contextmanager
def _installed_cann() -> Iterator[None]:
    """A context with a fake CANN installation, which torch_npu checks while it is imported; so it does not warn.

    Afterwards the installation is gone: scripts and compilers that look for a real one must not find it.
    """
    names = ("ASCEND_HOME_PATH", "ASCEND_OPP_PATH")
    with tempfile.TemporaryDirectory(prefix="xamp-cann-") as home:
        for part in ("opp", "runtime", "compiler"):
            os.mkdir(os.path.join(home, part))
        os.environ.update(zip(names, (home, os.path.join(home, "opp")), strict=True))
        try:
            yield
        finally:
            for name in names:
                os.environ.pop(name, None)


def _explained(error: ImportError) -> ImportError:
    if "undefined symbol" not in str(error):
        return error
    torch = sys.modules["torch"]
    text = f"emulated Ascend: torch_npu was built for another torch than {torch.__version__}: {error}"
    return ImportError(text, name=error.name, path=error.path)
