"""A scaler by hand takes parameters in a lower dtype on every device, as the CPU's operator does: to the bit.

Covers: xamp.sessions.grad_scaler, xamp.scaling.unscale.
"""

from __future__ import annotations

import math
import random

import pytest
import torch
from lanes import Lane, needs_dtype, needs_values

import xamp

pytestmark = pytest.mark.device
SHAPES = ((), (5,), (3, 4), (0, 2), (64, 33))


def reference(grads: list[torch.Tensor], scale: torch.Tensor, tracker: torch.Tensor, growth: float) -> torch.Tensor:
    """What torch's own operators make of gradients and scale on a CPU; returns the flag."""
    found = torch.zeros(())
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found, scale.reciprocal())
    torch._amp_update_scale_(scale, tracker, found, growth, 0.5, 7)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("start", "growth"), [(2.0**16, 2.0), (3.0e4, 1.7)], ids=["exact", "rounded"])
def test_300_steps_with_overflows(lane: Lane, dtype: torch.dtype, start: float, growth: float) -> None:
    if dtype is not torch.float32:
        needs_dtype(lane, dtype)
    needs_values(lane)
    overflows = set(random.Random(1).sample(range(300), 25))
    made = torch.Generator().manual_seed(2)
    params = [torch.nn.Parameter(torch.ones(shape, dtype=dtype, device=lane.device)) for shape in SHAPES]
    optimizer = torch.optim.SGD(params, lr=0.0)
    scaler = xamp.GradScaler(init_scale=start, growth_factor=growth, growth_interval=7)
    scaler.scale(torch.ones((), device=lane.device))
    scale, tracker = torch.tensor(start), torch.zeros((), dtype=torch.int32)
    seen = set()
    for step in range(300):
        given = [torch.randn(shape, generator=made).to(dtype) for shape in SHAPES]
        if step in overflows:
            given[2][1, 2] = random.Random(step).choice([math.inf, -math.inf, math.nan])
        for param, grad in zip(params, given, strict=True):
            param.grad = grad.to(lane.device)
        scaler.unscale_(optimizer)
        found = [param.grad.cpu() for param in params if param.grad is not None]
        scaler.step(optimizer)
        scaler.update()
        flag = reference(given, scale, tracker, growth)
        assert bool(flag) is (step in overflows)
        torch.testing.assert_close(found, given, rtol=0, atol=0, equal_nan=True)
        assert scaler.get_scale() == scale.item(), step
        seen.add(scale.item())
    assert len(seen) > 10
