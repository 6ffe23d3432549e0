"""A chip that saturates, with every gradient finite: its flag alone tells of an overflow, once, where it matters.

Covers: backends.npu.emulation.arithmetic, xamp.scaling.overflow_flag.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

import xamp

NPU = torch.device("npu", 0)
LARGEST = 65504.0
LEVELS = ("O1", "O2")


def overflow_half(x: torch.Tensor) -> torch.Tensor:
    """80000 in fp16, times 0, so that no value shows it."""
    large = torch.full((1,), 40000.0, dtype=torch.float16, device=x.device)
    return (large + large).float().sum() * 0.0


class Backward(torch.autograd.Function):
    """Overflows in the backward, beside the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad + overflow_half(grad).to(grad.dtype)


class Net(nn.Module):
    """Overflows where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 3)
        self.overflows = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x)
        if self.overflows == "forward":
            out = out + overflow_half(out).to(out.dtype)
        if self.overflows == "backward":
            out = Backward.apply(out)  # type: ignore[no-untyped-call]
        return out


def start(level: str) -> tuple[Net, Any]:
    torch.manual_seed(0)
    model = Net().to(NPU)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.125)
    xamp.initialize(model, optimizer, level, init_scale=64.0, verbosity=0)
    return model, optimizer


def iterate(model: Net, optimizer: Any, step: int, overflows: str = "") -> bool:
    """One iteration; whether its step was applied, and moved the masters or left each bit of them."""
    optimizer.zero_grad()
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step)).to(NPU)
    before = [p.detach().clone() for p in xamp.master_params(optimizer)]
    model.overflows = overflows
    loss = model(x).float().square().mean()
    model.overflows = overflows if overflows == "backward" else ""
    with xamp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    assert all(bool(p.grad.isfinite().all()) for p in xamp.master_params(optimizer) if p.grad is not None)
    optimizer.step()
    applied = xamp.session(optimizer).last_step is xamp.StepOutcome.APPLIED
    same = [torch.equal(a, b) for a, b in zip(before, xamp.master_params(optimizer), strict=True)]
    assert same == [not applied] * len(same)
    return applied


def test_values_saturate_and_the_flag_goes_up() -> None:
    utils = sys.modules["torch_npu"].npu.utils
    half: dict[str, Any] = {"dtype": torch.float16, "device": NPU}
    utils.clear_npu_overflow_flag()
    assert not utils.get_npu_overflow_flag()
    assert (torch.full((1,), 60000.0, **half) + 60000).item() == LARGEST
    assert (torch.ones(1, **half) / 0).item() == LARGEST
    assert (torch.zeros(1, **half) / 0).item() == 0.0
    assert torch.full((1,), 1e6, device=NPU).half().item() == LARGEST
    assert (-torch.full((1,), 12.0, **half).exp()).item() == -LARGEST
    assert torch.full((1,), -1.0, **half).sqrt().item() == 0.0
    assert utils.get_npu_overflow_flag()
    assert utils.npu_check_overflow(torch.zeros(1, device=NPU)), "any tensor: it is the device that is asked"
    assert not utils.get_npu_overflow_flag()


def test_an_inf_that_was_there_raises_no_flag() -> None:
    utils = sys.modules["torch_npu"].npu.utils
    utils.clear_npu_overflow_flag()
    masked = torch.zeros(2, 2, device=NPU, dtype=torch.float16).masked_fill(torch.eye(2, device=NPU).bool(), -torch.inf)
    weights = masked.softmax(-1)
    assert weights.tolist() == [[0.0, 1.0], [1.0, 0.0]]
    assert not utils.get_npu_overflow_flag()


@pytest.mark.parametrize(("value", "flag"), [(60000.0, True), (torch.inf, False)], ids=["overflow", "inf"])
def test_sums_within_a_sparse_tensor_saturate_too(value: float, flag: bool) -> None:
    utils = sys.modules["torch_npu"].npu.utils
    rows = torch.sparse_coo_tensor(
        torch.tensor([[1, 1]]), torch.tensor([value] * 2), (3,), dtype=torch.float16, check_invariants=True
    ).to(NPU)
    utils.clear_npu_overflow_flag()
    assert rows.coalesce().values().tolist() == [LARGEST]
    assert utils.get_npu_overflow_flag() is flag


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_overflow_skips_its_own_step_and_no_other(where: str, level: str) -> None:
    model, optimizer = start(level)
    applied = [iterate(model, optimizer, step, where if step == 2 else "") for step in range(5)]
    assert applied == [True, True, False, True, True]
    assert xamp.loss_scale(optimizer) == 32.0


@pytest.mark.parametrize("level", LEVELS)
def test_what_overflows_in_validation_skips_nothing(level: str) -> None:
    model, optimizer = start(level)
    x = torch.ones(2, 4, device=NPU)
    for step in range(3):
        model.eval()
        model.overflows = "forward"
        with torch.no_grad():
            model(x)
        assert sys.modules["torch_npu"].npu.utils.get_npu_overflow_flag()
        model.train()
        assert iterate(model, optimizer, step)
    assert xamp.loss_scale(optimizer) == 64.0


def test_a_backward_overflow_skips_under_both_scalers_alike() -> None:
    found = {}
    for scaler in (sys.modules["torch_npu"].npu.amp.GradScaler(init_scale=64.0), xamp.GradScaler(init_scale=64.0)):
        torch.manual_seed(0)
        model = Net().to(NPU)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
        moved = []
        for step in range(4):
            optimizer.zero_grad()
            before = model.body.weight.detach().clone()
            model.overflows = "backward" if step == 1 else ""
            with torch.autocast("npu", torch.float16):
                loss = model(torch.ones(5, 4, device=NPU)).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            moved.append(not torch.equal(before, model.body.weight))
        found[type(scaler).__module__.partition(".")[0]] = (moved, scaler.get_scale(), model.body.weight.tolist())
    assert found["xamp"] == found["torch_npu"]
    assert found["xamp"][:2] == ([True, False, True, True], 32.0)
