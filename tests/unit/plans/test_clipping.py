"""Gradients that are held are clipped as torch clips fp32 gradients: over several optimizers, and of any size.

Covers: xamp.scaling.one_pass, xamp.scaling.held, xamp.sessions.clipping.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from one_pass_loops import IN_ONE_PASS, Loop, assert_near
from torch import nn

import xamp

pytestmark = pytest.mark.usefixtures("interpreter")


def pair(fused: Any) -> tuple[Any, list[Any]]:
    """A model, and the optimizers of its two layers; each has taken a step."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    kinds: tuple[Any, Any] = torch.optim.AdamW, torch.optim.SGD
    optimizers = [kind(model[place].parameters(), lr=0.1) for kind, place in zip(kinds, (0, 2), strict=True)]
    xamp.initialize(model, optimizers, "O2", fused=fused, init_scale=2.0**10, verbosity=0)
    backward(model, optimizers)
    for one in optimizers:
        one.step()
    return model, optimizers


def backward(model: Any, optimizers: list[Any]) -> None:
    for one in optimizers:
        one.zero_grad()
    x = torch.linspace(-1.0, 2.0, 48).reshape(8, 6)
    with xamp.scale_loss(model(x).square().sum(), optimizers) as scaled:
        scaled.backward()


def turn(optimizer: Any) -> None:
    """Put a moment into an order in memory that no kernel takes."""
    (state, *_) = optimizer.state.values()
    state["exp_avg"] = state["exp_avg"].t().contiguous().t()


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("kind", [2.0, 1.0, math.inf])
def test_the_gradients_of_several_optimizers_are_one_vector(kind: float, turned: bool) -> None:
    """Also where a kernel cannot read those of one any more."""
    model, optimizers = pair(IN_ONE_PASS)
    backward(model, optimizers)
    scale = xamp.loss_scale(optimizers[0])
    held = [grad.double() / scale for one in optimizers for grad in one._xamp.state.gradients.held.grads]
    wanted = torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in held]), kind)
    if turned:
        turn(optimizers[0])
    found = xamp.clip_grad_norm_(optimizers, float(wanted) / 8, kind)
    torch.testing.assert_close(found, wanted.float(), rtol=1e-6, atol=0.0)
    clipped = [master.grad for one in optimizers for master in xamp.master_params(one)]
    for one, other in zip(clipped, held, strict=True):
        torch.testing.assert_close(one, (other / 8).float(), rtol=1e-5, atol=1e-9)


def test_a_norm_whose_square_is_beyond_fp32_is_told() -> None:
    loop = Loop(IN_ONE_PASS, "O5", norm=False)
    with xamp.scale_loss(loop.loss() * 1e25, loop.optimizer) as scaled:
        scaled.backward()
    grads = torch.cat([grad.double().flatten() for grad in loop.state.gradients.held.grads])
    found = xamp.clip_grad_norm_(loop.optimizer, 0.1)
    torch.testing.assert_close(found, grads.norm().float(), rtol=1e-6, atol=0.0)
    assert float(found) > 1e20
    clipped: Any = [master.grad for master in xamp.master_params(loop.optimizer)]
    assert_near([torch.cat([grad.flatten() for grad in clipped])], [(grads * 0.1 / grads.norm()).float()])
