"""Each kernel against fp64 and against torch: shapes, dtypes, options, clipping, skipped steps.

Covers: xamp.onepass.kernels, xamp.onepass.plan, xamp.onepass.rules.
"""

from __future__ import annotations

import math
import random
from typing import Any

import onepass_fp64
import pytest
import torch
from onepass_cases import CASES, rows_of
from onepass_on_device import error_of, largest_error, wanted_of

from xamp.onepass import Plan, Row, Rule


@pytest.mark.parametrize("name", CASES)
def test_each_of_five_steps_is_fp64s(name: str) -> None:
    """Through a scale and a clip, with a skipped step at the end."""
    assert 0.0 < largest_error(name) <= 3.0


@pytest.mark.parametrize("name", ["momentum", "nesterov", "SGD maximize", "Adam", "AdamW amsgrad", "Adagrad"])
def test_many_steps_are_torchs(name: str) -> None:
    rule, group = CASES[name]
    kinds: dict[str, Any] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adagrad": torch.optim.Adagrad}
    kind = torch.optim.AdamW if rule.decoupled else kinds[rule.name]
    torch.manual_seed(0)
    rows = rows_of(rule, group, [(9, 5), (40,)])
    params = [torch.nn.Parameter(row.param.clone()) for row in rows]
    optimizer, plan = kind(params, **group), Plan(rule, rows, block=64)
    for _ in range(10):
        grads = [torch.randn(row.param.shape) for row in rows]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        optimizer.step()
        plan.step(grads, [group])
    for row, param in zip(rows, params, strict=True):
        torch.testing.assert_close(row.param, param.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_shapes_drawn_at_random(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    name = draw.choice([*CASES])
    rule, group = CASES[name]
    shapes = [tuple(draw.randint(0, 9) for _ in range(draw.randint(0, 3))) for _ in range(draw.randint(1, 9))]
    rows = rows_of(rule, group, shapes)
    plan = Plan(rule, rows, block=draw.choice([16, 128]))
    grads = [None if draw.random() < 0.2 else torch.randn(row.param.shape) for row in rows]
    before = [[row.param.clone(), *(state.clone() for state in row.states)] for row in rows]
    plan.step(grads, [group])
    for row, grad, (param, *states) in zip(rows, grads, before, strict=True):
        if grad is None:
            assert row.step is not None
            assert torch.equal(row.param, param)
            assert float(row.step) == 0.0
            assert row.low is None or bool((row.low == 77.0).all())
        else:
            assert error_of(row, *wanted_of(rule, Row(param, None, tuple(states)), grad, group, 1)) <= 3.0


@pytest.mark.parametrize("name", CASES)
def test_a_skipped_step_changes_no_bit(name: str) -> None:
    rule, group = CASES[name]
    rows = rows_of(rule, group)
    plan, found = Plan(rule, rows, block=64), torch.zeros(1)
    held = [t for row in rows for t in (row.param, row.low, *row.states, row.step) if t is not None]
    before = [t.clone() for t in held]
    grads = [torch.randn(row.param.shape) for row in rows]
    grads[1][17] = torch.nan
    plan.check(grads, found, [group])
    plan.step(grads, [group], found, torch.ones(()))
    assert float(found) == 1.0
    assert all(map(torch.equal, held, before))


def test_rates_and_counts_are_read_on_the_device() -> None:
    rule, group = CASES["AdamW"]
    param = torch.randn(50)
    lr, count = torch.tensor(0.5, dtype=torch.float64), torch.zeros((), dtype=torch.int32)
    row = Row(param.clone(), None, (torch.zeros(50), torch.zeros(50)))
    plan, grad = Plan(rule, [row], block=32), torch.randn(50)
    states = [torch.zeros(50), torch.zeros(50)]
    for value in (0.5, 0.25):
        lr.fill_(value)
        count += 1
        plan.step([grad], [{**group, "lr": lr, "step": count}])
        param, *states = onepass_fp64.stepped(rule, param, states, grad, {**group, "lr": value}, int(count))
    torch.testing.assert_close(row.param, param.float())


def test_tensors_of_any_order_in_memory() -> None:
    param = torch.randn(6, 4, 3, 5)[2:5].permute(3, 1, 2, 0).contiguous(memory_format=torch.channels_last)
    grad = torch.randn(5, 4, 3, 3).contiguous(memory_format=torch.channels_last)
    unaligned = torch.randn(101)[1:]
    other = torch.randn(100)
    before = param.clone(), unaligned.clone()
    Plan(Rule("sgd"), [Row(param), Row(unaligned)], block=16).step([grad, other], [{"lr": 1.0}])
    torch.testing.assert_close(param, before[0] - grad)
    torch.testing.assert_close(unaligned, before[1] - other)


@pytest.mark.parametrize(
    ("param", "low"),
    [
        (torch.zeros(4, dtype=torch.float64), None),
        (torch.zeros(4, 4)[:, ::2], None),
        (torch.zeros(3).expand(2, 3), None),
        (torch.zeros(4), torch.zeros(5, dtype=torch.float16)),
        (torch.zeros(3, 4), torch.zeros(4, 3, dtype=torch.float16).t()),
    ],
)
def test_what_kernels_do_not_take_is_refused(param: torch.Tensor, low: torch.Tensor | None) -> None:
    with pytest.raises(ValueError, match=r"Plan: row 0 has a tensor .* kernels take fp32, fp16 and bf16"):
        Plan(Rule("sgd"), [Row(param, low)])


def test_elements_beyond_32_bits() -> None:
    size, block = 2**31 + 2048, 2**20
    param, grad = (
        torch.empty(size, dtype=torch.float16),
        torch.empty(size, dtype=torch.float16),
    )  # reserved, not touched
    param[-1024:], grad[-1024:] = 1.0, 0.5
    plan = Plan(Rule("sgd"), [Row(param)], block=block)
    (part,) = plan._parts_of([torch.float16]).steps
    assert int(part.entries[-1]) * block >= 2**31
    plan._parts.steps[0] = part._replace(entries=part.entries[-1:])  # the last block alone
    plan.step([grad], [{"lr": 1.0}])
    assert bool((param[-1024:] == 0.5).all())


def test_rows_without_a_gradient_are_left_alone() -> None:
    rule, group = CASES["AdamW amsgrad"]
    rows = rows_of(rule, group)
    held = [tensor for tensor in (rows[1].param, rows[1].low, *rows[1].states, rows[1].step) if tensor is not None]
    before = [tensor.clone() for tensor in held]
    grads = [None if number == 1 else torch.ones(row.param.shape) for number, row in enumerate(rows)]
    plan, found = Plan(rule, rows), torch.zeros(())
    plan.check(grads, found)
    torch.testing.assert_close(plan.checked_norm(), torch.tensor(61.0).sqrt())
    plan.step(grads, [group], found)
    assert all(map(torch.equal, held, before))
    assert [float(row.step) for row in rows if row.step is not None] == [1.0, 0.0, 1.0, 1.0, 1.0, 1.0]


def test_groups_and_counts_of_the_options() -> None:
    rows = [Row(torch.ones(3), None, (torch.zeros(3),), None, number) for number in range(2)]
    plan = Plan(Rule("sgd"), rows)
    groups: list[dict[str, Any]] = [
        {"lr": torch.tensor(0.5), "momentum": 0.5, "dampening": 0.5, "first": True},
        {"lr": 0.25, "weight_decay": 1.0, "maximize": True},
    ]
    for _ in range(2):  # the second finds the same options on the device
        plan.step([torch.ones(3), torch.ones(3)], groups)
        groups[0] = {**groups[0], "first": False}
    assert rows[0].param.tolist() == [0.0] * 3  # the momentum is 1, then 0.5 * 1 + 0.5 * 1
    assert rows[1].param.tolist() == [1.0] * 3  # the decay is what the gradient adds
    counted = Row(torch.ones(3), None, (torch.zeros(3), torch.zeros(3)))
    Plan(Rule("adam"), [counted]).step([torch.ones(3)], [{"lr": 0.5, "eps": 0.0, "step": 1000}])
    right = 1 - 0.5 * (0.1 / (1 - 0.9**1000)) / math.sqrt(0.001 / (1 - 0.999**1000))
    torch.testing.assert_close(counted.param, torch.full((3,), right))


def test_lamb_takes_the_learning_rate_where_there_is_no_ratio() -> None:
    """Weights of zeros, an update of zeros, and a group without weight decay."""
    params = [torch.zeros(5), torch.ones(5), torch.full((5,), 3.0)]
    rows = [Row(p, None, (torch.zeros(5), torch.zeros(5)), torch.zeros(()), int(n > 1)) for n, p in enumerate(params)]
    group = {"lr": 0.5, "eps": 1e-12, "betas": (0.9, 0.99), "weight_decay": 0.125}
    plan = Plan(Rule("lamb"), rows)
    plan.step([torch.ones(5), torch.full((5,), -0.125), torch.ones(5)], [group, {**group, "weight_decay": 0.0}])
    for param, wanted in zip(params, (-0.5, 1.0, 2.5), strict=True):
        torch.testing.assert_close(param, torch.full((5,), wanted))


def test_rows_of_novograd_have_options_of_their_own() -> None:
    """Groups with either kind of norm, one whose gradient others read, and one that has none."""
    torch.manual_seed(6)
    groups: list[dict[str, Any]] = [
        {"lr": torch.tensor(0.1), "betas": (0.9, 0.75), "step": torch.tensor(3), "first": True, "eps": 1e-3},
        {"lr": 0.1, "betas": (0.5, 0.5), "step": 2, "norm_type": 0, "maximize": True, "bias_correction": False},
    ]
    params, grads = [torch.randn(20) for _ in range(4)], [torch.randn(20) * 8 for _ in range(4)]
    rows = [
        Row(p.clone(), None, (torch.randn(20), torch.tensor(2.0)), None, number % 2, in_place=number == 3)
        for number, p in enumerate(params)
    ]
    plan, found = Plan(Rule("novograd"), rows), torch.zeros(())
    inverse, clip = torch.tensor(0.125), torch.tensor(0.5)
    held = [[state.clone() for state in row.states] for row in rows]
    given = [grads[0], grads[1], None, grads[3].clone()]
    plan.check(given, found, groups, inverse)
    plan.step(given, groups, found, inverse, clip)
    assert torch.equal(rows[2].param, params[2])
    assert float(rows[2].states[1]) == 2.0
    for number in (0, 1, 3):
        options, count = {**groups[number % 2], "eps": groups[number % 2].get("eps", 1e-8)}, 3 - number % 2
        wide, start = grads[number].double() / (8 if number == 3 else 16), held[number]
        if number == 0:  # `first` makes the norm the gradient's: what moves to it from itself
            start[1] = wide.norm()
        right = onepass_fp64.stepped(plan.rule, params[number], start, wide, options, count)
        for one, other in zip([rows[number].param, *rows[number].states], right, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-6, atol=1e-6)
