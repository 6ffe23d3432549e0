"""Fused optimizers with the emulated faults of the card's kernels, and how often a step waits for the device.

Covers: backends.npu.backend, backends.npu.emulation.deviations, xamp.registry.fused_classes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

import xamp
from xamp.backends.npu.chips import Chip
from xamp.contract import Backend
from xamp.errors import UnsupportedPolicy
from xamp.testing.reads import HostReads

NPU = torch.device("npu", 0)
Make = Callable[[Any], Any]
FUSED: dict[str, tuple[Make, Make]] = {
    "AdamW": (lambda p: AdamW(p, lr=0.01, fused=True), lambda p: AdamW(p, lr=0.01, foreach=False)),
    "Adam": (lambda p: Adam(p, lr=0.01, fused=True), lambda p: Adam(p, lr=0.01, foreach=False)),
    "SGD": (
        lambda p: SGD(p, lr=0.01, momentum=0.9, fused=True),
        lambda p: SGD(p, lr=0.01, momentum=0.9, foreach=False),
    ),
}


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5)).to(NPU)


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).to(NPU)


def train(make: Make, level: str, backend: Backend, overflows: tuple[int, ...], **options: Any) -> Any:
    model = make_net()
    optimizer = make(model.parameters())
    xamp.initialize(model, optimizer, level, init_scale=256.0, growth_interval=3, verbosity=0, **options)
    scales = []
    for step in range(8):
        optimizer.zero_grad()
        with xamp.scale_loss(model(batch(step)).square().mean(), optimizer) as scaled:
            scaled.backward()
            if step in overflows:
                backend.make_overflow_(next(model.parameters()).grad)  # type: ignore[arg-type]
        optimizer.step()
        scales.append(xamp.loss_scale(optimizer))
    return scales, [p.detach().cpu() for p in xamp.master_params(optimizer)]


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", FUSED)
def test_a_fused_optimizer_trains_as_the_unfused_one(name: str, level: str, backend: Backend) -> None:
    fused, plain = FUSED[name]
    scales, params = train(fused, level, backend, (0, 4))
    wanted_scales, wanted = train(plain, level, backend, (0, 4), fused=False)
    assert scales == wanted_scales == [128.0, 128.0, 128.0, 256.0, 128.0, 128.0, 128.0, 256.0]
    assert all(bool(p.isfinite().all()) for p in params)
    torch.testing.assert_close(params, wanted, rtol=1e-6, atol=1e-7)


def test_by_hand_torchs_scaler_lets_the_fused_adamw_step_on_an_overflow(chip: Chip) -> None:
    """The fault that is emulated, without xamp: found_inf and grad_scale are not read."""
    if chip.saturates:
        pytest.skip("no inf shows there")
    model = nn.Linear(6, 5).to(NPU)
    optimizer = AdamW(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("npu", init_scale=1024.0)
    scaler.scale(model(batch(0)).sum()).backward()
    assert model.weight.grad is not None
    model.weight.grad[0, 0] = float("inf")
    scaler.step(optimizer)
    assert not model.weight.isfinite().all()


def test_a_fused_sgd_without_momentum_is_refused_before_anything_changes() -> None:
    model = make_net()
    optimizer = SGD(model.parameters(), lr=0.1, fused=True)
    with pytest.raises(
        UnsupportedPolicy, match=r"SGD was made with fused=True, which refuses to step on npu:0 .*momentum"
    ):
        xamp.initialize(model, optimizer, "O2", verbosity=0)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    optimizer.param_groups[0]["momentum"] = 0.9
    xamp.initialize(model, optimizer, "O2", verbosity=0)


def test_fused_forms_that_are_wrong_are_not_switched_to_and_refused_by_name() -> None:
    for make, fused in ((lambda p: Adam(p), True), (lambda p: AdamW(p), None), (lambda p: SGD(p, lr=0.1), None)):
        model = make_net()
        optimizer: Any = make(model.parameters())
        xamp.initialize(model, optimizer, "O1", verbosity=0)
        assert optimizer.param_groups[0]["fused"] is fused
    model = make_net()
    with pytest.raises(UnsupportedPolicy, match=r"fused=True\): AdamW has no fused implementation that skips rightly"):
        xamp.initialize(model, AdamW(model.parameters()), "O1", fused=True, verbosity=0)


STEPS = 20


def reads_a_step(iterate: Callable[[int], None]) -> float:
    for step in range(3):
        iterate(step)
    with HostReads(NPU) as reads:
        for step in range(STEPS):
            iterate(step)
    return reads.count / STEPS


@pytest.mark.parametrize(
    ("make", "level", "most"),
    [
        (lambda p: Adam(p, lr=0.01), "O1", 0),
        (lambda p: Adam(p, lr=0.01), "O2", 0),
        (lambda p: AdamW(p, lr=0.01), "O1", 1),
        (lambda p: AdamW(p, lr=0.01, fused=True), "O1", 1),
        (lambda p: SGD(p, lr=0.01, momentum=0.9), "O2", 1),
    ],
    ids=["Adam-O1", "Adam-O2", "AdamW-O1", "AdamW-fused-O1", "SGD-O2"],
)
def test_a_step_waits_for_the_device_at_most(make: Make, level: str, most: int, chip: Chip) -> None:
    model = make_net()
    optimizer = make(model.parameters())
    xamp.initialize(model, optimizer, level, init_scale=256.0, verbosity=0)
    batches = [batch(step) for step in range(STEPS)]

    def iterate(step: int) -> None:
        optimizer.zero_grad()
        with xamp.scale_loss(model(batches[step]).square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()

    assert reads_a_step(iterate) == most, chip.name


def test_torch_npus_scaler_waits_three_times_a_step(chip: Chip) -> None:
    model = make_net()
    optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9)
    scaler = sys.modules["torch_npu"].npu.amp.GradScaler(init_scale=256.0)
    batches = [batch(step) for step in range(STEPS)]

    def iterate(step: int) -> None:
        optimizer.zero_grad()
        with torch.autocast("npu", torch.float16):
            loss = model(batches[step]).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    assert reads_a_step(iterate) == 3, chip.name
