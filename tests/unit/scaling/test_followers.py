"""At O2 and O5 a forward uses the masters as they are, whoever wrote into them, also where it is compiled.

The reference is the model by hand: the masters cast to the level's dtype, in plain functions.

Covers: xamp.values.followers, xamp.scaling.weights.
"""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import compiling
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils.weak import WeakIdKeyDictionary

import xamp
import xamp.apex
from xamp.values import followers
from xamp.values.followers import graphs

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    # The tracer of torch itself asks the scaled loss for its .grad after a break.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

DTYPES = {"O2": torch.float16, "O5": torch.bfloat16}
COMPILED = ("compile", "compile, fullgraph", "model.compile", "model.forward", "hooked")
"""Ways to compile in which the forward is the outermost compiled function."""
BOUND = 0.25


@pytest.fixture(autouse=True)
def _no_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Begin without graphs, and without models of earlier tests, which live until the collector finds them."""
    compiling.forget()
    monkeypatch.setattr(followers, "_followers", WeakIdKeyDictionary())
    monkeypatch.setattr(graphs, "exist", False)
    monkeypatch.setattr(graphs, "ask", False)
    yield
    compiling.forget()


def batch(number: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(number))


class Trained:
    """A model at a level, and how its forward is compiled."""

    def __init__(self, level: str, how: str) -> None:
        torch.manual_seed(0)
        self.level = level
        self.model: Any = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        xamp.initialize(self.model, self.optimizer, level, verbosity=0)
        self.kept = list(xamp.master_params(self.optimizer))
        self.counter = CompileCounter()
        self.forward: Callable[[torch.Tensor], torch.Tensor] = self._compiled(how)
        whole = how.startswith("whole")
        self.loops, self.clips = how.startswith("whole, loop"), how == "whole, clips"
        self.zips = how == "whole, loop left early"
        self.step = torch.compile(self._step, backend=self.counter) if whole else self._step

    def _compiled(self, how: str) -> Any:
        model = self.model
        if how == "model.compile":
            model.compile(backend="aot_eager")
        elif how == "model.forward":
            model.forward = torch.compile(model.forward, backend="aot_eager")
        elif how == "hooked":
            model.register_forward_hook(lambda *_: None)
        if how == "larger":
            return torch.compile(lambda x: model(x) + 0.0, backend="aot_eager")
        inside = how in ("compile", "compile, fullgraph", "hooked")
        return torch.compile(model, backend="aot_eager", fullgraph="full" in how) if inside else model

    def _step(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.forward(x).square().mean()
        with xamp.scale_loss(loss, self.optimizer) as scaled:
            scaled.backward()
        if self.clips:
            torch.nn.utils.clip_grad_norm_(xamp.master_params(self.optimizer), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.loops:
            self.clamp()
        return loss.detach()

    def clamp(self) -> None:
        """As a WGAN clips its weights."""
        with torch.no_grad():
            if self.zips:  # the iterator never learns that it was the last
                for _, param in zip(range(len(self.kept)), xamp.master_params(self.optimizer), strict=False):
                    param.clamp_(-BOUND, BOUND)
                return
            for param in xamp.master_params(self.optimizer):
                param.clamp_(-BOUND, BOUND)

    def halve(self) -> None:
        """A write through tensors that were asked for long ago."""
        with torch.no_grad():
            for param in self.kept:
                param.mul_(0.5)

    def by_hand(self, x: torch.Tensor) -> torch.Tensor:
        dtype = DTYPES[self.level]
        first, bias, last, offset = (p.detach().to(dtype) for p in self.kept)
        hidden = torch.tanh(nn.functional.linear(x.to(dtype), first, bias))
        return nn.functional.linear(hidden, last, offset).float()

    def check_forward(self, x: torch.Tensor) -> None:
        with torch.no_grad():
            torch.testing.assert_close(self.forward(x), self.by_hand(x), rtol=2e-2, atol=2e-3)

    def check_step(self, x: torch.Tensor) -> None:
        wanted = float(self.by_hand(x).square().mean())
        assert float(self.step(x)) == pytest.approx(wanted, rel=2e-2)


def in_turn(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Every other case, for each compiles for seconds: each value has its turns, and of three axes each two meet."""
    places = itertools.product(*(enumerate(axis) for axis in axes))
    return [tuple(value for _, value in case) for case in places if sum(place for place, _ in case) % 2 == 0]


@pytest.mark.parametrize(("level", "how", "write"), in_turn(DTYPES, ("eager", *COMPILED), ("clamp", "halve")))
def test_a_forward_follows_a_write_into_the_masters(level: str, how: str, write: str) -> None:
    trained = Trained(level, how)
    getattr(trained, write)()  # before anything was compiled, or has trained
    trained.check_forward(batch(0))
    for number in range(3):
        trained.check_step(batch(number))
        getattr(trained, write)()
        trained.check_step(batch(number + 10))
        getattr(trained, write)()
        trained.check_forward(batch(number))
    assert not graphs.exist


@pytest.mark.parametrize(("level", "how"), in_turn(reversed(DTYPES), ("larger", "whole", "whole, clips")))
def test_a_forward_in_a_larger_graph_follows_a_loop_over_master_params(level: str, how: str) -> None:
    trained = Trained(level, how)
    trained.halve()
    for number in range(3):
        trained.check_step(batch(number))
        trained.clamp()
        trained.check_step(batch(number + 10))
    assert graphs.exist
    assert not graphs.ask


@pytest.mark.parametrize(("level", "how"), in_turn(DTYPES, ("whole, loop in it", "whole, loop left early")))
def test_a_write_that_is_compiled_itself_reaches_the_next_forward(level: str, how: str) -> None:
    trained = Trained(level, how)
    frames = []
    for number in range(6):
        trained.check_step(batch(number))
        frames.append(trained.counter.frame_count)
        assert max(float(p.detach().abs().max()) for p in trained.kept) <= BOUND
    assert frames[2] == frames[-1]


@pytest.mark.parametrize("leave", ["break", "zip", "apex"])
def test_a_larger_graph_follows_a_loop_that_is_left_early(leave: str) -> None:
    trained = Trained("O2", "larger")
    trained.check_step(batch(0))
    params = (xamp.apex.amp if leave == "apex" else xamp).master_params(trained.optimizer)
    with torch.no_grad():
        for number, param in enumerate(params) if leave != "zip" else zip(range(2), params, strict=False):
            param.mul_(0.5)
            if leave == "break" and number == 1:
                break
    del params
    trained.check_step(batch(1))
    assert not graphs.ask


def saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("write", ["clamp", "halve"])
@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, saved])
def test_a_copy_has_what_was_written(copied: Callable[[Any], Any], write: str) -> None:
    trained = Trained("O2", "eager")
    trained.check_step(batch(0))
    getattr(trained, write)()
    found = copied(trained.model)(batch(1))
    torch.testing.assert_close(found.detach(), trained.by_hand(batch(1)), rtol=2e-2, atol=2e-3)
    assert not graphs.exist


def test_a_part_of_the_model_has_what_a_loop_wrote() -> None:
    trained = Trained("O2", "eager")
    trained.check_step(batch(0))
    trained.clamp()
    for part, master in zip(trained.model.parameters(), trained.kept, strict=True):
        assert torch.equal(part.detach(), master.detach().half())
    assert not graphs.exist


@pytest.mark.parametrize("what", ["model", "xamp"])
def test_a_load_is_no_write_that_was_missed(what: str, caplog: pytest.LogCaptureFixture) -> None:
    trained = Trained("O2", "larger")
    trained.check_step(batch(0))
    if what == "model":
        trained.model.load_state_dict({name: value * 0.5 for name, value in trained.model.state_dict().items()})
    else:
        state = xamp.state_dict(trained.optimizer)
        trained.check_step(batch(1))
        xamp.load_state_dict(state, trained.optimizer)
    for number in range(3):
        trained.check_step(batch(number))
    assert not graphs.ask
    assert not [record for record in caplog.records if record.name == "xamp"]


def test_an_export_leaves_the_weights_where_they_belong() -> None:
    trained = Trained("O2", "eager")
    trained.check_step(batch(0))
    trained.halve()
    exported = torch.export.export(trained.model, (batch(1),)).module()
    for found in (exported(batch(2)), trained.model(batch(2))):
        torch.testing.assert_close(found.detach(), trained.by_hand(batch(2)), rtol=2e-2, atol=2e-3)
    assert not graphs.exist


@pytest.mark.parametrize("how", ["whole", "whole, clips"])
def test_nothing_is_compiled_again_where_nobody_writes(how: str) -> None:
    trained = Trained("O2", how)
    frames = []
    for number in range(6):
        trained.check_step(batch(number))
        frames.append(trained.counter.frame_count)
    assert frames[2] == frames[-1]
    assert not graphs.ask


def test_a_larger_graph_asks_once_a_write_was_missed(caplog: pytest.LogCaptureFixture) -> None:
    trained = Trained("O2", "larger")
    trained.check_step(batch(0))
    trained.halve()
    trained.step(batch(1))  # this one runs with the weights of before
    assert ["the forward before this scale_loss" in r.message for r in caplog.records if r.name == "xamp"] == [True]
    caplog.clear()
    for number in range(2, 5):
        trained.check_step(batch(number))
        trained.halve()
    trained.check_forward(batch(5))
    assert not [record for record in caplog.records if record.name == "xamp"]


def test_a_step_that_is_skipped_leaves_the_write_to_the_next_forward() -> None:
    trained = Trained("O2", "whole, clips")
    trained.check_step(batch(0))
    start = [p.detach().clone() for p in trained.kept]
    trained.step(batch(1) * float("inf"))
    assert xamp.session(trained.optimizer).last_step is xamp.StepOutcome.SKIPPED
    assert all(torch.equal(p, old) for p, old in zip(trained.kept, start, strict=True))
    assert not graphs.ask
    trained.check_step(batch(2))
