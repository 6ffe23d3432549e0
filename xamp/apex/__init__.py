"""The parts of NVIDIA's Apex that training scripts used, without Apex: ``from xamp.apex import amp``.

``_frontend`` is ``amp.initialize``, on ``_engine``; ``_modules`` lists what is here, and what of Apex is left out.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from xamp.apex._install import install, tell_left_out, uninstall
from xamp.apex._modules import LEFT_OUT

if TYPE_CHECKING:
    from xamp.apex import amp, contrib, fp16_utils, multi_tensor_apply, normalization, optimizers, parallel

__all__ = [
    "amp",
    "contrib",
    "fp16_utils",
    "install",
    "multi_tensor_apply",
    "normalization",
    "optimizers",
    "parallel",
    "uninstall",
]

_MORE = ("amp_C", "apex_C", "fused_dense", "mlp", "pyprof")

tell_left_out()


def __getattr__(name: str) -> Any:
    if name in __all__ or name in _MORE or f"apex.{name}" in LEFT_OUT:
        from xamp.registry.registry import require_torch

        require_torch(f"xamp.apex.{name}")  # raises an error that says what to install, instead of an ImportError
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
