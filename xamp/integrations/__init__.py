"""Adapters between xamp and the libraries with which people train. Each imports its library only when it is used.

==================  =====================================================================================
``lightning``       ``TrainerPrecision`` and ``FabricPrecision``: precision plugins of Lightning and Fabric
``accelerate``      ``prepare``: in place of ``accelerator.prepare``
``transformers``    ``TrainerMixin``, and ``Trainer`` with it: Hugging Face's Trainer at any level of xamp
``loggers``         ``log_metrics``: the numbers of a session into TensorBoard, wandb, Lightning's loggers, logging
==================  =====================================================================================
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["accelerate", "lightning", "loggers", "transformers"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
