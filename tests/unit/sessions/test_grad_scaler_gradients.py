"""GradScaler over gradients and optimizers of every kind.

Covers: xamp.sessions.grad_scaler, xamp.scaling.unscale.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from lanes import Lane
from scaler_comparison import FORMS, beside_torch, data, needs_torchs, net, note, spoil, theirs
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import xamp

INF, NAN = float("inf"), float("nan")


def one(lane: Lane | None = None, value: float = 1.0, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """A parameter of two elements."""
    return nn.Parameter(torch.full((2,), value, dtype=dtype, device=None if lane is None else lane.device))


@pytest.mark.parametrize("form", FORMS)
def test_parameters_without_gradients(form: str, lane: Lane) -> None:
    needs_torchs(form, lane)

    def run(scaler: Any) -> Any:
        model = net(device=lane.device)
        model[0].bias.requires_grad_(False)
        unused = one(lane)
        optimizer = FORMS[form]([unused, *model.parameters()])
        seen = []
        for index in range(5):
            optimizer.zero_grad()
            scaler.scale(model(data(index, lane.device)).square().mean()).backward()
            if index == 2:
                spoil(model.parameters(), lane=lane)
            scaler.step(optimizer)
            scaler.update()
            seen.append((note(scaler, model), unused.detach().clone()))
        return seen

    assert beside_torch(run, lane, init_scale=8.0)[-1][1].tolist() == [1.0, 1.0]


def test_a_fused_optimizer_without_any_gradient_passes_and_is_no_check(lane: Lane) -> None:
    def run(scaler: Any) -> Any:
        idle, weight = one(lane), one(lane)
        optimizers: list[Optimizer] = [Adam([idle], lr=0.1, fused=True), SGD([weight], lr=0.125)]
        scaler.scale((weight * 2).sum()).backward()
        first = scaler.step(optimizers[0])
        with pytest.raises(AssertionError, match="No inf checks were recorded prior to update"):
            scaler.update()
        with pytest.raises(RuntimeError, match="already been called since the last update"):
            scaler.step(optimizers[0])
        scaler.step(optimizers[1])
        scaler.update()
        return first, idle.detach(), weight.detach(), scaler.state_dict()

    beside_torch(run, lane)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("value", [2.0, INF, NAN])
def test_sparse_gradients(dtype: torch.dtype, value: float) -> None:
    """One row comes twice, so that the gradient is not coalesced."""

    def run(scaler: Any) -> Any:
        table = nn.Embedding(5, 2, sparse=True, dtype=dtype)
        dense = one(dtype=dtype)
        optimizer = SGD([*table.parameters(), dense], lr=0.125)
        seen = []
        for index in range(4):
            optimizer.zero_grad()
            factor = value if index == 2 else 2.0
            loss = (table(torch.tensor([1, 3, 1])) * factor).sum() + (dense * 3).sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            seen.append((note(scaler, table), dense.detach().clone()))
        return seen

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse invariant checks")
        found = beside_torch(run, init_scale=8.0, growth_interval=2)
    assert found[-1][0][0] == (32.0 if value == 2.0 else 8.0)


def test_half_gradients_are_refused_before_anything_is_changed(lane: Lane) -> None:
    for scaler in (xamp.GradScaler(init_scale=8.0), theirs(lane, init_scale=8.0)):
        full, half = one(lane), one(lane, dtype=torch.float16)
        optimizer = SGD([full, half], lr=0.125)
        scaler.scale((full * 2).sum() + (half * 2).sum().float()).backward()
        for call in (scaler.unscale_, scaler.step):
            with pytest.raises(ValueError, match=re.escape("Attempting to unscale FP16 gradients.")):
                call(optimizer)
        assert full.grad is not None
        assert full.grad.tolist() == [16.0, 16.0]
        half.grad = None  # what was refused may be put right
        scaler.step(optimizer)
        scaler.update()
        assert full.tolist() == [0.75, 0.75]
    message = r"GradScaler wants fp32 parameters.*xamp.initialize\(model, optimizer, level='O2'\)"
    ours = xamp.GradScaler()
    half.grad = torch.ones_like(half)
    ours.scale(half.sum().float())
    with pytest.raises(xamp.PolicyError, match=message):
        ours.step(optimizer)


def test_half_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(5, 2, sparse=True, dtype=torch.float16)
    optimizer = SGD(table.parameters(), lr=0.125)
    for scaler in (xamp.GradScaler(init_scale=8.0), theirs(init_scale=8.0)):
        table.zero_grad()
        scaler.scale(table(torch.tensor([1, 1])).sum().float()).backward()
        with pytest.raises(ValueError, match=re.escape("Attempting to unscale FP16 gradients.")):
            scaler.unscale_(optimizer)


@pytest.mark.parametrize("spoiled", [None, torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("fused", [False, True])
def test_parameters_of_several_dtypes_in_one_optimizer(spoiled: torch.dtype | None, fused: bool) -> None:
    def run(scaler: Any) -> Any:
        params = [one(dtype=dtype) for dtype in (torch.float32, torch.float64, torch.bfloat16)]
        optimizer = AdamW(params, lr=0.125, fused=fused)
        seen = []
        for index in range(4):
            optimizer.zero_grad()
            scaler.scale(sum((p * (index + 2)).sum().double() for p in params)).backward()
            if index == 2 and spoiled is not None:
                spoil(p for p in params if p.dtype is spoiled)
            scaler.step(optimizer)
            scaler.update()
            seen.append((note(scaler), [p.detach().clone() for p in params]))
        return seen

    assert beside_torch(run, init_scale=8.0)[-1][0][0] == (8.0 if spoiled is None else 4.0)


def test_complex_gradients() -> None:
    """Which torch's kernel refuses."""
    weight = one(dtype=torch.complex64)
    optimizer = SGD([weight], lr=0.125)
    scaler = xamp.GradScaler(init_scale=8.0)
    for value in (2 + 2j, complex(0, INF)):
        optimizer.zero_grad()
        scaler.scale(weight.real.sum()).backward()
        assert weight.grad is not None
        weight.grad.copy_(torch.full_like(weight.grad, value * 8))
        scaler.step(optimizer)
        scaler.update()
    assert weight.tolist() == [0.75 - 0.25j] * 2
    assert scaler.get_scale() == 4.0
