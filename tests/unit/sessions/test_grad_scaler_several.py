"""GradScaler over many optimizers, over such as come and go, and two scalers side by side.

Covers: xamp.sessions.grad_scaler, xamp.sessions.scaler_steps.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from lanes import Lane, needs_values
from scaler_comparison import beside_torch, data, net, note, spoil, theirs
from torch import nn
from torch.optim import SGD

import xamp


def test_many_optimizers_each_decided_for_itself_and_told_apart(lane: Lane) -> None:
    needs_values(lane)

    def run(scaler: Any) -> Any:
        weights = [nn.Parameter(torch.full((2,), float(i), device=lane.device)) for i in range(11)]
        optimizers = [SGD([w], lr=0.125, momentum=0.9) for w in weights]
        seen = []
        for index in range(11):
            used = list(zip(weights, optimizers, strict=True))[: index + 1]
            for weight, optimizer in used:
                optimizer.zero_grad()
                scaler.scale(weight.sum()).backward()
            if index % 3 == 1:
                spoil([weights[index // 2]])
            for _, optimizer in used:
                scaler.step(optimizer)
            if isinstance(scaler, xamp.GradScaler) and index:
                found = [scaler.last_step[optimizer].name for _, optimizer in used]
                bad = index // 2 if index % 3 == 1 else None
                assert found == ["SKIPPED" if place == bad else "APPLIED" for place in range(index + 1)]
            scaler.update()
            seen.append((note(scaler), [w.detach().clone() for w in weights]))
        return seen

    beside_torch(run, lane, init_scale=64.0, growth_interval=2)


def test_optimizers_that_die_are_forgotten_with_their_parameters(lane: Lane) -> None:
    scaler = xamp.GradScaler()
    for _ in range(6):
        weight = nn.Parameter(torch.ones(2, device=lane.device))
        optimizer = SGD([weight], lr=0.125)
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        dead = weakref.ref(weight), weakref.ref(optimizer)
        del weight, optimizer
        gc.collect()
        assert [ref() for ref in dead] == [None, None]
        assert scaler.last_step is None
        assert scaler.stats.applied >= 1
    assert scaler._get_growth_tracker() == 6


@pytest.mark.parametrize("overflow", [False, True])
def test_one_that_dies_before_the_update_counts_in_it_and_lends_its_flag_to_nobody(overflow: bool, lane: Lane) -> None:
    if overflow:
        needs_values(lane)
    scaler = xamp.GradScaler(init_scale=8.0, growth_interval=1)

    def one(overflow: bool) -> list[float]:
        weight = nn.Parameter(torch.ones(2, device=lane.device))
        optimizer = SGD([weight], lr=0.125)
        scaler.scale(weight.sum()).backward()
        if overflow:
            spoil([weight])
        scaler.step(optimizer)
        return weight.tolist()

    assert one(overflow) == ([1.0, 1.0] if overflow else [0.875, 0.875])
    gc.collect()
    assert one(False) == [0.875, 0.875]
    gc.collect()
    scaler.update()
    assert scaler.get_scale() == (4.0 if overflow else 16.0)


def test_a_scaler_that_dies_leaves_nothing(lane: Lane) -> None:
    weight = nn.Parameter(torch.ones(2, device=lane.device))
    optimizer = SGD([weight], lr=0.125)
    scaler = xamp.GradScaler()
    before = set(optimizer.__dict__)
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    dead = weakref.ref(scaler)
    del scaler
    gc.collect()
    assert dead() is None
    assert set(optimizer.__dict__) == before
    assert type(optimizer) is SGD


def test_two_scalers_side_by_side(lane: Lane) -> None:
    """Over the same optimizers in turn, too."""
    needs_values(lane)

    def run(first: Any) -> Any:
        second = type(first)(init_scale=8.0) if isinstance(first, xamp.GradScaler) else theirs(lane, init_scale=8.0)
        models = [net(device=lane.device), net(device=lane.device)]
        optimizers = [SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
        seen = []
        for index in range(12):
            order = [first, second] if index % 4 < 2 else [second, first]
            for scaler, model, optimizer in zip(order, models, optimizers, strict=True):
                optimizer.zero_grad()
                scaler.scale(model(data(index, lane.device)).square().mean()).backward()
                if index == 5 and scaler is second:
                    spoil(model.parameters())
                scaler.step(optimizer)
            for scaler in order:
                scaler.update()
            seen.append((note(first, *models), note(second)))
        return seen

    records = beside_torch(run, lane, init_scale=64.0, growth_interval=4)
    assert [r[0][0] for r in records][-1] == 512.0
    assert [r[1][0] for r in records][-1] == 4.0
