"""``apex.contrib``: the parts that are wrappers around what torch has. ``docs/apex.md`` lists them."""

from __future__ import annotations

import importlib
from typing import Any

from xamp.apex._modules import LEFT_OUT
from xamp.registry.registry import require_torch

require_torch(__name__)

__all__ = ["clip_grad", "optimizers", "xentropy"]


def __getattr__(name: str) -> Any:
    if name in __all__ or f"apex.contrib.{name}" in LEFT_OUT:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
