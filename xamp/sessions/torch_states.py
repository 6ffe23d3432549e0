"""Serves ``torch.distributed.checkpoint.state_dict``: its functions are wrapped as soon as somebody imports the module.

What they are wrapped by stands in :mod:`xamp.sessions.sharding`, which a training that saves no shards need not load.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

__all__ = ["serve_torch_states"]

_MODULE = "torch.distributed.checkpoint.state_dict"


def serve_torch_states() -> None:
    """Wrap the functions that look parameters up or fill them, now or when their module is imported. Done once."""
    module = sys.modules.get(_MODULE)
    if module is not None:
        _wrap(module)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Wraps the functions as soon as somebody imports their module, which takes long to import."""

    _asking = False

    def find_spec(self, name: str, *_: Any) -> Any:
        """Return the module's own spec, whose loader also wraps."""
        if name != _MODULE or self._asking:
            return None
        self._asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking = False
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            load = loader.exec_module

            def load_and_wrap(module: ModuleType) -> None:
                load(module)
                _wrap(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)

            loader.exec_module = load_and_wrap
        return spec


def _wrap(module: ModuleType) -> None:
    from xamp.sessions.sharding import wrap_states

    wrap_states(module)
