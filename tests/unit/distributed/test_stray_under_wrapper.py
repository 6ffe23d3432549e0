"""What a wrapper has yet to reduce and came without ``scale_loss`` is brought to the scale of the next one.

Covers: xamp.scaling.fellows, xamp.scaling.gradients.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from one_rank import one_rank
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import xamp


def clones(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of ``params`` in fp32, copied."""
    return [p.grad.detach().float().clone() for p in params if p.grad is not None]


def test_what_no_sync_left_on_low_precision_parameters_is_added_at_the_scale_of_the_next() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.125)
    first, second = torch.randn(8, 4), torch.randn(8, 4)
    with one_rank():
        model, optimizer = xamp.initialize(model, optimizer, "O2", loss_scale=64.0, verbosity=0)
        ddp = DistributedDataParallel(model)
        with xamp.scale_loss(ddp(first).square().mean() * 0.0, optimizer) as scaled:  # the wrapper is noticed
            scaled.backward()
        optimizer.zero_grad()
        with ddp.no_sync():
            ddp(first).square().mean().backward()
        before = clones(model.parameters())
        with xamp.scale_loss(ddp(second).square().mean(), optimizer) as scaled:
            scaled.backward()
        both = clones(xamp.master_params(optimizer))
        optimizer.zero_grad()
        with xamp.scale_loss(ddp(second).square().mean(), optimizer) as scaled:
            scaled.backward()
        alone = clones(xamp.master_params(optimizer))
    for sum_of_both, one, other in zip(both, before, alone, strict=True):
        assert torch.allclose(sum_of_both, one + other, rtol=2.0**-8, atol=2.0**-12)
    assert max(float(grad.abs().max()) for grad in before) > 2.0**-6
