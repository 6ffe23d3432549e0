"""Lets a model whose parameters are cast write itself out as what it is: fp32.

``save_pretrained`` (of transformers, and of libraries that follow it) writes ``model.state_dict()``, which holds the
exact fp32 values, and beside it ``model.dtype``. Whoever loads the files casts the weights to that dtype. So the model
answers ``torch.float32`` while it writes. At all other times, as in its forward, it answers with the dtype in which it
computes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from xamp.values.class_swap import make_class, set_class
from xamp.values.lowered import LOWER, is_low_precision

__all__ = ["WRITERS", "writers_of", "writes_its_dtype"]

WRITERS = ("save_pretrained",)
"""Names of methods that write out a model, and which dtype it has."""


def writes_its_dtype(base: type) -> bool:
    """Tell whether modules of class ``base`` have one of :data:`WRITERS` and compute their ``dtype``."""
    return isinstance(getattr(base, "dtype", None), property) and any(hasattr(base, name) for name in WRITERS)


def writers_of(base: type) -> dict[str, Callable[..., Any]]:
    """Return the writers of ``base``, for a subclass: in them ``self.dtype`` is the dtype of what is written."""
    if not writes_its_dtype(base):
        return {}
    return {name: _as_fp32(getattr(base, name)) for name in WRITERS if callable(getattr(base, name, None))}


def _as_fp32(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def write(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = type(self)
        if self.dtype not in LOWER or not any(is_low_precision(p) for p in self.parameters()):
            return function(self, *args, **kwargs)  # a copy, which has 16-bit values only, says so
        set_class(self, _answering_fp32(own))
        try:
            return function(self, *args, **kwargs)
        finally:
            set_class(self, own)

    return write


def _answering_fp32(own: Any) -> type:
    """Return a subclass of ``own`` that says that its dtype is fp32. Its name is that of ``own``."""
    same = {name: getattr(own, name) for name in ("__module__", "__qualname__", "__doc__")}
    return make_class(type(own), own.__name__, (own,), {**same, "dtype": property(lambda _: torch.float32)})
