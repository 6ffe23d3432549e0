"""What every level computes, as numbers: accuracy on real data, loss curves, gradients against fp64.

Covers: xamp.policy, xamp.casting.region, xamp.scaling.engine.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping

import pytest
import torch
from lanes import Lane
from models import DigitsNet, Transformer, digits
from torch import nn
from torch.nn.functional import cross_entropy

import xamp
from xamp.policy import LEVELS, best_level, levels_where

EPOCHS = 5
BATCH = 64
HELD_OUT = 360
LOWER = levels_where(lambda row: row.dtype is not None)
PLAIN = best_level(()).name

# ---------------------------------------------------------------- training on the digits


@dataclasses.dataclass(frozen=True)
class Run:
    """The loss before each step, and the share of held-out digits named rightly afterwards."""

    losses: torch.Tensor
    accuracy: float


def _adam(params: object) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-3)  # type: ignore[arg-type]


def _sgd(params: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)  # type: ignore[arg-type]


MAKERS = {"Adam": _adam, "SGD": _sgd}


@functools.cache
def _train(device: torch.device, level: str, maker: str) -> Run:
    torch.manual_seed(0)
    images, labels = (t.to(device) for t in digits())
    model = DigitsNet().to(device)
    optimizer = MAKERS[maker](model.parameters())
    xamp.initialize(model, optimizer, level=level, verbosity=0)
    order = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(EPOCHS):
        for chosen in torch.randperm(len(labels) - HELD_OUT, generator=order).split(BATCH):
            optimizer.zero_grad()
            loss = cross_entropy(model(images[chosen]), labels[chosen])
            with xamp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            losses.append(loss.detach())
    assert xamp.session(optimizer).stats.applied == len(losses)
    model.eval()
    with torch.no_grad():
        named = model(images[-HELD_OUT:]).argmax(1)
    return Run(torch.stack(losses).cpu(), (named == labels[-HELD_OUT:]).float().mean().item())


@pytest.mark.slow
@pytest.mark.parametrize("level", LOWER)
def test_accuracy_is_within_a_point_of_fp32(lane: Lane, level: str) -> None:
    _needs(lane, level)
    maker = "SGD" if LEVELS[level].steps_lower else "Adam"
    full = _train(lane.device, PLAIN, maker)
    assert full.accuracy > 0.95, "the task is not learned, so that it tells nothing"
    assert _train(lane.device, level, maker).accuracy == pytest.approx(full.accuracy, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("level", levels_where(lambda row: row.dtype is not None and not row.steps_lower))
@pytest.mark.parametrize("maker", MAKERS)
def test_loss_curve_follows_fp32(lane: Lane, level: str, maker: str) -> None:
    """At every single step, not in the mean of an epoch."""
    _needs(lane, level)
    full, lower = _train(lane.device, PLAIN, maker).losses, _train(lane.device, level, maker).losses
    assert (lower - full).abs().max() < 0.03 * full[0]


# ---------------------------------------------------------------- gradients against fp64

WHOLE = {None: 1e-5, "float16": 2e-2, "bfloat16": 3e-2}
"""Norm of the error over norm of the gradient, both of the whole vector; with fp16 operators alone, half of that."""
AGAINST_HAND = 1.25
"""A parameter's error over that of the hand-written torch.amp loop."""
COUNTED = 1e-6
"""Parameters whose gradient is smaller than this part of the largest are left out there."""

Batch = tuple[torch.Tensor, torch.Tensor]
Gradients = Mapping[str, torch.Tensor]


def _digits_case(seed: int) -> tuple[nn.Module, Batch]:
    images, labels = digits()
    chosen = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))[:BATCH]
    return DigitsNet(), (images[chosen], labels[chosen])


def _transformer_case(seed: int) -> tuple[nn.Module, Batch]:
    tokens = torch.randint(64, (8, 17), generator=torch.Generator().manual_seed(seed))
    return Transformer(), (tokens[:, :-1], tokens[:, 1:])


CASES: dict[str, Callable[[int], tuple[nn.Module, Batch]]] = {"digits": _digits_case, "transformer": _transformer_case}


def _case(case: str, seed: int, device: torch.device) -> tuple[nn.Module, Batch]:
    torch.manual_seed(seed)
    model, (x, y) = CASES[case](seed)
    return model.to(device), (x.to(device), y.to(device))


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits.flatten(0, -2), labels.flatten())


def _collect(model: nn.Module, grads: list[torch.Tensor | None]) -> Gradients:
    found = {}
    for (name, _), grad in zip(model.named_parameters(), grads, strict=True):
        assert grad is not None, name
        found[name] = grad.detach().cpu().double()
    return found


def _reference(model: nn.Module, batch: Batch) -> Gradients:
    """fp64, on the CPU, with nothing of xamp."""
    double = copy.deepcopy(model).cpu().double()
    x, y = (t.cpu() for t in batch)
    _loss(double(x.double() if x.is_floating_point() else x), y).backward()
    return _collect(double, [p.grad for p in double.parameters()])


def _ours(model: nn.Module, batch: Batch, level: str) -> Gradients:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    xamp.initialize(model, optimizer, level=level, verbosity=0)
    with xamp.scale_loss(_loss(model(batch[0]), batch[1]), optimizer) as scaled:
        scaled.backward()
    return _collect(model, [p.grad for p in xamp.master_params(optimizer)])


def _by_hand(model: nn.Module, batch: Batch, dtype: torch.dtype) -> Gradients:
    kind = batch[0].device.type
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(kind, enabled=dtype == torch.float16)
    with torch.autocast(kind, dtype=dtype):
        loss = _loss(model(batch[0]).float(), batch[1])
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    return _collect(model, [p.grad for p in model.parameters()])


def _distance(found: Gradients, exact: Gradients) -> float:
    error = sum((found[name] - exact[name]).square().sum().item() for name in exact)
    return float((error / sum(g.square().sum().item() for g in exact.values())) ** 0.5)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_near_fp64(lane: Lane, case: str, level: str, seed: int) -> None:
    _needs(lane, level)
    model, batch = _case(case, seed, lane.device)
    exact = _reference(model, batch)
    row = LEVELS[level]
    bound = WHOLE[row.dtype] / (2 if row.casts_operators and row.dtype == "float16" else 1)
    assert _distance(_ours(model, batch, level), exact) <= bound


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("level", levels_where(lambda row: row.casts_operators))
@pytest.mark.parametrize("case", CASES)
def test_no_gradient_is_worse_than_by_hand(lane: Lane, case: str, level: str, seed: int) -> None:
    _needs(lane, level)
    dtype = getattr(torch, str(LEVELS[level].dtype))
    model, batch = _case(case, seed, lane.device)
    exact = _reference(model, batch)
    by_hand = _by_hand(copy.deepcopy(model), batch, dtype)
    ours = _ours(model, batch, level)
    largest = max(float(g.norm()) for g in exact.values())
    errors = {
        name: (float((ours[name] - g).norm()), float((by_hand[name] - g).norm()))
        for name, g in exact.items()
        if float(g.norm()) > COUNTED * largest
    }
    assert errors
    worse = {name: pair for name, pair in errors.items() if pair[0] > AGAINST_HAND * pair[1]}
    assert not worse, "name: (error, error by hand)"


def _needs(lane: Lane, level: str) -> None:
    if level not in lane.can.levels:
        pytest.skip(f"{lane} has no {level}")
