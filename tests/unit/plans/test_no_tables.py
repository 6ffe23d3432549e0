"""Steps in one pass where kernels over tables of addresses do not compile: one launch for each tensor."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from one_pass_loops import AS_TORCH, FORMS, IN_ONE_PASS, Loop, assert_alike, assert_near
from torch import nn

import xamp
from xamp.onebyone import OneByOne

pytestmark = pytest.mark.usefixtures("no_tables")

EPS = torch.finfo(torch.float32).eps


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_each_step_is_fp64s(level: str, form: str) -> None:
    """Each step begins where the kernels' last one ended, and is torch's plain loop in fp64.

    The limit is 2 units of the last place of the weight or, where that is larger, of what the step changes.
    """
    loop = Loop(IN_ONE_PASS, level, form)
    kind, options = FORMS[form]
    make: Any = kind
    exact = [nn.Parameter(master.detach().double()) for master in loop.masters]
    plain = make(exact, **options, foreach=False)
    skips = {0, 3} if level == "O2" else set()
    for number in range(7):
        loop.iterate(number in skips)
        if number in skips:
            continue
        before = [param.detach().clone() for param in exact]
        for param, grad in zip(exact, loop.grads[-1], strict=True):
            param.grad = grad
        plain.step()
        for master, param, old in zip(loop.masters, exact, before, strict=True):
            change = (param.detach() - old).abs().max()
            size = torch.maximum(old.abs(), change)
            assert bool(((master.detach().double() - param.detach()).abs() <= 2 * EPS * size).all())
            param.data.copy_(master.detach())
            for key, value in loop.optimizer.state[master].items():
                if torch.is_tensor(plain.state[param][key]) and value.dim():
                    plain.state[param][key].copy_(value)
    for param, master in zip(loop.model.parameters(), loop.masters, strict=True):
        assert torch.equal(param.detach(), master.detach().to(param.dtype))
    nothing = [None] * len(loop.state.gradients.stepped)
    assert type(loop.state.gradients.one_pass._plans.stepper(loop.optimizer, nothing)[0]) is OneByOne
    assert xamp.session(loop.optimizer).stats.skipped == len(skips)


RUNS: dict[str, dict[str, Any]] = {
    "overflows": {"overflows": [0, 2, 3]},
    "accumulates and clips": {"micro": 2, "clip": 0.1, "overflows": [2]},
    "clips": {"clip": 0.1, "overflows": [1]},
    "clips by the largest": {"clip": 0.01, "kind": math.inf},
    "clips by the sum": {"clip": 1.0, "kind": 1.0},
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("form", ["AdamW", "momentum"])
def test_a_run_is_that_of_torchs_steps(form: str, run: str) -> None:
    ours, theirs = Loop(IN_ONE_PASS, form=form).run(range(6), **RUNS[run]), Loop(AS_TORCH, form=form)
    assert ours.waits() == (RUNS[run].get("micro", 1) == 1)
    assert_alike(ours, theirs.run(range(6), **RUNS[run]))
    assert_near(ours.norms, theirs.norms, 1e-5)


@pytest.mark.parametrize("first", [IN_ONE_PASS, AS_TORCH])
def test_a_checkpoint_moves_between_the_two_ways(first: str) -> None:
    other = AS_TORCH if first == IN_ONE_PASS else IN_ONE_PASS
    run = Loop(first).run(range(4), overflows=[1])
    resumed = Loop(other)
    resumed.load(run.saved())
    before, after = run.moments(), resumed.moments()
    assert all(map(torch.equal, resumed.weights(), run.weights()))
    assert list(before) == list(after)
    assert all(before[key].dtype == after[key].dtype and torch.equal(before[key], after[key]) for key in before)
    resumed.made = run.made
    run.run(range(3))
    resumed.run(range(3))
    assert_alike(resumed, run)


def test_groups_that_are_added_and_rates_that_change() -> None:
    loops = [Loop(fused) for fused in (IN_ONE_PASS, AS_TORCH)]
    for loop in loops:
        loop.run(range(2))
        loop.model.append(nn.Linear(3, 3, dtype=torch.float16))
        with torch.no_grad():
            for param in loop.model[-1].parameters():
                param.fill_(0.25)
        loop.optimizer.add_param_group({"params": list(loop.model[-1].parameters()), "lr": 0.5, "betas": (0.5, 0.9)})
        loop.masters = list(xamp.master_params(loop.optimizer))
        for _ in range(3):
            loop.optimizer.param_groups[0]["lr"] *= 0.5
            loop.iterate()
    assert loops[0].waits()
    assert_near(loops[0].weights(), loops[1].weights())
