"""The form with a launch for each tensor: fp32 against fp64, corrections of the bias, and which form a device gets."""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from onepass_cases import CASES, rows_of
from onepass_on_device import largest_error

from xamp.onebyone import OneByOne
from xamp.onebyone import kernels as one_by_one_kernels
from xamp.onebyone import plan as one_by_one
from xamp.onebyone.plan import corrections, logarithm
from xamp.onepass import Plan, Row, Rule, kernels
from xamp.plans import available


@pytest.mark.parametrize("name", [name for name, (rule, _) in CASES.items() if rule.name in ("sgd", "adam")])
def test_a_step_is_fp64s_as_near_as_fp32_can_be(name: str) -> None:
    """To 2 units of the last place; a skipped step, counts and lower weights besides."""
    assert 0.0 < largest_error(OneByOne, name) <= 2.0


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.95, 0.98, 0.99, 0.999, 0.9999, 0.99999, 0.999999])
def test_corrections_of_the_bias_are_fp64s(beta: float) -> None:
    many = torch.randint(1, 2**24, (20000,), generator=torch.Generator().manual_seed(0))
    counts = torch.cat([torch.arange(1, 200000), many]).float()
    high, low = (torch.tensor(part, dtype=torch.float32) for part in logarithm(beta))
    found = corrections(counts, high, low).double()
    right = -torch.expm1(counts.double() * math.log(beta)) if beta else torch.ones_like(found)
    assert float(((found - right) / right).abs().max()) < 1.3e-7
    assert float(((found - right) / right).abs().mean()) < 4e-8


def test_rows_without_a_gradient_are_left_alone() -> None:
    rule, group = CASES["AdamW amsgrad"]
    rows = rows_of(rule, group)
    held = [tensor for tensor in (rows[1].param, rows[1].low, *rows[1].states, rows[1].step) if tensor is not None]
    before = [tensor.clone() for tensor in held]
    grads = [None if number == 1 else torch.ones(row.param.shape) for number, row in enumerate(rows)]
    plan, found = OneByOne(rule, rows), torch.zeros(())
    plan.check(grads, found)
    torch.testing.assert_close(plan.checked_norm(), torch.tensor(61.0).sqrt())
    plan.step(grads, [group], found)
    assert all(map(torch.equal, held, before))
    assert [float(row.step) for row in rows if row.step is not None] == [1.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    assert plan.launches == 2 * (len(rows) - 1)


def test_groups_and_counts_of_the_options() -> None:
    rows = [Row(torch.ones(3), None, (torch.zeros(3),), None, number) for number in range(2)]
    plan = OneByOne(Rule("sgd"), rows)
    groups: list[dict[str, Any]] = [
        {"lr": torch.tensor(0.5), "momentum": 0.5, "dampening": 0.5, "first": True},
        {"lr": 0.25, "weight_decay": 1.0, "maximize": True},
    ]
    for _ in range(2):  # the second finds the same options on the device
        plan.step([torch.ones(3), torch.ones(3)], groups)
        groups[0] = {**groups[0], "first": False}
    assert rows[0].param.tolist() == [0.0] * 3  # the momentum is 1, then 0.5 * 1 + 0.5 * 1
    assert rows[1].param.tolist() == [1.0] * 3  # the decay is what the gradient adds
    moments = torch.zeros(3), torch.zeros(3)
    counted = Row(torch.ones(3), None, moments)
    OneByOne(Rule("adam"), [counted]).step([torch.ones(3)], [{"lr": 0.5, "eps": 0.0, "step": 1000}])
    right = 1 - 0.5 * (0.1 / (1 - 0.9**1000)) / math.sqrt(0.001 / (1 - 0.999**1000))
    torch.testing.assert_close(counted.param, torch.full((3,), right))


def test_more_blocks_than_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_by_one, "_PROGRAMS", 3)
    param, grad = torch.zeros(16 * 11 + 5), torch.arange(16 * 11 + 5.0)
    plan, found = OneByOne(Rule("sgd"), [Row(param), Row(torch.zeros(2))], block=16), torch.zeros(())
    plan.check([grad, torch.ones(2)], found)
    torch.testing.assert_close(plan.checked_norm(), torch.cat([grad, torch.ones(2)]).norm())
    plan.step([grad, torch.ones(2)], [{"lr": -1.0}])
    assert torch.equal(param, grad)
    grad[-1] = torch.inf
    plan.check([grad, torch.ones(2)], found)
    assert bool(found)
    assert bool(plan.checked_norm().isinf())


def test_elements_beyond_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    size, block = 2**31 + 2048, 2**20
    param, grad = torch.empty(size, dtype=torch.float16), torch.empty(size, dtype=torch.float16)  # not touched
    param[-1024:], grad[-1024:] = 1.0, 0.5
    plan, last = OneByOne(Rule("sgd"), [Row(param)], block=block), size // block
    plan._at = [(0, 1)]
    monkeypatch.setattr(one_by_one_kernels, "range", lambda *_: [last], raising=False)
    plan.step([grad], [{"lr": 1.0}])
    assert bool((param[-1024:] == 0.5).all())


@pytest.mark.parametrize("name", ["adagrad", "lamb", "novograd"])
def test_rules_without_such_kernels_are_refused(name: str) -> None:
    states = torch.zeros(3), torch.zeros(3)
    with pytest.raises(ValueError, match=f"{name} has no kernel with a launch for each tensor"):
        OneByOne(Rule(name), [Row(torch.zeros(3), None, states[: 1 if name == "adagrad" else 2])])


def test_kernels_name_nothing_that_such_compilers_lack() -> None:
    shared = (kernels.from_bf16, kernels.to_bf16, kernels.of, kernels.moments, kernels.stepped)
    sources = [inspect.getsource(one_by_one_kernels), *(inspect.getsource(function.fn) for function in shared)]
    named = {node.attr for source in sources for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
    assert "stepped" not in named  # names of modules are not attributes: the check sees those of tl alone
    for name in ("float64", "pointer_type", "uint8", "uint16", "uint32", "uint64", "exp2", "log2", "atomic_add"):
        assert name not in named


# ---------------------------------------------------------------- which form a device gets


@pytest.fixture
def untried() -> Iterator[None]:
    available._tried.cache_clear()
    yield
    available._tried.cache_clear()


class Broken:
    """In the place of a kernel: a compiler that refuses it."""

    def __getitem__(self, grid: object) -> Any:
        raise RuntimeError("unsupported: fp64")


@pytest.mark.usefixtures("untried")
def test_tables_are_taken_where_they_compile() -> None:
    assert available.refusal("cpu") == ""
    assert type(available.plan(Rule("sgd"), [Row(torch.zeros(3))])) is Plan


@pytest.mark.usefixtures("untried")
def test_the_other_form_is_taken_where_tables_do_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "step", Broken())
    assert available.refusal("cpu") == ""
    assert type(available.plan(Rule("sgd"), [Row(torch.zeros(3))])) is OneByOne


@pytest.mark.usefixtures("untried")
def test_a_form_that_is_wrong_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plan, "finish", lambda self: None)  # of both: nothing is stepped
    why = available.refusal("cpu")
    assert why.count("a kernel of Triton's gives a wrong result here") == 2
    with pytest.raises(ValueError, match=r"no kernels: Plan: a kernel .*; OneByOne: a kernel"):
        available.plan(Rule("sgd"), [Row(torch.zeros(3))])


@pytest.mark.usefixtures("untried")
def test_where_nothing_compiles_the_compilers_words_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "step", Broken())
    monkeypatch.setattr(one_by_one_kernels, "step", Broken())
    assert available.refusal("cpu").count("unsupported: fp64") == 2
