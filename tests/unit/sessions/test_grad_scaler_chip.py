"""GradScaler on a chip that saturates: its flag decides, cleared once an iteration before the first backward.

Covers: xamp.sessions.grad_scaler, xamp.scaling.overflow_flag.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from saturating_chip import SATURATING, SaturatingBackend
from scaler_comparison import FORMS, data, net
from torch import nn
from torch.optim import SGD

import xamp
from xamp.registry import registry


@pytest.fixture
def chip(monkeypatch: pytest.MonkeyPatch) -> SaturatingBackend:
    """The backend that serves the CPU in this test."""
    monkeypatch.setattr(registry, "REGISTRY", registry.Registry((SATURATING,), group=None))
    found = registry.resolve("auto", "cpu")
    assert isinstance(found, SaturatingBackend)
    return found


@pytest.mark.parametrize("form", ["SGD-momentum-foreach", "Adam-fused"])
def test_the_flag_decides(form: str, chip: SaturatingBackend) -> None:
    scaler = xamp.GradScaler(init_scale=64.0, growth_interval=2)
    model = net()
    optimizer = FORMS[form](model.parameters())
    found = []
    for index in range(7):
        optimizer.zero_grad()
        chip.overflowed = index == 1  # in the forward, before the loss is scaled: not a gradient's
        scaler.scale(model(data(index)).square().mean()).backward()
        if index == 4:
            chip.make_overflow_(next(p.grad for p in model.parameters() if p.grad is not None))
        before = [p.detach().clone() for p in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        moved = not all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
        found.append((moved, scaler.last_step.name, scaler.get_scale()))
    assert found == [
        (True, "APPLIED", 64.0),
        (True, "APPLIED", 128.0),
        (True, "APPLIED", 128.0),
        (True, "APPLIED", 256.0),
        (False, "SKIPPED", 128.0),
        (True, "APPLIED", 128.0),
        (True, "APPLIED", 256.0),
    ]
    assert chip.calls == ["clear_overflow", "unscale_"] * 7


def test_an_inf_that_somebody_wrote_is_no_overflow_of_the_chip(chip: SaturatingBackend) -> None:
    scaler = xamp.GradScaler(init_scale=64.0)
    weight = nn.Parameter(torch.ones(2))
    optimizer = SGD([weight], lr=0.125)
    scaler.scale(weight.sum()).backward()
    weight.grad = torch.full((2,), float("inf"))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 64.0
    assert weight.tolist() == [-float("inf")] * 2


def test_several_losses_and_optimizers_clear_the_flag_once(chip: SaturatingBackend) -> None:
    scaler = xamp.GradScaler(init_scale=64.0)
    weights = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizers = [SGD([w], lr=0.125) for w in weights]
    for ending in ("update", "set"):
        scaler.scale([torch.ones(()), (torch.ones(()),)])
        for index, (weight, optimizer) in enumerate(zip(weights, optimizers, strict=True)):
            optimizer.zero_grad()
            scaler.scale(weight.sum()).backward()
            if index == 0:
                assert weight.grad is not None
                chip.make_overflow_(weight.grad)
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
        assert [outcome.name for outcome in scaler.last_step.values()] == ["SKIPPED"] * 3
        scaler.update(64.0 if ending == "set" else None)
        assert chip.calls == ["clear_overflow", *["unscale_"] * 3]
        chip.calls.clear()
    assert [w.tolist() for w in weights] == [[1.0, 1.0]] * 3


def test_disabled_the_chip_is_left_alone(chip: SaturatingBackend) -> None:
    scaler: Any = xamp.GradScaler(enabled=False)
    weight = nn.Parameter(torch.ones(2))
    scaler.scale(weight.sum()).backward()
    chip.overflowed = True
    scaler.step(SGD([weight], lr=0.125))
    scaler.update()
    assert chip.calls == []
    assert weight.tolist() == [0.875, 0.875]
