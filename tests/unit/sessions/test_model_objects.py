"""What a model is after ``initialize``: the same object in every respect but the dtype it computes in.

Covers: xamp.sessions.set_up, xamp.casting.forward.
"""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lanes import Lane
from managed_models import (
    INSIDE,
    LEVELS,
    SPECIAL,
    SPECIAL_IDS,
    Net,
    WithSlots,
    batch,
    data_parallel,
    net,
    ran_in,
    sgd,
    start,
)
from torch import nn

import xamp


def initialized(level: str, lane: Lane, **options: Any) -> tuple[Net, torch.optim.Optimizer]:
    model = net(lane)
    optimizer = sgd(model)
    xamp.initialize(model, optimizer, level=level, verbosity=0, **options)
    return model, optimizer


@pytest.mark.parametrize("level", LEVELS)
def test_the_very_same_objects_come_back_in_the_same_shape(level: str, lane: Lane) -> None:
    one, two = net(lane), net(lane)
    first, second = sgd(one), sgd(two)
    assert start(one, level, lane) is one
    models, optimizers = [two], (second,)
    found = xamp.initialize(models, optimizers, level=level, verbosity=0)
    assert found[0] is models
    assert found[1] is optimizers
    assert models[0] is two
    back = xamp.initialize(one, first, level=level, verbosity=0)
    assert back[0] is one
    assert back[1] is first


@pytest.mark.parametrize("level", LEVELS)
def test_a_model_looks_as_it_did(level: str, lane: Lane) -> None:
    plain = net(lane)
    parameters = list(plain.named_parameters())
    signature, shown = inspect.signature(plain.forward), repr(plain)
    keys = list(plain.state_dict())
    model = start(plain, level, lane)
    assert isinstance(model, Net)
    assert type(model).__name__ == "Net"
    assert type(model).__qualname__ == Net.__qualname__
    assert type(model).__module__ == Net.__module__
    assert type(model).__doc__ == Net.__doc__
    assert repr(model) == shown
    assert inspect.signature(model.forward) == signature
    assert list(model.state_dict()) == keys
    assert all(a is b for (_, a), (_, b) in zip(parameters, model.named_parameters(), strict=True))


@pytest.mark.parametrize("level", LEVELS)
def test_a_model_computes_in_the_levels_dtype_and_returns_fp32(level: str, lane: Lane) -> None:
    model = start(net(lane), level, lane)
    out, hidden = model(batch(lane), gain=2.0)
    assert out.dtype == torch.float32
    assert ran_in(hidden) == INSIDE[level]
    for name in lane.can.dtypes:
        assert ran_in(model(batch(lane).to(getattr(torch, name)))[1]) == INSIDE[level]


# ---------------------------------------------------------------- copies and pickles


@pytest.mark.parametrize("level", LEVELS)
def test_a_deepcopy_runs_its_own_weights_under_the_policy(level: str, lane: Lane) -> None:
    model = start(net(lane), level, lane).eval()
    twin = copy.deepcopy(model)
    assert torch.equal(twin(batch(lane))[0], model(batch(lane))[0])
    with torch.no_grad():
        twin.inner.weight.zero_()
        twin.inner.bias.zero_()
    assert torch.equal(twin(batch(lane))[1], torch.zeros_like(twin(batch(lane))[1]))
    assert ran_in(model(batch(lane))[1]) == INSIDE[level]
    assert model(batch(lane))[1].abs().sum() > 0
    with torch.no_grad():
        copy.deepcopy(model).head.weight.fill_(1.0)
    assert not torch.equal(model.head.weight, torch.ones_like(model.head.weight))


@pytest.mark.parametrize("level", LEVELS)
def test_a_shallow_copy_runs_under_the_policy(level: str, lane: Lane) -> None:
    assert ran_in(copy.copy(start(net(lane), level, lane))(batch(lane))[1]) == INSIDE[level]


def through_pickle(model: nn.Module) -> nn.Module:
    made = pickle.loads(pickle.dumps(model))
    assert isinstance(made, nn.Module)
    return made


@pytest.mark.parametrize("make", SPECIAL, ids=SPECIAL_IDS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_classes_with_customs_of_their_own_run_copy_and_pickle(
    level: str, make: Callable[[], nn.Module], lane: Lane
) -> None:
    model = start(make().to(lane.device), level, lane)
    expected = model(batch(lane))
    assert ran_in(expected) == INSIDE[level]
    twin = copy.deepcopy(model)
    assert issubclass(type(twin), type(make()))
    assert torch.equal(twin(batch(lane)), expected)
    assert ran_in(twin(batch(lane))) == INSIDE[level]
    plain: Any = through_pickle(model)
    assert type(plain) is type(make())
    assert ran_in(plain(batch(lane))) == torch.float32


@pytest.mark.parametrize("level", LEVELS)
def test_a_class_with_slots_runs_under_the_policy(level: str, lane: Lane) -> None:
    model = WithSlots().to(lane.device)
    model.factor = 2.0
    start(model, level, lane)
    assert model.factor == 2.0
    assert ran_in(model(batch(lane))) == INSIDE[level]


# ---------------------------------------------------------------- instance attributes, slices, replicas


def other_forward(module: Net, x: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = module.inner(x)
    return made.double()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ["bound method", "partial", "lambda"])
def test_an_instances_own_forward_runs_under_the_policy(kind: str, level: str, lane: Lane) -> None:
    model = net(lane)
    own: dict[str, Callable[..., torch.Tensor]] = {
        "bound method": other_forward.__get__(model),
        "partial": functools.partial(other_forward, model),
        "lambda": lambda x: other_forward(model, x),
    }
    model.__dict__["forward"] = own[kind]
    shown = inspect.signature(model.forward), getattr(model.forward, "__name__", None)
    start(model, level, lane)
    assert (inspect.signature(model.forward), getattr(model.forward, "__name__", None)) == shown
    assert ran_in(model(batch(lane))) == INSIDE[level]
    xamp.session(model).close()
    assert model.__dict__["forward"] is own[kind]
    assert ran_in(model(batch(lane))) == torch.float32


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_deepcopy_of_a_model_with_its_own_forward_runs_the_copys_weights(level: str, lane: Lane) -> None:
    model = net(lane)
    model.forward = other_forward.__get__(model)  # type: ignore[method-assign]
    twin = copy.deepcopy(start(model, level, lane))
    with torch.no_grad():
        twin.inner.weight.zero_()
        twin.inner.bias.zero_()
    assert twin(batch(lane)).abs().sum() == 0


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.double()


@pytest.mark.parametrize("level", LEVELS)
def test_a_slice_of_a_sequential_runs_under_the_policy(level: str, lane: Lane) -> None:
    model = nn.Sequential(nn.Linear(4, 8), Doubled(), nn.Identity()).to(lane.device)
    part = start(model, level, lane)[:2]
    assert len(part) == 2
    assert ran_in(part(batch(lane))) == INSIDE[level]


@pytest.mark.parametrize("level", LEVELS)
def test_a_data_parallel_replica_runs_its_own_weights_in_its_thread(level: str, lane: Lane) -> None:
    model = start(net(lane), level, lane)
    replica: Any = model._replicate_for_data_parallel()
    for name, child in model.named_children():
        twin: Any = child._replicate_for_data_parallel()
        for key, param in child._parameters.items():
            setattr(twin, key, torch.zeros_like(param) if name == "inner" else param.detach().clone())
        setattr(replica, name, twin)
        replica._modules[name] = twin
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append((replica(batch(lane)), model(batch(lane)))))
    thread.start()
    thread.join()
    (out, zeros), (_, hidden) = results[0]
    assert out.dtype == torch.float32
    assert zeros.abs().sum() == 0
    assert ran_in(hidden) == INSIDE[level]


@pytest.mark.parametrize("level", LEVELS)
def test_data_parallel_around_a_model_and_given_with_it(
    level: str, lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = data_parallel(lane, monkeypatch)
    around = make(start(net(lane), level, lane))
    assert ran_in(around(batch(lane))[1]) == INSIDE[level]
    given = make(net(lane))
    assert start(given, level, lane) is given
    assert ran_in(given(batch(lane))[1]) == INSIDE[level]
    assert xamp.session(given).policy is xamp.session(given.module).policy
