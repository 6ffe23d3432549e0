"""Clipping by value, and norms that are not finite, against loops written by hand.

Covers: xamp.sessions.clipping.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import xamp
from xamp.errors import PolicyError, StateError
from xamp.sessions.session import find_session

LIMIT = 0.02


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    for found in _made:
        if find_session(found) is not None:
            xamp.session(found).close()
    _made.clear()


_made: list[nn.Module] = []


def start(level: str, **options: Any) -> tuple[nn.Module, SGD]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = SGD(model.parameters(), lr=0.5, momentum=0.9)
    xamp.initialize(model, optimizer, level, verbosity=0, **{"init_scale": 1024.0, **options})
    _made.append(model)
    return model, optimizer


def batch(step: int) -> torch.Tensor:
    return torch.randn(16, 4, generator=torch.Generator().manual_seed(step))


def backward(model: nn.Module, optimizer: SGD, x: torch.Tensor, times: float = 1.0, **options: Any) -> None:
    with xamp.scale_loss((model(x).float() - 1.0).square().mean() * times, optimizer, **options) as scaled:
        scaled.backward()


def by_hand(level: str, steps: int) -> list[torch.Tensor]:
    """fp32 weights stepped with clipped gradients of a copy in the level's dtype, scaled by 2**10."""
    torch.manual_seed(0)
    weights = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    dtype = {"O0": torch.float32, "O2": torch.float16, "O5": torch.bfloat16}[level]
    scale = 1024.0 if level == "O2" else 1.0
    optimizer = SGD(weights.parameters(), lr=0.5, momentum=0.9)
    for step in range(steps):
        lower = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)
        with torch.no_grad():
            for p, w in zip(lower.parameters(), weights.parameters(), strict=True):
                p.copy_(w)
        loss = (lower(batch(step).to(dtype)).float() - 1.0).square().mean()
        (loss * scale).backward()
        for p, w in zip(lower.parameters(), weights.parameters(), strict=True):
            assert p.grad is not None
            w.grad = p.grad.float() / scale
        torch.nn.utils.clip_grad_value_(weights.parameters(), LIMIT)
        optimizer.step()
    return [w.detach() for w in weights.parameters()]


@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_clipped_by_value_as_by_hand(level: str) -> None:
    model, optimizer = start(level)
    clipped = 0
    for step in range(4):
        optimizer.zero_grad()
        backward(model, optimizer, batch(step))
        largest = max(float(p.grad.abs().max()) for p in xamp.master_params(optimizer) if p.grad is not None)
        clipped += largest > LIMIT
        xamp.clip_grad_value_(optimizer, LIMIT)
        optimizer.step()
    assert clipped == 4
    for found, expected in zip(xamp.master_params(optimizer), by_hand(level, 4), strict=True):
        torch.testing.assert_close(found.detach(), expected, rtol=0, atol=0)


def test_several_optimizers_are_clipped_and_a_negative_limit_is_refused() -> None:
    pairs = [start("O2"), start("O5")]
    for model, optimizer in pairs:
        backward(model, optimizer, batch(0))
    optimizers = [optimizer for _, optimizer in pairs]
    for wrong in (-1.0, "much", float("nan"), None):
        with pytest.raises(PolicyError, match=r"clip_grad_value_\(clip_value=.*must be a number"):
            xamp.clip_grad_value_(optimizers, wrong)  # type: ignore[arg-type]
    xamp.clip_grad_value_(optimizers, LIMIT)
    grads = [p.grad for one in optimizers for p in xamp.master_params(one)]
    assert max(float(g.abs().max()) for g in grads if g is not None) == pytest.approx(LIMIT)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_is_skipped_though_it_was_clipped(level: str) -> None:
    model, optimizer = start(level)
    before = [p.detach().clone() for p in xamp.master_params(optimizer)]
    backward(model, optimizer, batch(0), times=float("inf"))
    xamp.clip_grad_value_(optimizer, LIMIT)
    optimizer.step()
    assert xamp.session(optimizer).last_step is xamp.StepOutcome.SKIPPED
    assert all(torch.equal(a, b) for a, b in zip(before, xamp.master_params(optimizer), strict=True))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_norm_of_a_skipped_step_is_no_error(level: str) -> None:
    model, optimizer = start(level)
    backward(model, optimizer, batch(0), times=float("inf"))
    norm = xamp.clip_grad_norm_(optimizer, 1.0, error_if_nonfinite=True)
    assert not torch.isfinite(norm)
    optimizer.step()
    assert xamp.session(optimizer).last_step is xamp.StepOutcome.SKIPPED


@pytest.mark.parametrize("level", ["O0", "O5", "O2"])
def test_a_norm_that_is_not_finite_is_an_error_where_the_step_would_be_taken(level: str) -> None:
    model, optimizer = start(level)
    backward(model, optimizer, batch(0))
    grads = [p.grad for p in xamp.master_params(optimizer) if p.grad is not None]
    grads[0].view(-1)[0] = float("nan")  # at O2 after the check, so that the step would be taken
    before = [g.clone() for g in grads]
    with pytest.raises(StateError, match=r"clip_grad_norm_\(error_if_nonfinite=True\): the 2\.0-norm .* is nan"):
        xamp.clip_grad_norm_(optimizer, 1e-3, error_if_nonfinite=True)
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(grads, before, strict=True))


def test_a_finite_norm_is_clipped_as_torch_does() -> None:
    model, optimizer = start("O2")
    backward(model, optimizer, batch(0))
    grads = [p.grad.clone() for p in xamp.master_params(optimizer) if p.grad is not None]
    total = torch.stack([g.double().norm() for g in grads]).norm()
    assert float(xamp.clip_grad_norm_(optimizer, 1e-3, error_if_nonfinite=True)) == pytest.approx(
        float(total), rel=1e-5
    )
    for param, grad in zip(xamp.master_params(optimizer), grads, strict=True):
        torch.testing.assert_close(param.grad, grad * (1e-3 / (float(total) + 1e-6)), rtol=1e-5, atol=0)
