"""GradScaler over optimizers that change, take arguments, skip by themselves or have a scheduler.

Covers: xamp.sessions.grad_scaler, xamp.sessions.scaler_steps.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lanes import Lane, needs_values
from scaler_comparison import beside_torch, note, spoil
from stepping import assert_same
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook

import xamp

INF, NAN = float("inf"), float("nan")


def one(lane: Lane | None = None, value: float = 1.0, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """A parameter of two elements."""
    return nn.Parameter(torch.full((2,), value, dtype=dtype, device=None if lane is None else lane.device))


def test_groups_that_change_between_iterations(lane: Lane) -> None:
    needs_values(lane)

    def run(scaler: Any) -> Any:
        weights = [one(lane, float(i)) for i in range(4)]
        optimizer = SGD([weights[0]], lr=0.125, momentum=0.9)
        seen = []
        for index in range(8):
            optimizer.zero_grad()
            scaler.scale(torch.stack([(w * w).sum() for w in weights]).sum()).backward()
            if index == 2:
                optimizer.add_param_group({"params": [weights[1]], "lr": 0.5})
            if index == 5:
                optimizer.param_groups[:] = [{**optimizer.param_groups[0], "params": [weights[2], weights[3]]}]
            if index == 4:  # in what was added
                spoil([weights[1]])
            if index == 6:  # in what came last
                spoil([weights[3]])
            if index == 7:  # in what is gone
                spoil([weights[0]])
            scaler.step(optimizer)
            scaler.update()
            for weight in weights:
                weight.grad = None
            seen.append((note(scaler), [w.detach().clone() for w in weights]))
        return seen

    assert [r[0][0] for r in beside_torch(run, lane, init_scale=8.0)] == [8.0] * 4 + [4.0, 4.0, 2.0, 2.0]


def test_a_group_added_between_unscale_and_step() -> None:
    def run(scaler: Any) -> Any:
        weights = [one(), one(value=2.0)]
        optimizer = SGD(weights[:1], lr=0.125)
        scaler.scale(torch.stack([w.sum() for w in weights]).sum()).backward()
        scaler.unscale_(optimizer)
        optimizer.add_param_group({"params": weights[1:]})
        scaler.step(optimizer)
        scaler.update()
        return [w.detach() for w in weights]

    assert [w.tolist() for w in beside_torch(run, init_scale=8.0)] == [[0.875, 0.875], [1.0, 1.0]]


class Talks(SGD):
    """An optimizer whose step takes more and returns something."""

    def step(self, closure: Any = None, *, factor: float = 1.0) -> Any:
        for group in self.param_groups:
            group["lr"] *= factor
        super().step(closure)
        return "stepped"


def test_a_step_with_arguments_and_a_value(lane: Lane) -> None:
    def run(scaler: Any) -> Any:
        weight = one(lane)
        optimizer = Talks([weight], lr=0.125)
        returned = []
        for index in range(3):
            optimizer.zero_grad()
            scaler.scale(weight.sum()).backward()
            if index == 1:
                spoil([weight], lane=lane)
            returned.append(scaler.step(optimizer, None, factor=2.0) if index else scaler.step(optimizer, factor=0.5))
            scaler.update()
        return returned, optimizer.param_groups[0]["lr"], weight.detach()

    assert beside_torch(run, lane)[:2] == (["stepped", None, "stepped"], 0.125)


@pytest.mark.parametrize("early", [True, False])
def test_schedulers_do_not_warn_and_advance(early: bool, lane: Lane) -> None:
    """torch's scaler makes them warn where the first step is skipped."""
    weight = one(lane)
    optimizer = SGD([weight], lr=1.0)
    scaler = xamp.GradScaler()
    if not early:
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    schedulers: list[Any] = [StepLR(optimizer, 1, gamma=0.5)]
    if early:
        schedulers.append(OneCycleLR(optimizer, 1.0, total_steps=10))
    rates = []
    for index in range(4):
        optimizer.zero_grad()
        scaler.scale(weight.sum()).backward()
        if index == 0:
            spoil([weight], lane=lane)
        scaler.step(optimizer)
        scaler.update()
        for scheduler in schedulers:
            scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert scaler.last_step.name == "APPLIED"
    assert len(set(rates)) == 4


@pytest.mark.parametrize("watched", ["hook", "hook of all", "profiler"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_hooks_and_the_profiler_see_each_step_once(watched: str, wrapped: bool, lane: Lane) -> None:
    param = one(lane)
    optimizer, scaler = SGD([param], lr=0.5), xamp.GradScaler(lane.device.type, init_scale=4.0)
    if wrapped:
        StepLR(optimizer, step_size=1)
    seen: list[str] = []

    def iterate() -> None:
        optimizer.zero_grad()
        scaler.scale(param.sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    iterate()
    if watched == "profiler":
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            iterate()
        seen = [event.name for event in profile.events() or [] if ".step#" in event.name]
    else:
        register = optimizer.register_step_post_hook if watched == "hook" else register_optimizer_step_post_hook
        handle = register(lambda o, *_: seen.append(f"Optimizer.step#{type(o).__name__}.step"))
        iterate()
        handle.remove()
        iterate()
    assert seen == ["Optimizer.step#SGD.step"]


def test_two_optimizers_that_share_a_parameter() -> None:
    """torch unscales its gradient twice, and so is it here."""

    def run(scaler: Any) -> Any:
        shared, own = one(), one()
        optimizers = [SGD([shared, own], lr=0.125), SGD([shared], lr=0.5)]
        scaler.scale(shared.sum() + own.sum()).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        return shared.detach(), own.detach(), scaler.state_dict()

    assert_same(beside_torch(run, init_scale=8.0)[1], torch.tensor([0.875, 0.875]))
