"""Optimizers that hold optimizers: found wherever they are held, or known by a step that writes nothing.

Covers: xamp.sessions.inner_optimizers, xamp.sessions.foreign, xamp.scaling.proof.
"""

from __future__ import annotations

import collections
import functools
import gc
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import xamp
from xamp.errors import PolicyError, StateError, UnsupportedPolicy
from xamp.sessions.inner_optimizers import held

MASTERS = ("O2", "O5")
X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


class Holder(Optimizer):
    """Steps the optimizers that it was given a way to."""

    def __init__(self, model: nn.Module, keep: Callable[[Any, list[Any]], None], **options: Any) -> None:
        params = list(model.parameters())
        inner: list[Any] = [AdamW(params[:2], lr=1e-2, **options), AdamW(params[2:], lr=1e-2, **options)]
        super().__init__(params, {"lr": 1e-2})
        self.run: Callable[[], None]
        keep(self, inner)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for each in self.inner():
            each.step()

    def inner(self) -> list[Any]:
        return []


class Slots:
    __slots__ = "one", "others"

    def __init__(self, one: Any, others: Any) -> None:
        self.one, self.others = one, others


def put(name: str, value: Callable[[list[Any]], Any]) -> Callable[[Any, list[Any]], None]:
    return lambda holder, inner: setattr(holder, name, value(inner))


_alive: list[Any] = []


def _keep(inner: list[Any]) -> list[Any]:
    _alive.extend(inner)
    return inner


KEPT: dict[str, Callable[[Any, list[Any]], None]] = {
    "attribute": put("base", lambda inner: inner[0]),
    "list": put("optimizers", lambda inner: inner),
    "tuple": put("optimizers", tuple),
    "set": put("optimizers", set),
    "deque": put("optimizers", collections.deque),
    "dict": put("by_name", lambda inner: {"first": inner[0], "last": inner[1]}),
    "deep": put("plan", lambda inner: {"parts": [({"opt": inner},)]}),
    "object": put("plan", lambda inner: types.SimpleNamespace(part=types.SimpleNamespace(opts=inner))),
    "slots": put("plan", lambda inner: Slots(None, inner)),
    "partial": put("plan", lambda inner: functools.partial(print, inner[0], last=inner[1])),
    "method": put("plan", lambda inner: [each.step for each in inner]),
    "weak": put("plan", lambda inner: weakref.ref(_keep(inner)[0])),
    "in another": put("plan", lambda inner: _with(SGD([nn.Parameter(torch.ones(1))], lr=0.1), inner)),
    "ordered": put("plan", lambda inner: collections.OrderedDict(a=inner[0])),
    "user's dict": put("plan", lambda inner: collections.UserDict({"a": inner[0]})),
}


def _with(optimizer: Any, inner: list[Any]) -> Any:
    optimizer.next = inner
    return optimizer


@pytest.mark.parametrize("level", MASTERS)
@pytest.mark.parametrize("kept", KEPT)
def test_one_is_found_and_refused_where_masters_would_not_reach_it(level: str, kept: str) -> None:
    model = net()
    optimizer = Holder(model, KEPT[kept])
    cure = r"Give xamp\.initialize the optimizers within, as a list, and step each; or use a level without masters"
    with pytest.raises(UnsupportedPolicy, match=rf"level='{level}'\): Holder.* is another optimizer with .*{cure}"):
        xamp.initialize(model, optimizer, level, verbosity=0)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_the_message_says_how_to_get_there() -> None:
    optimizer = Holder(net(), KEPT["deep"])
    assert list(held(optimizer)) == [".plan['parts'][0][0]['opt'][0]", ".plan['parts'][0][0]['opt'][1]"]
    assert list(held(Holder(net(), KEPT["slots"]))) == [".plan.others[0]", ".plan.others[1]"]
    assert list(held(Holder(net(), KEPT["method"]))) == [".plan[0].__self__", ".plan[1].__self__"]


def test_a_search_ends_where_an_attribute_leads_around_or_to_a_world() -> None:
    optimizer: Any = Holder(net(), KEPT["attribute"])
    optimizer.itself = [optimizer]
    optimizer.numbers = {"a": list(range(10**5)), "model": net(), "kind": AdamW, "module": torch}
    assert list(held(optimizer)) == [".base"]
    assert held(SGD(net().parameters(), lr=0.1)) == {}


def test_one_that_shares_the_groups_is_taken_and_trains() -> None:
    class Lookahead(Optimizer):
        def __init__(self, base: Optimizer) -> None:
            super().__init__([nn.Parameter(torch.ones(1))], {})
            self.base = base
            self.param_groups = base.param_groups

        def step(self, closure: Any = None) -> Any:
            return self.base.step(closure)

    losses = {}
    for level in ("O1", *MASTERS):
        model: Any = net()
        optimizer = Lookahead(AdamW(model.parameters(), lr=1e-2))
        xamp.initialize(model, optimizer, level, verbosity=0)
        losses[level] = run(model, optimizer)
    assert all(found[-1] < 0.5 * found[0] for found in losses.values())


def run(model: Any, optimizer: Any, steps: int = 30) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(X).float() - 1.0).square().mean()
        losses.append(float(loss.detach()))
        with xamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    return losses


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_at_levels_without_masters_it_trains_as_the_optimizers_within(level: str) -> None:
    found = []
    for outer in (True, False):
        model = net()
        params = list(model.parameters())
        optimizer: Any = Holder(model, KEPT["list"]) if outer else AdamW(params, lr=1e-2)
        if outer:
            optimizer.inner = functools.partial(getattr, optimizer, "optimizers")
        xamp.initialize(model, optimizer, level, verbosity=0, fused=False)
        found.append(run(model, optimizer))
    assert found[0] == found[1]


def test_at_o3_the_eps_of_those_within_counts() -> None:
    model = net()
    with pytest.raises(PolicyError, match=r"level='O3'\): AdamW\(eps=1e-08\) steps torch.float16 parameters"):
        xamp.initialize(model, Holder(model, KEPT["dict"]), "O3", verbosity=0)
    xamp.initialize(model, Holder(model, KEPT["dict"], eps=1e-3), "O3", verbosity=0)


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_one_with_parameters_that_the_outer_one_lacks_is_refused_where_gradients_are_scaled(level: str) -> None:
    model = net()
    optimizer: Any = Holder(model, KEPT["list"])
    optimizer.param_groups[0]["params"].pop()
    if level == "O4":
        xamp.initialize(model, optimizer, level, verbosity=0)
        return
    with pytest.raises(UnsupportedPolicy, match=r"Holder\.optimizers\[1\] .*that their gradients would stay scaled"):
        xamp.initialize(model, optimizer, level, verbosity=0)


@pytest.mark.parametrize("level", ["O1", *MASTERS])
def test_one_over_tensors_of_its_own_is_nobodys_business(level: str) -> None:
    """As some optimizers have for a scheduler that warms them up."""

    class Warmed(AdamW):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=1e-2)
            self.warmup = torch.optim.lr_scheduler.LinearLR(SGD([nn.Parameter(torch.ones(1))], lr=0.1))

    model: Any = net()
    optimizer = Warmed(model.parameters())
    assert list(held(optimizer)) == [".warmup.optimizer"]
    xamp.initialize(model, optimizer, level, verbosity=0)
    found = run(model, optimizer)
    assert found[-1] < 0.5 * found[0]


# ---------------------------------------------------------------- what no search finds


class Hidden(Optimizer):
    """Steps another optimizer, which only a closure knows."""

    def __init__(self, model: nn.Module, kind: Any = AdamW, lr: float = 0.1) -> None:
        super().__init__(model.parameters(), {"lr": lr})
        inner = kind(model.parameters(), lr=lr)
        self.run: Callable[[], Any] = lambda: inner.step()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        self.run()


@pytest.mark.parametrize("level", MASTERS)
@pytest.mark.parametrize("kind", [AdamW, SGD])
def test_a_step_that_writes_nothing_is_an_error_at_the_first(level: str, kind: Any) -> None:
    model = net()
    optimizer = Hidden(model, kind)
    xamp.initialize(model, optimizer, level, verbosity=0, init_scale=256.0 if level == "O2" else 2.0**16)
    with pytest.raises(
        StateError, match=r"Hidden has written into none of the 4 parameters with gradients .*as a list, and step each"
    ):
        run(model, optimizer, 1)
    assert xamp.session(model).stats.applied == 0


class Writes(Optimizer):
    """A step by hand that leaves one of few traces."""

    def __init__(self, params: Any, how: str, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.how = how

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None or self.how == "nothing":
                    continue
                if self.how == "plain":
                    param.sub_(group["lr"] * param.grad)
                elif self.how == "data":
                    param.data.sub_(group["lr"] * param.grad.data)
                elif self.how == "state":  # as one that accumulates, and steps later
                    self.state[param].setdefault("sum", torch.zeros_like(param)).add_(param.grad)
                elif self.how == "number":
                    self.state[param]["step"] = self.state[param].get("step", 0) + 1


def looked_at(model: Any, optimizer: Writes) -> None:
    """The next steps are right, or the first of them is refused."""
    if optimizer.how == "nothing":
        with pytest.raises(StateError, match="Writes has written into none"):
            run(model, optimizer, 1)
    else:
        run(model, optimizer, 3)


@pytest.mark.parametrize("level", ["O1", *MASTERS])
@pytest.mark.parametrize("how", ["plain", "data", "state", "number", "nothing"])
def test_each_trace_of_a_step_is_one(level: str, how: str) -> None:
    model = net()
    optimizer = Writes(model.parameters(), how)
    xamp.initialize(model, optimizer, level, verbosity=0, init_scale=2.0**16 if level == "O5" else 256.0)
    looked_at(model, optimizer)
    assert how == "nothing" or xamp.session(model).stats.applied == 3


@pytest.mark.parametrize("how", ["data", "nothing"])
def test_a_step_that_need_not_write_proves_nothing(how: str) -> None:
    """With a learning rate of zero, as at the start of a warm-up, or with gradients of zeros."""
    model = net()
    optimizer = Writes(model.parameters(), how, lr=0.0)
    xamp.initialize(model, optimizer, "O5", verbosity=0)
    run(model, optimizer, 2)
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.zero_grad()
    with xamp.scale_loss((model(X) * 0.0).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    looked_at(model, optimizer)


@pytest.mark.parametrize("level", ["O1", *MASTERS])
@pytest.mark.parametrize("how", ["data", "nothing"])
def test_a_write_that_rounding_takes_away_proves_nothing(level: str, how: str) -> None:
    """As at the first steps of a long warm-up: the next step is looked at."""
    model = net()
    optimizer = Writes(model.parameters(), how, lr=1e-11)
    xamp.initialize(model, optimizer, level, verbosity=0, init_scale=2.0**16 if level == "O5" else 256.0)
    run(model, optimizer, 3)
    optimizer.param_groups[0]["lr"] = 0.1
    looked_at(model, optimizer)


class EveryFourth(SGD):
    """Adds up gradients that nobody clears, and steps with the fourth."""

    in_state = True
    calls = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        if self.in_state:
            self.state[self.param_groups[0]["params"][0]]["calls"] = self.calls
        if self.calls % 4 == 0:
            super().step(closure)


@pytest.mark.parametrize("level", ["O1", *MASTERS])
@pytest.mark.parametrize("in_state", [True, False])
def test_one_that_steps_at_some_calls_keeps_their_count_in_its_state(level: str, in_state: bool) -> None:
    model = net()
    optimizer = EveryFourth(model.parameters(), lr=0.1)
    optimizer.in_state = in_state
    xamp.initialize(model, optimizer, level, verbosity=0, init_scale=2.0**16 if level == "O5" else 256.0)
    if in_state:
        before = model.state_dict()["0.weight"].clone()
        run(model, optimizer, 3)
        assert torch.equal(model.state_dict()["0.weight"], before)
        run(model, optimizer, 1)
        assert not torch.equal(model.state_dict()["0.weight"], before)
        return
    with pytest.raises(StateError, match=r"steps only at some calls keeps their count in optimizer\.state\[param\]"):
        run(model, optimizer, 1)


def test_after_one_that_wrote_no_step_is_looked_at() -> None:
    model = net()
    optimizer = Writes(model.parameters(), "data")
    xamp.initialize(model, optimizer, "O5", verbosity=0)
    run(model, optimizer, 1)
    optimizer.how = "nothing"
    run(model, optimizer, 1)


def test_sparse_gradients_are_no_sign_by_themselves() -> None:
    model: Any = nn.Embedding(5, 3, sparse=True)
    optimizer = Writes(model.parameters(), "nothing")
    xamp.initialize(model, optimizer, "O5", verbosity=0)
    with xamp.scale_loss(model(torch.tensor([1, 2])).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert xamp.session(model).stats.applied == 1


def test_a_step_that_fails_by_itself_says_so() -> None:
    class Fails(Writes):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise RuntimeError(self.how)

    for why in ("no memory", "dtype"):
        model = net()
        optimizer = Fails(model.parameters(), why)
        xamp.initialize(model, optimizer, "O5", verbosity=0)
        with pytest.raises(StateError if why == "dtype" else RuntimeError, match="none of" if why == "dtype" else why):
            run(model, optimizer, 1)


# ---------------------------------------------------------------- engines that hold a model


def engine_of(model: nn.Module, path: str, base: type = nn.Module) -> Any:
    module, _, name = path.rpartition(".")
    made: Any = type(name, (base,), {"__module__": module, "__init__": lambda self: nn.Module.__init__(self)})()
    made.module = model
    return made


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
@pytest.mark.parametrize(
    ("path", "library"),
    [
        ("deepspeed.runtime.engine.DeepSpeedEngine", "DeepSpeed"),
        ("deepspeed.runtime.pipe.engine.PipelineEngine", "DeepSpeed"),
        ("megatron.core.distributed.distributed_data_parallel.DistributedDataParallel", "Megatron"),
    ],
)
def test_the_module_of_an_engine_is_refused_as_the_engine_is(level: str, path: str, library: str) -> None:
    for of_engine in (True, False):
        model = net()
        engine = engine_of(model, path)
        if not of_engine:  # a user's subclass, and an optimizer whose parameters the engine has replaced
            engine = engine_of(model, "mine.Engine", type(engine))
        params = model.parameters() if of_engine else [nn.Parameter(torch.ones(3))]
        with pytest.raises(UnsupportedPolicy, match=rf"initialize\(models=\.\.\.\): \w+ is an object of {library}"):
            xamp.initialize(model, SGD(params, lr=0.1), level, verbosity=0)
        assert engine.module is model
        del engine


def test_a_model_beside_an_engine_and_one_whose_engine_is_gone_are_taken() -> None:
    engine = engine_of(net(), "deepspeed.runtime.engine.DeepSpeedEngine")
    for model in (net(), engine.module):
        if model is engine.module:
            del engine
            gc.collect()
        xamp.initialize(model, SGD(model.parameters(), lr=0.1), "O1", verbosity=0)


class Own(SGD):
    pass


@pytest.mark.parametrize("level", ["O1", *MASTERS])
def test_optimizers_that_lead_to_each_other_are_given_both(level: str) -> None:
    class Trainer:
        def __init__(self, *optimizers: Any) -> None:
            self.first, self.second = optimizers
            self.first.register_step_post_hook(self.hook)

        def hook(self, *_: object) -> None:
            pass

    models: list[nn.Module] = [net(), net()]
    optimizers: list[Any] = [Own(model.parameters(), lr=0.125) for model in models]
    Trainer(*optimizers)
    assert [*held(optimizers[0]).values()] == [optimizers[1]]
    assert held(optimizers[0], optimizers) == {}
    xamp.initialize(models, optimizers, level, verbosity=0)


def test_a_weak_proxy_whose_object_is_gone_is_passed_by() -> None:
    optimizer: Any = Own(net().parameters(), lr=0.125)
    owner = Own(net().parameters(), lr=0.125)
    optimizer.owner = weakref.proxy(owner)
    del owner
    gc.collect()
    assert held(optimizer) == {}


@pytest.mark.parametrize("rate", [None, 0.0])
def test_a_rate_of_a_group_without_gradients_proves_nothing(rate: float | None) -> None:
    """Adafactor's is None; a group that is frozen by its rate moves nothing."""
    model: Any = net()
    groups = [{"params": model[0].parameters(), "lr": rate}, {"params": model[2].parameters(), "lr": 0.1}]

    class Still(Optimizer):
        def __init__(self, groups: Any) -> None:
            super().__init__(groups, {"lr": 0.1})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            del closure

    optimizer: Any = Still(groups)
    model, optimizer = xamp.initialize(model, optimizer, "O2", init_scale=1.0, verbosity=0)
    model[2].requires_grad_(False)
    model[0].requires_grad_(True)
    loss = model(X).float().square().sum()
    with xamp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    if rate is None:
        with pytest.raises(StateError, match="has written into none"):
            optimizer.step()
    else:
        optimizer.step()
