"""Changes modules as they are imported: nothing is imported earlier than without it."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

__all__ = ["change"]


def change(changes: Mapping[str, Callable[[ModuleType], None]]) -> None:
    """Change each module, now or when it is imported; again it does nothing.

    Args:
        changes: by the name of a module, what changes it.
    """
    if any(isinstance(finder, _Finder) and finder.changes is changes for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder(changes))
    for name, function in changes.items():
        if name in sys.modules:
            function(sys.modules[name])


class _Finder:
    def __init__(self, changes: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self.changes = changes

    def find_spec(
        self, name: str, path: Sequence[str] | None, _: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self.changes:
            return None
        found = importlib.machinery.PathFinder.find_spec(name, path)
        if found is None or found.loader is None:
            return None
        loader: Any = found.loader
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            self.changes[name](module)

        loader.exec_module = exec_module
        return found
