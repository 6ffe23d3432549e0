"""Runs one training with torch's GradScaler and with xamp's, and compares what must be equal."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from lanes import Lane
from stepping import assert_same
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import xamp

FORMS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: SGD(p, lr=0.125, foreach=False),
    "SGD-momentum-foreach": lambda p: SGD(p, lr=0.125, momentum=0.9, foreach=True),
    "SGD-momentum-fused": lambda p: SGD(p, lr=0.125, momentum=0.9, fused=True),
    "Adam": lambda p: Adam(p, lr=0.125, foreach=False),
    "Adam-foreach": lambda p: Adam(p, lr=0.125, foreach=True),
    "Adam-fused": lambda p: Adam(p, lr=0.125, fused=True),
    "AdamW-foreach": lambda p: AdamW(p, lr=0.125, weight_decay=0.1, foreach=True),
    "AdamW-fused": lambda p: AdamW(p, lr=0.125, weight_decay=0.1, fused=True),
}

ON_CPU = torch.device("cpu")


def net(width: int = 8, device: torch.device = ON_CPU) -> nn.Sequential:
    """Two layers and four parameters."""
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2)).to(device)


def data(index: int, device: torch.device = ON_CPU, rows: int = 3) -> torch.Tensor:
    """The input of iteration ``index``, shape (rows, 4)."""
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(index)).to(device)


def spoil(params: Iterable[torch.Tensor], value: float = float("inf"), lane: Lane | None = None) -> None:
    """Put ``value`` into the gradient of the last of ``params`` that has one.

    On a lane whose chip saturates, make the chip overflow instead, because a value would not show an overflow there.
    """
    grads = [g for p in params if (g := p.grad) is not None]
    if lane is not None and lane.can.overflow == "flag":
        lane.overflow_(grads[-1])
    else:
        grads[-1].view(-1)[-1] = value


def note(scaler: Any, *owners: nn.Module | Optimizer) -> Any:
    """A record of the current state, which must be equal under both scalers."""
    values = [
        copy.deepcopy(owner.state_dict())
        if isinstance(owner, Optimizer)
        else [p.detach().clone() for p in owner.parameters()]
        for owner in owners
    ]
    return scaler.get_scale(), scaler._get_growth_tracker(), scaler.state_dict(), values


def theirs(lane: Lane | None = None, **options: Any) -> Any:
    """torch's scaler on the lane's device."""
    return torch.amp.GradScaler("cpu" if lane is None else lane.device.type, **options)


def beside_torch(run: Callable[[Any], Any], lane: Lane | None = None, **options: Any) -> Any:
    """``run`` a training with each scaler; check that both results are equal, bit for bit, and return the result."""
    found = []
    for scaler in (xamp.GradScaler(**options), theirs(lane, **options)):
        torch.manual_seed(0)
        if lane is not None:
            lane.backend.clear_overflow(lane.device)  # a flag may still be up from the run before
        found.append(run(scaler))
    assert_same(found[0], found[1])
    return found[0]


@functools.cache
def torchs_is_right(form: str, lane: Lane) -> bool:
    """Whether torch's own scaler unscales, and skips on an overflow, with this form on ``lane``."""
    weights = [nn.Parameter(torch.ones(2, device=lane.device)) for _ in range(2)]
    optimizer, plain = FORMS[form](weights[:1]), FORMS[form](weights[1:])
    scaler = theirs(lane, init_scale=64.0)
    lane.backend.clear_overflow(lane.device)
    for overflow in (False, True):
        for weight, loss in zip(weights, (scaler.scale(weights[0].sum()), weights[1].sum()), strict=True):
            weight.grad = None
            loss.backward()
        if overflow:
            spoil(weights[:1], lane=lane)
        else:
            plain.step()
        scaler.step(optimizer)
        scaler.update()
    return torch.allclose(weights[0], weights[1])


def needs_torchs(form: str, lane: Lane) -> None:
    """Skip the test if torch's scaler is wrong with this form, so that there is nothing to compare with."""
    if not torchs_is_right(form, lane):
        pytest.skip(f"{lane}: {form} takes no notice of scale or overflow under torch's own GradScaler")


def scales(records: Sequence[Any]) -> list[float]:
    """The scales in a list of records of :func:`note`."""
    return [record[0] for record in records]


def failure(call: Callable[..., object], *args: object) -> Exception | None:
    """The exception that ``call(*args)`` raises; None if it raises none."""
    try:
        call(*args)
    except Exception as error:
        return error
    return None
