"""The form with a launch for each tensor: fp32 against fp64, corrections of the bias, and which form a device gets."""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Iterator
from typing import Any

import onepass_fp64
import pytest
import torch
from onepass_cases import CASES, rows_of, states_of
from onepass_on_device import largest_error

from xamp.onebyone import OneByOne
from xamp.onebyone import kernels as one_by_one_kernels
from xamp.onebyone import plan as one_by_one
from xamp.onebyone.factors import corrections, logarithm
from xamp.onepass import Plan, Row, Rule, kernels
from xamp.plans import available

LIMITS = {"lamb": 2.5, "novograd": 2.5}
"""Units of the last place by which a rule may be wrong, where more than 2: a ratio of norms has its own roundings."""


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_fp64s_as_near_as_fp32_can_be(name: str) -> None:
    """To 2 or 2.5 units of the last place; a skipped step, counts and lower weights besides."""
    assert 0.0 < largest_error(OneByOne, name) <= LIMITS.get(CASES[name][0].name, 2.0)


@pytest.mark.parametrize("name", ["Adagrad", "LAMB", "NVLAMB", "NovoGrad", "NovoGrad by the largest"])
def test_odd_sizes_with_fewer_programs_than_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of blocks of 64 elements: programs take several in turn, or one that is nearly empty.

    More elements meet more of the roundings that add up.
    """
    monkeypatch.setattr(one_by_one, "_PROGRAMS", 3)
    shapes = ((64 * 11 + 5,), (0,), (64,), (63,), (65,), (7, 31), ())
    assert 0.0 < largest_error(OneByOne, name, shapes=shapes) <= 3.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["Adagrad", "Adagrad decoupled", "LAMB", "NVLAMB", "NovoGrad", "NovoGrad from zero"])
def test_weights_of_16_bits_are_rounded_once(name: str, dtype: torch.dtype) -> None:
    rule, group = CASES[name]
    torch.manual_seed(3)
    param = torch.randn(300).to(dtype)
    row = Row(param.clone(), None, states_of(rule, group, param.float()), torch.zeros(()))
    grad, plan = torch.randn(300).to(dtype), OneByOne(rule, [row], block=64)
    right, *states = onepass_fp64.stepped(rule, param, [*row.states], grad, group, 1)
    plan.step([grad], [group])
    unit = torch.finfo(dtype).eps * torch.exp2(right.abs().log2().floor())
    assert float(((row.param.double() - right).abs() / unit).max()) <= 0.501
    for found, state in zip(row.states, states, strict=True):
        torch.testing.assert_close(found.double(), state, rtol=1e-6, atol=1e-6)


# ---------------------------------------------------------------- norms of tensors


SIZES = [0.0, 1e-38, 1e-30, 1e-15, 1.0, 1e15, 1e30, 3e38]
"""Of gradients. The squares of most are 0 or inf in fp32."""


@pytest.mark.parametrize("kind", [2, 0])
@pytest.mark.parametrize("size", SIZES)
def test_the_norm_of_novograd_is_fp64s(size: float, kind: int) -> None:
    """It moves from one size to another. At the largest the L2 norm is inf in fp32."""
    torch.manual_seed(4)
    for then in (size, 1.0):
        row = Row(torch.zeros(200), None, (torch.zeros(200), torch.zeros(())), torch.zeros(()))
        plan, group = OneByOne(Rule("novograd"), [row], block=16), {"lr": 0.0, "norm_type": kind, "betas": (0.9, 0.75)}
        wanted = 0.0
        for count, each in enumerate((size, then), 1):
            grad = (torch.rand(200) - 0.5) * each
            plan.step([grad], [group])
            norm = float(grad.double().norm() if kind else grad.abs().max())
            moved = math.hypot(math.sqrt(0.75) * wanted, 0.5 * norm) if kind else 0.75 * wanted + 0.25 * norm
            wanted = norm if count == 1 else moved
            found = float(row.states[1])
            assert found == pytest.approx(wanted, rel=5e-7, abs=2e-38) or (wanted > 3.4e38 and found == math.inf)


@pytest.mark.parametrize("size", SIZES[3:7])
def test_the_ratio_of_lamb_is_fp64s(size: float) -> None:
    """The weights are of that size, the update is of size 1."""
    torch.manual_seed(5)
    param, grad, group = torch.randn(200) * size, torch.randn(200), {"lr": 0.5, "eps": 0.0, "betas": (0.9, 0.99)}
    row = Row(param.clone(), None, (torch.zeros(200), torch.zeros(200)), torch.zeros(()))
    OneByOne(Rule("lamb", use_nvlamb=True), [row], block=16).step([grad], [group])
    wide = param.double() - 0.5 * param.double().norm() / math.sqrt(200) * grad.double().sign()
    torch.testing.assert_close(row.param.double(), wide, rtol=1e-6, atol=1e-6 * size)


def test_lamb_takes_the_learning_rate_where_there_is_no_ratio() -> None:
    """Weights of zeros, an update of zeros, and a group without weight decay."""
    params = [torch.zeros(5), torch.ones(5), torch.full((5,), 3.0)]
    rows = [Row(p, None, (torch.zeros(5), torch.zeros(5)), torch.zeros(()), int(n > 1)) for n, p in enumerate(params)]
    group = {"lr": 0.5, "eps": 1e-12, "betas": (0.9, 0.99), "weight_decay": 0.1}
    plan = OneByOne(Rule("lamb"), rows)
    plan.step([torch.ones(5), torch.full((5,), -0.1), torch.ones(5)], [group, {**group, "weight_decay": 0.0}])
    for param, wanted in zip(params, (-0.5, 1.0, 2.5), strict=True):
        torch.testing.assert_close(param, torch.full((5,), wanted))


@pytest.mark.parametrize("apart", [16, 17])
@pytest.mark.parametrize("name", ["LAMB", "NVLAMB", "NovoGrad", "NovoGrad, decay inside", "NovoGrad by the largest"])
@pytest.mark.parametrize("values", [(math.inf,), (math.nan,), (1.0, math.inf), (math.inf, 3e38), (-math.inf, math.nan)])
def test_what_is_not_finite_goes_where_it_goes_with_tables(name: str, values: tuple[float, ...], apart: int) -> None:
    """Nothing skips it here. The second value is a block later, in the same program and the same lane or the next."""
    rule, group = CASES[name]
    grad, rows = torch.zeros(33), []
    for place, value in enumerate(values):
        grad[apart * place + 3] = value
    for form in (Plan, OneByOne):
        param = torch.linspace(0.5, 1.0, 33)
        rows.append(Row(param, None, states_of(rule, group, param), torch.zeros(())))
        plan = form(rule, rows[-1:], block=16)
        plan._programs = [1]  # type: ignore[attr-defined]
        plan.step([grad], [group])
    for one, other in zip(rows[0].tensors, rows[1].tensors, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-6, equal_nan=True)


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
    plan, found, inverse, clip = (
        OneByOne(Rule("novograd"), rows),
        torch.zeros(()),
        torch.tensor(0.125),
        torch.tensor(0.5),
    )
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
    plan._programs = [1]
    monkeypatch.setattr(one_by_one_kernels, "range", lambda *_: [last], raising=False)
    plan.step([grad], [{"lr": 1.0}])
    assert bool((param[-1024:] == 0.5).all())


def test_kernels_name_nothing_that_such_compilers_lack() -> None:
    shared = (kernels.from_bf16, kernels.to_bf16, kernels.of, kernels.moments, kernels.lamb_update, kernels.stepped)
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
def test_each_rule_is_tried_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Row(torch.zeros(3), None, (torch.zeros(3), torch.zeros(3)))]
    monkeypatch.setattr(kernels, "by_row", Broken())
    assert [type(available.plan(Rule(name), rows)) for name in ("adam", "lamb")] == [Plan, OneByOne]
    available._tried.cache_clear()
    monkeypatch.setattr(one_by_one_kernels, "move", Broken())
    assert type(available.plan(Rule("adam"), rows)) is Plan
    with pytest.raises(ValueError, match=r"no kernels: Plan: .*; OneByOne: .*unsupported: fp64"):
        available.plan(Rule("lamb"), rows)


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("form", [Plan, OneByOne])
@pytest.mark.parametrize("rule", ["sgd", "adam", "adagrad", "lamb", "novograd"])
def test_a_form_that_is_right_is_taken_for_each_rule(
    rule: str, form: type[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(available, "_FORMS", (form,))
    moving = torch.zeros(()) if rule == "novograd" else torch.zeros(3)
    states = (torch.zeros(3), moving)[: {"sgd": 0, "adagrad": 1}.get(rule, 2)]
    assert type(available.plan(Rule(rule), [Row(torch.zeros(3), None, states)])) is form


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


def test_novograds_norm_follows_where_nothing_of_the_old_one_is_kept() -> None:
    """Whose square, in units of the old norm's, would be 0."""
    row = Row(torch.zeros(1), None, (torch.zeros(1), torch.tensor(1e25)), torch.ones(()))
    OneByOne(Rule("novograd"), [row]).step([torch.ones(1)], [{"lr": 0.5, "betas": (0.9, 0.0), "eps": 0.0}])
    assert float(row.states[1]) == 1.0
