"""Every launch that the step in one pass, its check and the lists of ``xamp.apex`` make, on tensors of the host.

Nothing is computed here: what counts is which kernels are launched, with which arguments.
"""

from __future__ import annotations

import itertools
import math
from typing import Any
from unittest import mock

import torch
from torch import nn

import xamp
from xamp.apex import optimizers
from xamp.plans import available, lists

__all__ = ["make_all"]

TORCHS: tuple[tuple[Any, dict[str, Any]], ...] = (
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.Adam, {}),
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"amsgrad": True}),
)
APEXS: tuple[tuple[Any, dict[str, Any]], ...] = (
    *((optimizers.FusedSGD, {"lr": 0.1, "momentum": 0.9, "wd_after_momentum": late}) for late in (False, True)),
    *((optimizers.FusedAdam, options) for options in ({}, {"adam_w_mode": False}, {"capturable": True})),
    *((optimizers.FusedAdagrad, {"adagrad_w_mode": decoupled}) for decoupled in (False, True)),
    *((optimizers.FusedLAMB, options) for options in ({}, {"adam_w_mode": False, "use_nvlamb": True})),
    *((optimizers.FusedNovoGrad, options) for options in ({}, {"reg_inside_moment": True, "norm_type": 0})),
    (optimizers.FusedMixedPrecisionLamb, {}),
)


def make_all() -> None:
    """Make the launches of all steps, where the host passes for a device on which the kernels run."""
    lists._refusal.cache_clear()
    with mock.patch.object(available, "_refusal_of", return_value=""), mock.patch.object(lists, "_on_host", True):
        for level, (kind, options) in itertools.product(("O2", "O5"), TORCHS):
            _step_in_one_pass(level, kind, options)
        for dtype, (kind, options) in itertools.product((torch.float32, torch.float16), APEXS):
            _step_of_apex(dtype, kind, options)
    lists._refusal.cache_clear()


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
