"""``apex.pyprof``: does nothing, and says once what profiles today."""

from __future__ import annotations

import sys
import warnings
from typing import Any

from xamp.registry.registry import require_torch

require_torch(__name__)

__all__ = ["init", "nvtx", "wrap"]

nvtx = sys.modules[__name__]
_told = False


def init(*args: Any, **kwargs: Any) -> None:
    """Warn, at the first call, that nothing is recorded."""
    global _told
    del args, kwargs
    if not _told:
        _told = True
        warnings.warn(
            "apex.pyprof is not part of xamp: nothing is recorded. Use torch.profiler.profile, or "
            "torch.autograd.profiler.emit_nvtx under Nsight Systems.",
            stacklevel=2,
        )


def wrap(*args: Any, **kwargs: Any) -> None:
    """Do as :func:`init`: no function is wrapped."""
    init(*args, **kwargs)
