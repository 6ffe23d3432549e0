"""Several models and optimizers; groups added; frozen, tied and foreign parameters.

Covers: xamp.sessions.checkpoint, xamp.scaling.masters.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from checkpoints import VARIANTS, Run, each_order, each_variant, everything, load, save, start, through_a_file, train
from lanes import Lane
from managed_models import Net
from stepping import assert_same
from torch import nn
from torch.optim import SGD

import xamp
from xamp.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("no_other_sessions")

masters_or_not = pytest.mark.parametrize("level", ["O1", "O2"])


def level_on(lane: Lane, level: str) -> dict[str, Any]:
    if level not in lane.can.levels:
        pytest.skip(f"{lane} cannot run {level}")
    return {"level": level, "init_scale": 64.0, "growth_interval": 3, "verbosity": 0}


def linears(lane: Lane, *sizes: tuple[int, int], seed: int = 1) -> list[nn.Linear]:
    torch.manual_seed(seed)
    return [nn.Linear(*size).to(lane.device) for size in sizes]


def step(optimizers: Sequence[Any], loss: torch.Tensor, **options: Any) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    with xamp.scale_loss(loss, list(optimizers), **options) as scaled:
        scaled.backward()
    for optimizer in optimizers:
        optimizer.step()


def assert_goes_on(begin: Callable[[int], Run], lane: Lane, order: Sequence[str], other: Any = None) -> Run:
    """A run resumed from a state, or from what ``other`` makes of it, ends as the one that went on."""
    run = begin(1)
    train(run, lane, range(4), overflows=[2] if hasattr(run.model, "inner") else [])
    state = save(run)
    train(run, lane, range(4, 8))
    resumed = begin(2)
    load(resumed, state if other is None else other(state), order)
    train(resumed, lane, range(4, 8))
    assert_same(everything(resumed), everything(run))
    assert_same(save(resumed), save(run))
    return resumed


# ---------------------------------------------------------------- several


class Pair:
    """Two models, an optimizer and a loss for each."""

    def __init__(self, lane: Lane, level: str, seed: int = 1) -> None:
        self.models = linears(lane, (4, 4), (4, 2), seed=seed)
        self.optimizers = [SGD(m.parameters(), lr=0.1, momentum=0.9) for m in self.models]
        xamp.initialize(self.models, self.optimizers, num_losses=2, **level_on(lane, level))

    def train(self, lane: Lane, steps: range) -> None:
        for i in steps:
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(i)).to(lane.device)
            which = i % 3 == 0
            loss = self.models[0](x).square().mean() if which else self.models[1](self.models[0](x)).square().mean()
            step(self.optimizers[:1] if which else self.optimizers, loss * (1e38 if i == 4 else 1), loss_id=int(which))

    def save(self) -> Any:
        return through_a_file([xamp.state_dict(self.models[1]), *(p.state_dict() for p in self.parts)])

    @property
    def parts(self) -> list[Any]:
        return [*self.models, *self.optimizers]


@masters_or_not
@pytest.mark.parametrize("first", [True, False])
def test_two_models_and_two_optimizers_with_two_losses(lane: Lane, level: str, first: bool) -> None:
    pair = Pair(lane, level)
    pair.train(lane, range(6))
    assert xamp.session(pair.models[0]).stats.skipped > 0
    state = pair.save()
    pair.train(lane, range(6, 12))
    other = Pair(lane, level, seed=2)
    if first:
        xamp.load_state_dict(state[0], other.optimizers[1])
    for part, saved in zip(other.parts, state[1:], strict=True):
        part.load_state_dict(saved)
    if not first:
        xamp.load_state_dict(state[0], other.optimizers[1])
    other.train(lane, range(6, 12))
    assert_same(other.save(), pair.save())


def test_masters_of_a_further_model_are_refused_by_their_place(lane: Lane) -> None:
    state = Pair(lane, "O2").save()[0]
    [model] = linears(lane, (4, 4))
    optimizer = SGD(model.parameters(), lr=0.1)
    xamp.initialize(model, optimizer, **{**level_on(lane, "O2"), "num_losses": 2})
    before = xamp.state_dict(model)
    with pytest.raises(CheckpointError, match=r"state\['masters'\]\[1\] belongs to a further model, and .* given 1"):
        xamp.load_state_dict(state, model)
    assert_same(xamp.state_dict(model), before)


def test_one_model_with_two_optimizers_loads_into_one_optimizer(lane: Lane) -> None:
    """Masters go by their names in the model, wherever they are stepped."""
    source, target = (linears(lane, (4, 4), seed=seed)[0] for seed in (1, 2))
    halves = [SGD([p], lr=0.1) for p in source.parameters()]
    xamp.initialize(source, halves, **level_on(lane, "O2"))
    whole = SGD(target.parameters(), lr=0.1)
    xamp.initialize(target, whole, **level_on(lane, "O2"))
    xamp.load_state_dict(xamp.state_dict(source), target)
    exact = [p for half in halves for p in xamp.master_params(half)]
    assert_same([p.detach() for p in xamp.master_params(whole)], [p.detach() for p in exact])


# ---------------------------------------------------------------- parameters of all kinds


@masters_or_not
@each_order
def test_an_optimizer_with_parameters_of_no_model(lane: Lane, level: str, order: Sequence[str]) -> None:
    def begin(seed: int) -> tuple[Run, nn.Linear]:
        model, criterion = linears(lane, (4, 4), (4, 1), seed=seed)
        optimizer = SGD([*criterion.parameters(), *model.parameters()], lr=0.1, momentum=0.9)
        xamp.initialize(model, optimizer, **level_on(lane, level))
        return Run(model, optimizer), criterion

    run, criterion = begin(1)
    x = torch.randn(8, 4).to(lane.device)
    step([run.optimizer], criterion(run.model(x)).square().mean())
    state, kept = save(run), through_a_file(criterion.state_dict())
    step([run.optimizer], criterion(run.model(x)).square().mean())
    resumed, other = begin(2)
    other.load_state_dict(kept)
    load(resumed, state, order)
    step([resumed.optimizer], other(resumed.model(x)).square().mean())
    assert_same(everything(resumed), everything(run))


@pytest.mark.parametrize("kind", [nn.Parameter, torch.clone])
def test_a_half_parameter_of_no_model_has_its_master_under_its_position(lane: Lane, kind: Any) -> None:
    def begin() -> tuple[Run, torch.Tensor]:
        run = start(lane, "O2")
        extra = kind(torch.ones(4, dtype=torch.float16, device=lane.device)).requires_grad_()
        run.optimizer.add_param_group({"params": [extra]})
        return run, extra

    run, _ = begin()
    with torch.no_grad():
        list(xamp.master_params(run.optimizer))[-1].fill_(2.0 + 2.0**-14)
    state = save(run)
    assert state["xamp"]["optimizers"][0]["masters"].keys() == {"1.0"}
    resumed, extra = begin()
    load(resumed, state, ["xamp"])
    master = list(xamp.master_params(resumed.optimizer))[-1]
    assert master.tolist() == [2.0 + 2.0**-14] * 4
    assert extra.detach().tolist() == [2.0] * 4
    plain = start(lane, "O2")
    before = everything(plain)
    with pytest.raises(CheckpointError, match=r"\['optimizers'\]\[0\]\['masters'\]\['1.0'\]: no optimizer here has"):
        load(plain, state, ["xamp"])
    assert_same(everything(plain), before)


@masters_or_not
@each_order
def test_a_group_added_before_saving_and_before_loading(lane: Lane, level: str, order: Sequence[str]) -> None:
    def begin(seed: int) -> Run:
        torch.manual_seed(seed)
        model: Any = Net().to(lane.device)
        optimizer = SGD(model.inner.parameters(), lr=0.125, momentum=0.9)
        xamp.initialize(model, optimizer, **level_on(lane, level))
        run = Run(model, optimizer)
        train(run, lane, range(2))
        optimizer.add_param_group({"params": [*model.norm.parameters(), *model.head.parameters()], "lr": 0.25})
        return run

    assert_goes_on(begin, lane, order)


def test_a_group_added_since_keeps_its_values_and_that_is_said(lane: Lane, caplog: pytest.LogCaptureFixture) -> None:
    source = start(lane, "O2")
    train(source, lane, range(3))
    state = xamp.state_dict(source.optimizer)
    del state["masters"][0]["head.bias"], state["masters"][0]["head.weight"]
    run = start(lane, "O2", seed=2, verbosity=1)
    kept = through_a_file(run.model.head.state_dict())
    with caplog.at_level(logging.INFO, "xamp"):
        caplog.clear()
        xamp.load_state_dict(state, run.optimizer)
    assert [record.getMessage() for record in caplog.records] == [
        "load_state_dict: no master weights of head.weight and 1 more in the state; they keep their values"
    ]
    assert_same(through_a_file(run.model.head.state_dict()), kept)


def test_nothing_is_said_of_a_weight_that_two_models_share(lane: Lane, caplog: pytest.LogCaptureFixture) -> None:
    """It is saved with the first of them, and loaded into both."""

    def begin(seed: int) -> tuple[list[nn.Linear], Any]:
        models = linears(lane, (4, 4), (4, 4), seed=seed)
        models[1].weight = models[0].weight
        optimizer = SGD([*models[0].parameters(), models[1].bias], lr=0.1, momentum=0.9)
        xamp.initialize(models, optimizer, **{**level_on(lane, "O2"), "verbosity": 1})
        return models, optimizer

    _, optimizer = begin(1)
    state = xamp.state_dict(optimizer)
    assert [list(named) for named in state["masters"]] == [["weight", "bias"], ["bias"]]
    models, resumed = begin(2)
    with caplog.at_level(logging.INFO, "xamp"):
        caplog.clear()
        xamp.load_state_dict(state, resumed)
    assert caplog.records == []
    assert models[0].weight is models[1].weight
    assert_same(xamp.state_dict(resumed), state)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.second(self.first(x)),)


@each_order
def test_a_tied_weight_is_saved_once_and_read_by_either_name(lane: Lane, order: Sequence[str]) -> None:
    def begin(seed: int) -> Run:
        torch.manual_seed(seed)
        model = Tied().to(lane.device)
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        xamp.initialize(model, optimizer, **level_on(lane, "O2"))
        return Run(model, optimizer)

    def renamed(state: dict[str, Any]) -> dict[str, Any]:
        [named] = state["xamp"]["masters"]
        assert list(named) == ["first.weight"]
        return {**state, "xamp": {**state["xamp"], "masters": [{"second.weight": named["first.weight"]}]}}

    for other in (None, renamed):
        resumed = assert_goes_on(begin, lane, order, other)
        assert resumed.model.first.weight is resumed.model.second.weight


@pytest.mark.drawn(40)
@each_variant
@pytest.mark.parametrize("in_optimizer", [True, False])
@each_order
def test_frozen_parameters(lane: Lane, variant: str, in_optimizer: bool, order: Sequence[str]) -> None:
    def begin(seed: int) -> Run:
        torch.manual_seed(seed)
        model: Any = Net().to(lane.device)
        model.head.requires_grad_(False)
        params = [p for p in model.parameters() if in_optimizer or p.requires_grad]
        optimizer = SGD(params, lr=0.125, momentum=0.9)
        start_options = {**level_on(lane, "O0"), **VARIANTS[variant]}
        xamp.initialize(model, optimizer, **start_options)
        return Run(model, optimizer)

    assert_goes_on(begin, lane, order)


def test_a_model_that_is_gone_keeps_its_place() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(3, 3)
    optimizer = torch.optim.SGD(second.parameters(), lr=0.1)
    other = torch.optim.SGD(first.parameters(), lr=0.1)
    xamp.initialize([first, second], [optimizer, other], level="O2", verbosity=0)
    weight = second.state_dict()["weight"].clone()
    del first, other
    gc.collect()
    assert xamp.session(second).last_step is None
    state = xamp.state_dict(optimizer)
    assert [list(named) for named in state["masters"]] == [[], ["weight", "bias"]]
    state["masters"][1]["weight"].add_(1.0)
    xamp.load_state_dict(state, optimizer)
    assert torch.equal(second.state_dict()["weight"], weight + 1.0)
