"""The scripts in ci/, and those that made recorded data, as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

__all__ = ["ROOT", "module_at", "script"]

ROOT = Path(__file__).resolve().parent.parent.parent


def script(name: str) -> Any:
    """The module in ``ci/<name>.py``, run anew."""
    return module_at(ROOT / "ci" / f"{name}.py")


def module_at(path: Path) -> Any:
    """The module in a file, run anew."""
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module
