"""``find_nonfinite``: what it finds, what is no finding, and that it leaves nothing behind.

Covers: xamp.debug.nonfinite, xamp.debug.finding, xamp.debug.ranges, xamp.debug.origins.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from planted import Mlp, Slot, Transformer, loss_of, plant
from torch import nn
from torch.nn.modules import module as hooks
from torch.utils.checkpoint import checkpoint

import xamp
from xamp.debug import Finding, find_nonfinite
from xamp.debug.ranges import range_of
from xamp.errors import PolicyError, StateError


def found_in(model: nn.Module, run: Callable[[], object], *optimizers: Any, **settings: Any) -> Finding:
    with find_nonfinite(model, list(optimizers), **settings) as found:
        run()
    assert found.first is not None
    assert found.first.operator in found.report
    assert str(found) == found.report
    return found.first


class Net(nn.Module):
    def __init__(self, act: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.act = Slot()
        self.act.planted = act
        self.last = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.act(self.first(x)))
        return found


def test_the_ranges_are_those_of_the_values() -> None:
    model = Net(lambda x: torch.cat([x[:, :2] * 0, x[:, 2:]], 1).double().mul(1e300).mul(1e10))
    x = torch.randn(3, 4)
    with torch.no_grad():
        before = model.first(x)[:, 2:].double() * 1e300
    first = found_in(model, lambda: model.act(model.first(x)))
    assert (first.module, first.operator, first.result.infs, first.result.zeros) == ("act", "aten.mul.Tensor", 6, 0.5)
    (operand,) = first.operands
    assert (operand.dtype, operand.shape, operand.zeros) == ("float64", (3, 4), 0.5)
    assert operand.smallest == pytest.approx(float(before.abs().min()))
    assert operand.largest == pytest.approx(float(before.abs().max()))


def test_an_fp16_overflow_tells_how_far_the_value_reaches() -> None:
    model = xamp.initialize(Net(lambda x: x * 1e6), level="O2", verbosity=0)
    x = torch.ones(2, 4)
    first = found_in(model, lambda: model(x))
    exact = float((model.first(x.half()).detach().float() * 1e6).abs().max())
    assert first.wide == pytest.approx(exact, rel=1e-3)
    assert "float16 ends at 65504" in str(first)
    assert "keep_fp32=['act']" in str(first)


def test_a_module_that_is_kept_in_fp32_overflows_where_its_result_is_cast() -> None:
    """``keep_fp32`` for that module is no cure, and the advice says so."""
    model = xamp.initialize(Net(lambda x: x * 1e6), level="O3", keep_fp32=["act"], verbosity=0)
    first = found_in(model, lambda: model(torch.ones(2, 4)))
    assert (first.module, first.operator, first.result.dtype) == ("act", "aten._to_copy.default", "float16")
    assert "not where it is there already: the result of such a module is cast after it" in str(first)


def test_a_weight_that_did_not_fit_when_it_was_cast_is_told() -> None:
    large = nn.Linear(4, 4)
    nn.init.constant_(large.weight, 1e6)
    model = nn.Sequential(large)
    xamp.initialize(model, level="O3", verbosity=0)
    first = found_in(model, lambda: model(torch.ones(2, 4)))
    assert (first.kind, first.tensor) == ("parameter", "0.weight")
    assert "or it did not fit when it was cast to float16." in str(first)


@pytest.mark.parametrize("scale", [2.0**24, 2.0**4])
def test_the_overflow_of_a_scaled_gradient_is_the_scales(scale: float) -> None:
    model: nn.Module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    xamp.initialize(model, optimizer, level="O2", init_scale=scale, verbosity=0)
    with (
        find_nonfinite(model, optimizer) as found,
        xamp.scale_loss(loss_of(model(torch.randn(3, 4))), optimizer) as loss,
    ):
        loss.backward()
    if scale == 2.0**4:
        assert found.first is None
        assert found.report.startswith("All finite")
        return
    assert found.first is not None
    assert (found.first.kind, found.first.phase, found.first.loss_scale) == ("loss scale", "backward", scale)
    assert "backs off" in found.report


def test_a_gradient_too_large_for_fp16_is_the_operators_own_at_any_scale() -> None:
    model = Net(lambda x: (x.float() * 1e8).sin().to(x.dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    xamp.initialize(model, optimizer, level="O2", init_scale=4.0, verbosity=0)

    def run() -> None:
        with xamp.scale_loss(model(torch.randn(3, 4)).sum(), optimizer) as loss:
            loss.backward()

    first = found_in(model, run, optimizer)
    assert (first.kind, first.module, first.operator) == ("operator", "act", "aten._to_copy.default")


def test_the_scale_of_a_grad_scaler_is_known() -> None:
    model = Net(lambda x: x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)

    def run() -> None:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_of(model(torch.randn(3, 4)))
        scaler.scale(loss).backward()

    assert found_in(model, run, optimizer, scaler=scaler).kind == "loss scale"


def test_what_came_in_is_told_apart() -> None:
    model = Net(lambda x: x)
    x = torch.randn(3, 4)
    x[1, 2] = math.nan
    assert found_in(model, lambda: model(x)).kind == "input"
    with torch.no_grad():
        model.last.weight[0, 0] = math.inf
    first = found_in(model, lambda: model(torch.randn(3, 4)))
    assert (first.kind, first.tensor, first.module, first.module_class) == (
        "parameter",
        "last.weight",
        "last",
        "Linear",
    )
    model = Net(lambda x: x)
    model.first.bias.grad = torch.full((4,), math.nan)
    first = found_in(model, torch.optim.SGD(model.parameters(), lr=0.1, foreach=False).step)
    assert (first.kind, first.tensor, first.phase) == ("gradient", "first.bias", "step")
    assert "'first.bias'" in str(first)


def test_an_optimizer_that_makes_inf_is_found() -> None:
    model = Net(lambda x: x)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    first = found_in(model, torch.optim.SGD(model.parameters(), lr=3e38, weight_decay=1e3, foreach=False).step)
    assert (first.kind, first.phase, first.module) == ("operator", "step", None)


def test_a_function_outside_of_modules_and_a_module_called_twice() -> None:
    model = Net(lambda x: x)
    first = found_in(model, lambda: torch.log(model(torch.randn(3, 4)) * 0))
    assert (first.module, first.operator, first.phase) == (None, "aten.log.default", "forward")
    calls: list[int] = []

    def second_divides(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x if len(calls) < 2 else x / 0

    model = Net(second_divides)
    x = torch.randn(3, 4)
    first = found_in(model, lambda: model.act(model.act(x)))
    assert (first.module, first.call) == ("act", 2)


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_checkpointing(reentrant: bool) -> None:
    model = Net(lambda x: x)
    bad: list[bool] = []
    plant(model, "act", lambda x: ((x / 0) if bad else x * 2).sin().exp())
    x = torch.randn(3, 4, requires_grad=True)

    def run() -> None:
        loss = model.last(checkpoint(lambda v: model.act(model.first(v)), x, use_reentrant=reentrant)).sum()
        bad.append(True)  # only the repeated forward meets it
        loss.backward()

    first = found_in(model, run)
    assert (first.module, first.phase, first.recomputed) == ("act", "forward", True)


def test_in_place_complex_and_integer() -> None:
    model = Net(lambda x: (x.clone().mul_(1e30)).mul_(1e30))
    first = found_in(model, lambda: model(torch.randn(3, 4)))
    assert (first.operator, first.module) == ("aten.mul_.Tensor", "act")
    assert 0 < first.operands[0].largest < 1e32
    model = Net(lambda x: torch.view_as_complex(x.reshape(-1, 2, 2)) / 0)
    assert found_in(model, lambda: model.act(model.first(torch.randn(3, 4)))).result.dtype == "complex64"
    with find_nonfinite(model) as found:
        torch.arange(5).cumsum(0) // 2
    assert found.first is None


def test_what_is_meant_is_no_finding() -> None:
    model = Transformer()
    attention = nn.MultiheadAttention(16, 2, batch_first=True)
    mask = torch.full((5, 5), -math.inf).triu(1)
    x = torch.randn(2, 5, 16, requires_grad=True)
    with find_nonfinite([model, attention]) as found:
        loss_of(model(model.batch())).backward()
        attention(x, x, x, attn_mask=mask)[0].sum().backward()
        scores = torch.randn(4, 4).masked_fill(torch.eye(4, dtype=torch.bool), -math.inf)
        torch.where(scores > 0, scores, -math.inf).softmax(-1).logsumexp(-1)
        raw = torch.empty(64)
        raw[:32].fill_(math.nan)
        raw.zero_().add_(1)
        torch.baddbmm(torch.empty(2, 3, 3), torch.randn(2, 3, 4), torch.randn(2, 4, 3), beta=0)
    assert found.first is None, found.report


def test_what_follows_from_what_is_meant_and_should_not_is_found() -> None:
    model = Net(lambda x: x)
    scores = torch.zeros(3, 3)
    first = found_in(model, lambda: scores.masked_fill(torch.ones(3, 3, dtype=torch.bool), -math.inf).softmax(-1))
    assert first.result.nans == 9
    first = found_in(model, lambda: scores.masked_fill(torch.eye(3, dtype=torch.bool), -math.inf) / 0)
    assert first.operator.startswith("aten.div")


def test_nothing_changes_and_nothing_is_left() -> None:
    def run(watch: bool) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(Mlp(), nn.Dropout(0.5), nn.Linear(4, 2))
        optimizer = torch.optim.Adam(model.parameters())
        xamp.initialize(model, optimizer, level="O1", verbosity=0)
        for _ in range(2):
            optimizer.zero_grad()
            with find_nonfinite(model, optimizer) if watch else torch.enable_grad():
                with xamp.scale_loss(loss_of(model(torch.randn(8, 16))), optimizer) as scaled:
                    scaled.backward()
                optimizer.step()
        return [*model.parameters(), torch.randn(2)]

    before = dict(hooks._global_forward_hooks), dict(hooks._global_forward_pre_hooks)
    assert all(map(torch.equal, run(False), run(True)))
    with pytest.raises(ZeroDivisionError), find_nonfinite(Mlp()):
        1 / 0  # noqa: B018
    assert (dict(hooks._global_forward_hooks), dict(hooks._global_forward_pre_hooks)) == before


def test_wrong_arguments() -> None:
    with pytest.raises(PolicyError, match=r"find_nonfinite\(models=str\): must be an nn.Module"):
        find_nonfinite("model")  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match=r"history=-1"):
        find_nonfinite(Mlp(), history=-1)
    with pytest.raises(PolicyError, match=r"scaler=object.*get_scale"):
        find_nonfinite(Mlp(), scaler=object())
    with find_nonfinite(Mlp()) as found, pytest.raises(StateError, match="open already"):
        found.__enter__()


def test_a_collapse_names_the_parameters_and_how_to_find_the_operator() -> None:
    model = Net(lambda x: x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    xamp.initialize(model, optimizer, level="O1", init_scale=1.0, verbosity=0)
    model.act.register_full_backward_hook(lambda module, given, got: (got[0] / 0,))  # type: ignore[index]

    def train() -> None:
        for _ in range(50):
            optimizer.zero_grad()
            with xamp.scale_loss(model(torch.ones(2, 4)).sum(), optimizer) as scaled:
                scaled.backward()
            optimizer.step()

    with pytest.raises(xamp.LossScaleCollapsed, match=r"loss is first\.bias, the last of these in the model") as raised:
        train()
    assert "not finite: first.weight, first.bias. " in str(raised.value)
    assert "with xamp.debug.find_nonfinite(model, optimizer) as found" in str(raised.value)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([torch.inf, -torch.inf, torch.nan], "nothing finite, 2 inf, 1 nan"),
        ([0.0, torch.inf], "50.0% zeros, 1 inf, 0 nan"),
        ([0.0, 0.0], "100.0% zeros"),
        ([], "no value"),
        ([2.0, -4.0, 0.0, torch.nan], "|x| from 2 to 4, 25.0% zeros, 0 inf, 1 nan"),
    ],
)
def test_a_range_says_what_there_is(values: list[float], text: str) -> None:
    assert str(range_of(torch.tensor(values))) == f"float32 [{len(values)}]: {text}"
