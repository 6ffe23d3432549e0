"""Warnings that some releases of torch give without a reason that a test could do something about."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import pytest

__all__ = ["FSDP1", "of_fsdp1"]

_MESSAGE = "Deallocating Tensor that still has live PyObject references"
FSDP1 = pytest.mark.filterwarnings(f"ignore:{_MESSAGE}:UserWarning")
"""For tests that wrap a model in FSDP1: when it is collected, torch 2.7 and 2.8 give this warning, without xamp too."""


@contextlib.contextmanager
def of_fsdp1() -> Iterator[None]:
    """For garbage that such tests have left."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", _MESSAGE, UserWarning)
        yield
