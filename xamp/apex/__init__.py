"""The parts of NVIDIA's Apex that training scripts used, without Apex: ``from xamp.apex import amp``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xamp.apex import amp

__all__ = ["amp"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
