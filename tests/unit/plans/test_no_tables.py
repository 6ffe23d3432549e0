"""Steps in one pass where kernels over tables of addresses do not compile: one launch for each tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from apex_kernels import ApexLAMB
from apex_oracles import ORACLES, SHORT_CASES, make_case, trained
from one_pass_loops import AS_TORCH, FORMS, IN_ONE_PASS, Loop, assert_alike, assert_near
from torch import nn

import xamp
from xamp import onepass
from xamp.apex import amp_C, optimizers
from xamp.onebyone import OneByOne
from xamp.plans import available, lists

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


# ---------------------------------------------------------------- xamp.apex's optimizers


@pytest.fixture
def made(no_tables: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[onepass.Plan]]:
    """The plans that lists of tensors are stepped by; tensors of the host are stepped so, too."""
    plans: list[onepass.Plan] = []
    plan = available.plan

    def noted(rule: onepass.Rule, rows: Sequence[onepass.Row], *more: Any) -> onepass.Plan:
        plans.append(plan(rule, rows, *more))
        return plans[-1]

    monkeypatch.setattr(available, "plan", noted)
    monkeypatch.setattr(lists, "_on_host", True)
    lists._refusal.cache_clear()
    yield plans
    lists._refusal.cache_clear()


WITH_NORMS = [case for case in SHORT_CASES if case[0] not in ("FusedAdam", "FusedSGD")]
RULES = {"FusedAdagrad": ["adagrad"], "FusedNovoGrad": ["novograd"]}


@pytest.mark.parametrize("case", WITH_NORMS, ids=str)
def test_apexs_optimizers_step_so_and_follow_fp64(case: tuple[str, dict[str, Any]], made: list[onepass.Plan]) -> None:
    name, options = case
    params, steps = make_case(8)
    found = trained(lambda own: getattr(optimizers, name)(own, **options), params, steps)
    assert [plan.rule.name for plan in made] == RULES.get(name, ["sgd", "lamb"])  # LAMB's norm is of all gradients
    assert all(type(plan) is OneByOne for plan in made)
    for mine, theirs in zip(found, ORACLES[name](params, steps, **options), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=3e-7)


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.0, "use_nvlamb": True}, {"adam_w_mode": False}], ids=str)
def test_lamb_is_near_apexs_kernels(options: dict[str, Any], made: list[onepass.Plan]) -> None:
    """In their own order of rounding. An element is below 0.12, of which half a unit in the last place is 4e-9."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=generator) * 0.02 for shape in ((24, 50), (1300,), (7,))]
    params.append(torch.zeros(48))
    steps = [[torch.randn(param.shape, generator=generator) * 0.01 for param in params] for _ in range(6)]
    found = trained(lambda own: optimizers.FusedLAMB(own, **options), params, steps)
    theirs = trained(lambda own: ApexLAMB(own, chunk=2048, **options), params, steps)
    assert [type(plan) for plan in made] == [OneByOne, OneByOne]
    for mine, other in zip(found, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=4e-9 * 9)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_lamb_reads_flag_scale_and_rate_on_the_device(value: float, made: list[onepass.Plan]) -> None:
    """A raised flag changes no bit; else masters of ones move by half of their norm, and the model gets them."""
    lr, step, scale = torch.tensor(0.5), torch.tensor([1], dtype=torch.int32), torch.tensor([2.0**-10])
    norm, limit = torch.tensor([1.0]), torch.tensor(1.0)
    for flag in (1, 0):
        grad = torch.full((9,), -1024.0, dtype=torch.float16)
        if flag:
            grad[3] = value
        tensors = [[grad], [torch.ones(9)], [torch.zeros(9)], [torch.zeros(9)], [torch.zeros(9, dtype=torch.float16)]]
        before = [each[0].clone() for each in tensors]
        noop = torch.tensor([flag], dtype=torch.int32)
        numbers = 0.9, 0.99, 0.0, step, 1, 0.0, 1, 1
        amp_C.multi_tensor_lamb_mp(1, noop, tensors, lr, *numbers, norm, limit, True, noop, scale)
        assert torch.equal(tensors[0][0], before[0]) or flag
        if flag:
            assert all(torch.equal(each[0], old) for each, old in list(zip(tensors, before, strict=True))[1:])
        else:
            for each, right in zip(tensors[1:], (1.5, -0.1, 0.01, 1.5), strict=True):
                torch.testing.assert_close(each[0].float(), torch.full((9,), right), rtol=1e-6, atol=0)
    assert [type(plan) for plan in made] == [OneByOne, OneByOne]


def test_novograd_raises_the_flag_and_keeps_norms_in_one_tensor(made: list[onepass.Plan]) -> None:
    for value in (3.0, math.inf, math.nan):
        flag, norms = torch.zeros(1, dtype=torch.int32), torch.tensor([4.0, 1.0])
        grads = [torch.tensor([value, 4.0]), torch.tensor([1.0])]
        given = [grads, [torch.ones(2), torch.ones(1)], [torch.zeros(2), torch.zeros(1)]]
        amp_C.multi_tensor_novograd(1, flag, given, norms, 0.5, 0.9, 0.5, 0.0, 1, 0, 0.0, 1, 1, 2)
        assert flag.tolist() == [0 if value == 3.0 else 1]
        assert norms.tolist() == pytest.approx([20.5**0.5 if value == 3.0 else value, 1.0], nan_ok=True)
        torch.testing.assert_close(
            given[1][0][1:], 1.0 - 0.05 * grads[0][1:] / norms[:1], rtol=1e-6, atol=0, equal_nan=True
        )
        assert given[1][1].item() == pytest.approx(0.95)
    assert [type(plan) for plan in made] == [OneByOne] * 3
