"""Runs at the start of every Python process of an emulated command, children included: its folder is on PYTHONPATH.

It installs import hooks, and calls what the command asks for at the start. ``emulation.importing`` then handles the
import of torch_npu, by torch or by the user. Python runs only the first ``sitecustomize`` on the path, so this one runs
the next.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Sequence
from types import ModuleType

_HERE = os.path.dirname(os.path.abspath(__file__))


class _Packages:
    """Finds xamp for a command that does not have it installed; an installed xamp is found first."""

    folders = {"xamp": os.environ.get("XAMP_EMULATED_XAMP", ""), "xamp.backends": os.path.abspath(f"{_HERE}/../../..")}

    @classmethod
    def find_spec(
        cls,
        name: str,
        path: Sequence[str] | None = None,  # noqa: ARG003
        target: ModuleType | None = None,  # noqa: ARG003
    ) -> importlib.machinery.ModuleSpec | None:
        folder = cls.folders.get(name)
        if not folder:
            return None
        file = os.path.join(folder, "__init__.py")
        return importlib.util.spec_from_file_location(name, file, submodule_search_locations=[folder])


class _Finder:
    """An import hook ahead of the path: it hands the imports of torch and torch_npu over to the emulation."""

    @staticmethod
    def find_spec(
        name: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,  # noqa: ARG004
    ) -> importlib.machinery.ModuleSpec | None:
        root, _, rest = name.partition(".")
        if root == "torch" and rest in ("", "_C"):
            return cuda_half.find_spec(name, path)
        if name == "torch_npu":
            return importing.find_spec(path)
        return None


def _run_next() -> None:
    others = [entry for entry in sys.path if os.path.abspath(entry) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module  # where the next one expects to find itself
    spec.loader.exec_module(module)


# Do nothing in another Python version than the one that torch_npu was fetched for (a tool that the command calls).
if os.environ.get("XAMP_EMULATED_PYTHON") == f"{sys.version_info.major}.{sys.version_info.minor}":
    # Last on the path, so that the user's installed packages come first.
    sys.path.extend(folder for folder in os.environ["XAMP_EMULATED_PATH"].split(os.pathsep) if folder not in sys.path)
    sys.meta_path.append(_Packages)
    # Now, and not when torch is imported: a script may have made xamp unimportable by then.
    from xamp.backends.npu.emulation import cuda_half, importing

    sys.meta_path.insert(0, _Finder)
    for start in filter(None, os.environ.get("XAMP_EMULATED_START", "").split(",")):
        pkgutil.resolve_name(start)()
_run_next()
