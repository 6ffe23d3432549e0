"""Finds out which package named ``apex`` is installed, if any, without importing it."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import sys
from pathlib import Path
from typing import NamedTuple

__all__ = ["Installed", "find"]

_SUBPACKAGES = ("amp", "normalization", "optimizers", "parallel", "transformer")
"""Subpackages of Apex: every version has some of them. NVIDIA's has no ``amp`` since May 2025."""


class Installed(NamedTuple):
    """The package that ``import apex`` finds.

    Attributes:
        has_amp: whether it contains ``apex.amp``; that may still fail to import, or not work on this torch.
        version: the version of its distribution; empty where none is known.
        says: a description of the package, one line.
        is_apex: whether it is an Apex, of whatever version, and not another project of the same name.
    """

    has_amp: bool
    version: str
    says: str
    is_apex: bool = True


def find() -> Installed | None:
    """The package that ``import apex`` finds, or would find without :func:`xamp.apex.install`; None where none is."""
    spec = _spec()
    if spec is None:
        return None
    folders = [Path(place) for place in spec.submodule_search_locations or ()]
    there = {name for name in _SUBPACKAGES for folder in folders if _is_in(folder, name)}
    version = _version()
    if "amp" in there:
        return Installed(True, version, "an Apex with apex.amp")
    if there:
        return Installed(
            False, version, "NVIDIA's Apex without apex.amp, which was removed in 2025: use `from xamp.apex import amp`"
        )
    return Installed(
        False,
        version,
        "another project of the same name (on PyPI `apex` is a toolkit for the Pyramid web framework), not NVIDIA's "
        "Apex: pip uninstall apex, and use `from xamp.apex import amp`",
        is_apex=False,
    )


def _spec() -> importlib.machinery.ModuleSpec | None:
    for finder in list(sys.meta_path):
        if type(finder).__module__ == "xamp.apex._install":
            continue
        find_spec = getattr(finder, "find_spec", None)
        try:
            spec: importlib.machinery.ModuleSpec | None = find_spec and find_spec("apex", None, None)
        except (ImportError, ValueError):
            continue
        if spec is not None:
            return spec
    return None


def _is_in(folder: Path, name: str) -> bool:
    return (folder / name).is_dir() or (folder / f"{name}.py").exists()


def _version() -> str:
    try:
        return importlib.metadata.version("apex")
    except importlib.metadata.PackageNotFoundError:
        return ""
