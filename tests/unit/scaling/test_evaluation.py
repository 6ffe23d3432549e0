"""A model evaluates with what its ``state_dict()`` holds, also where an optimizer writes weights through ``.data``.

Covers: xamp.scaling.weights, xamp.values.followers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import xamp
import xamp.apex

LEVELS = ("O1", "O2", "O4", "O5")
MASTERS = ("O2", "O5")
X = torch.randn(16, 6, generator=torch.Generator().manual_seed(9))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU())
        self.head = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.body(x))


class Averaging(torch.optim.SGD):
    """Keeps an average of the weights; ``eval`` puts it in and ``train`` takes it out, through ``.data``."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for param in self.params():
            average = self.state[param].setdefault("average", param.detach().clone())
            average.lerp_(param.detach(), 0.25)

    def params(self) -> list[Any]:
        return [p for group in self.param_groups for p in group["params"]]

    def swap(self) -> None:
        for param in self.params():
            kept = param.data.clone()
            param.data.copy_(self.state[param]["average"])
            self.state[param]["average"].copy_(kept)

    def eval(self) -> None:
        self.swap()

    def train(self) -> None:
        self.swap()


class Run:
    def __init__(self, level: str, wrap: Callable[[Any], Any] = lambda model: model) -> None:
        torch.manual_seed(0)
        self.level = level
        self.model: Any = Net()
        self.optimizer = Averaging(self.model.parameters(), lr=0.3)
        xamp.initialize(self.model, self.optimizer, level, verbosity=0)
        self.outer = wrap(self.model)

    def train(self, steps: int = 4) -> Run:
        for number in range(steps):
            x = torch.randn(16, 6, generator=torch.Generator().manual_seed(number))
            self.optimizer.zero_grad()
            with xamp.scale_loss(self.outer(x).square().mean(), self.optimizer) as scaled:
                scaled.backward()
            self.optimizer.step()
        return self

    def fresh(self) -> torch.Tensor:
        """What a new model at the same level gives that has loaded the state dict."""
        model: Any = Net()
        model.load_state_dict({name: value.clone() for name, value in self.model.state_dict().items()})
        xamp.initialize(model, level=self.level, verbosity=0)
        model.train(self.model.training)
        with torch.no_grad():
            found: torch.Tensor = copy.deepcopy(model)(X) if model.training else model(X)
        return found

    def check(self) -> torch.Tensor:
        wanted = self.fresh()
        with torch.no_grad():
            found: torch.Tensor = self.outer(X)
        assert torch.equal(found, wanted)
        return found


def half(run: Run) -> None:
    for param in run.optimizer.params():
        param.data.mul_(0.5)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_an_optimizer_that_swaps_averages_in_and_out(level: str, order: str) -> None:
    run = Run(level).train()
    trained = run.model.state_dict()["head.weight"].clone()
    modes = [run.model, run.optimizer] if order == "model first" else [run.optimizer, run.model]
    for each in modes:
        each.eval()
    averaged = run.check()
    assert not torch.equal(run.model.state_dict()["head.weight"], trained)
    for each in modes:
        each.train()
    assert torch.equal(run.model.state_dict()["head.weight"], trained)
    for param in run.model.parameters():
        assert torch.equal(param, xamp.master_of(param).to(param.dtype))
    run.train(1)
    run.model.eval()
    assert not torch.equal(run.check(), averaged)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "mode",
    [lambda run: run.model.eval(), lambda run: (run.model.train(False), run.model.eval()), lambda run: None],
    ids=["eval", "twice", "first forward without gradients"],
)
def test_weights_that_were_written_through_data(level: str, mode: Callable[[Run], object]) -> None:
    run = Run(level).train()
    half(run)
    mode(run)
    run.check()


@pytest.mark.parametrize("level", MASTERS)
@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
def test_each_step_and_each_loop_over_masters_may_be_followed_by_such_a_write(level: str, grad: Any) -> None:
    run = Run(level).train()
    run.model.eval()
    run.check()
    for _ in range(2):
        run.train(1)
        half(run)
        with grad():
            found = run.outer(X)
        assert torch.equal(found, run.fresh())
        for master in xamp.master_params(run.optimizer):
            master.data.mul_(2.0)  # a swap while the model evaluates
        run.check()


@pytest.mark.parametrize("level", MASTERS)
def test_it_may_be_wrapped_or_compiled(level: str) -> None:
    for wrap in (nn.DataParallel, lambda model: torch.compile(model, backend="eager"), nn.Sequential):
        run = Run(level, wrap).train(2)
        run.outer.eval()
        half(run)
        run.outer.train()
        run.outer.eval()
        run.check()


@pytest.mark.parametrize("level", MASTERS)
def test_a_backward_goes_on_after_a_forward_without_gradients(level: str) -> None:
    """The masters are written into the model between a forward and its backward, which autograd must not refuse."""
    run = Run(level).train()
    run.optimizer.zero_grad()
    loss = run.model(X).square().mean()
    with torch.no_grad():
        run.model(X)
    run.model.eval()
    run.model.train()
    with xamp.scale_loss(loss, run.optimizer) as scaled:
        scaled.backward()
    run.optimizer.step()
    assert xamp.session(run.model).stats.applied == 5


@pytest.mark.parametrize("level", MASTERS)
def test_what_is_written_into_the_model_before_the_first_backward_stays(level: str) -> None:
    run = Run(level)
    for param in run.model.parameters():
        nn.init.constant_(param, 0.125)
    run.model.eval()
    with torch.no_grad():
        run.model(X)
    run.model.train()
    assert all(bool((param == 0.125).all()) for param in run.model.parameters())
    assert all(bool((value == 0.125).all()) for name, value in run.model.state_dict().items() if "weight" in name)


@pytest.mark.parametrize("level", MASTERS)
def test_a_mode_that_does_not_change_writes_nothing(level: str) -> None:
    """A loop that calls ``model.train()`` in each step pays nothing."""
    run = Run(level).train()
    param: Any = run.model.head.weight
    half(run)
    run.model.train()
    assert not torch.equal(param, xamp.master_of(param).to(param.dtype))
    run.model.eval()
    assert torch.equal(param, xamp.master_of(param).to(param.dtype))
    half(run)
    run.model.eval()
    assert not torch.equal(param, xamp.master_of(param).to(param.dtype))
    assert run.model.train() is run.model


@pytest.mark.parametrize("level", MASTERS)
def test_a_second_forward_without_gradients_writes_nothing(level: str) -> None:
    run = Run(level).train()
    run.check()
    param: Any = run.model.head.weight
    half(run)
    with torch.no_grad():
        run.model(X)
    assert not torch.equal(param, xamp.master_of(param).to(param.dtype))


def test_what_the_modes_of_an_optimizer_return_and_take_is_its_own() -> None:
    class Modes(torch.optim.SGD):
        def train(self, mode: bool = True) -> str:
            """Begin."""
            return f"mode {mode}"

    model = nn.Linear(2, 2)
    optimizer: Any = Modes(model.parameters(), lr=0.1)
    xamp.initialize(model, optimizer, "O2", verbosity=0)
    assert optimizer.train(mode=False) == "mode False"
    assert type(optimizer).train.__doc__ == "Begin."
    assert not hasattr(optimizer, "eval")


def test_an_optimizer_that_swaps_is_not_told_of(caplog: pytest.LogCaptureFixture) -> None:
    run = Run("O2").train()
    run.optimizer.eval()
    run.model.eval()
    run.check()
    run.optimizer.train()
    run.model.train()
    run.train(8)
    assert [r.getMessage() for r in caplog.records if r.name == "xamp" and r.levelname == "WARNING"] == []


def test_apex_leaves_the_model_as_it_is() -> None:
    torch.manual_seed(0)
    model: Any = Net()
    optimizer = Averaging(model.parameters(), lr=0.3)
    xamp.apex.amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    with xamp.apex.amp.scale_loss(model(X).float().square().mean(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    model(X)
    model.head.weight.data.fill_(0.5)
    optimizer.eval()
    model.eval()
    with torch.no_grad():
        model(X)
    assert bool((model.head.weight == 0.5).all())
