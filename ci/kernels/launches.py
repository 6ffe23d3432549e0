"""Every launch that the step in one pass, its check and the lists of ``xamp.apex`` make, on tensors of the host.

Nothing is computed here: what counts is which kernels are launched, with which arguments.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn

import xamp
from xamp.apex import optimizers
from xamp.plans import available, lists

__all__ = ["make_all"]

TORCHS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adam": (torch.optim.Adam, {}),
    "AdamW": (torch.optim.AdamW, {}),
    "amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
}

APEXS: dict[str, tuple[Any, dict[str, Any]]] = {
    "FusedSGD": (optimizers.FusedSGD, {"lr": 0.1, "momentum": 0.9}),
    "FusedSGD late": (optimizers.FusedSGD, {"lr": 0.1, "momentum": 0.9, "wd_after_momentum": True}),
    "FusedAdam": (optimizers.FusedAdam, {}),
    "FusedAdam L2": (optimizers.FusedAdam, {"adam_w_mode": False}),
    "FusedAdam capturable": (optimizers.FusedAdam, {"capturable": True}),
    "FusedAdagrad": (optimizers.FusedAdagrad, {}),
    "FusedAdagrad W": (optimizers.FusedAdagrad, {"adagrad_w_mode": True}),
    "FusedLAMB": (optimizers.FusedLAMB, {}),
    "FusedLAMB L2": (optimizers.FusedLAMB, {"adam_w_mode": False, "use_nvlamb": True}),
    "FusedNovoGrad": (optimizers.FusedNovoGrad, {}),
    "FusedNovoGrad inside": (optimizers.FusedNovoGrad, {"reg_inside_moment": True, "norm_type": 0}),
    "FusedMixedPrecisionLamb": (optimizers.FusedMixedPrecisionLamb, {}),
}


def make_all() -> None:
    """Make the launches of all steps."""
    with _on_the_host():
        for level, (kind, options) in itertools.product(("O2", "O5"), TORCHS.values()):
            _step_in_one_pass(level, kind, options)
        for dtype, (kind, options) in itertools.product((torch.float32, torch.float16), APEXS.values()):
            _step_of_apex(dtype, kind, options)


@contextlib.contextmanager
def _on_the_host() -> Iterator[None]:
    """Let the host pass for a device on which the kernels run."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(available, "_refusal_of", return_value=""))
        stack.enter_context(mock.patch.object(lists, "_on_host", True))
        lists._refusal.cache_clear()
        stack.callback(lists._refusal.cache_clear)
        yield


def _step_in_one_pass(level: str, kind: Any, options: dict[str, Any]) -> None:
    """Train a model that has a batch norm, whose parameters stay fp32, by steps with and without clipping."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = kind(model.parameters(), **options)
    xamp.initialize(model, optimizer, level, fused="one-pass", verbosity=0)
    for clip in (None, None, 2.0, math.inf, 3.0):
        optimizer.zero_grad()
        with xamp.scale_loss(model(torch.ones(4, 8)).sum(), optimizer) as scaled:
            scaled.backward()
        if clip is not None:
            xamp.clip_grad_norm_(optimizer, 1.0, clip)
        optimizer.step()


def _step_of_apex(dtype: torch.dtype, kind: Any, options: dict[str, Any]) -> None:
    """Step two tensors, and 16: what the JIT specialises on may depend on such a count."""
    sizes = (8, 8) if dtype == torch.float32 else (8,) * 16
    params = [nn.Parameter(torch.ones(size, dtype=dtype)) for size in sizes]
    optimizer = kind(params, **options)
    for _ in range(2):
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
