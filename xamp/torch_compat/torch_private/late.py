"""Looks up names of modules that torch imports when they are used: seconds, for those of the compiler."""

from __future__ import annotations

import importlib
import sys
from typing import Any

__all__ = ["if_imported", "imported"]


def imported(name: str) -> Any:
    """Return the object that ``name``, an attribute of a module, stands for; the module is imported if it was not."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def if_imported(name: str) -> Any:
    """Return the object that ``name`` stands for; None if nothing has imported its module yet."""
    path, _, attribute = name.rpartition(".")
    module = sys.modules.get(path)
    return None if module is None else getattr(module, attribute)
