"""Installs Apex's casts around torch's functions for a block; and lists torch's attributes, to compare them later."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from xamp.apex import _casts_handle
from xamp.apex._handle import AmpHandle, init

__all__ = ["BF16", "FP16", "FP32", "FP64", "attributes", "casts", "stop"]

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


@contextlib.contextmanager
def casts(patch_type: torch.dtype = FP16, **options: Any) -> Iterator[AmpHandle]:
    """A context with an active handle; afterwards no handle is active."""
    handle = init(patch_type=patch_type, **options)
    assert isinstance(handle, AmpHandle)
    try:
        yield handle
    finally:
        stop()


def stop() -> None:
    """Deactivate every handle."""
    for handle in reversed(list(_casts_handle._handles)):
        handle._deactivate()


def attributes() -> dict[tuple[int, str], Any]:
    """All attributes of torch's loaded modules, of Tensor and of what recurrent modules use: (owner, name) -> value."""
    owners: list[Any] = [torch.Tensor, torch._C.TensorBase, nn.RNNBase, nn.LSTM, nn.Module, nn.Parameter, torch._VF]
    owners += [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "torch"]
    return {
        (id(owner), name): value
        for owner in owners
        for name, value in list(getattr(owner, "__dict__", {}).items())
        if name not in ("__warningregistry__", "COMPILE_COUNTER")
    }
