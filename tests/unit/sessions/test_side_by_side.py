"""Several sessions, threads, foreign autocast, exceptions and garbage: nothing reaches what it does not belong to.

Covers: xamp.sessions.session, xamp.casting.active.
"""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from lanes import Lane
from managed_models import INSIDE, LEVELS, Net, batch, net, ran_in, sgd, start, train
from torch import nn

import xamp
from xamp.errors import StateError


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("foreign", [torch.float16, torch.bfloat16])
def test_a_users_own_autocast_around_changes_nothing_inside_and_stays(
    foreign: torch.dtype, level: str, lane: Lane
) -> None:
    model = start(net(lane), level, lane).eval()
    expected = model(batch(lane))
    x = batch(lane)
    with torch.autocast(lane.device.type, dtype=foreign):
        assert (x @ x.T).dtype == foreign
        out, hidden = model(x)
        assert (x @ x.T).dtype == foreign
    assert out.dtype == torch.float32
    assert ran_in(hidden) == INSIDE[level]
    assert torch.equal(out, expected[0])


@pytest.mark.parametrize("level", LEVELS)
def test_a_weight_changed_between_two_calls_is_seen(level: str, lane: Lane) -> None:
    model = start(net(lane), level, lane).eval()
    assert model(batch(lane))[1].abs().sum() > 0
    with torch.no_grad():
        model.inner.weight.zero_()
        model.inner.bias.zero_()
    assert model(batch(lane))[1].abs().sum() == 0, "torch's cache of cast weights outlived the region"


class Outer(nn.Module):
    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.own = nn.Linear(4, 4)
        self.held = [inside]  # no submodule: used, not owned

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        inside = self.held[0](x)[1]
        return self.own(x), self.own(x).double(), inside


@pytest.mark.parametrize("inner", LEVELS)
@pytest.mark.parametrize("outer", LEVELS)
def test_a_model_called_in_anothers_forward_keeps_its_own_policy(outer: str, inner: str, lane: Lane) -> None:
    model = start(Outer(start(net(lane), inner, lane)).to(lane.device), outer, lane)
    _, own, inside = model(batch(lane))
    assert ran_in(own) == INSIDE[outer]
    assert ran_in(inside) == INSIDE[inner]


def test_one_scale_loss_over_two_sessions_is_refused(lane: Lane) -> None:
    models = [net(lane), net(lane)]
    optimizers = [sgd(model) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        xamp.initialize(model, optimizer, level="O0", verbosity=0)
    with pytest.raises(StateError, match="different sessions"):
        xamp.scale_loss(models[0](batch(lane))[0].sum(), optimizers)


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_a_region_in_one_thread_does_not_reach_another(level: str, lane: Lane) -> None:
    model = start(net(lane), level, lane).eval()
    wrong: list[object] = []
    stop = threading.Event()

    def plain_work() -> None:
        x = batch(lane)
        while not stop.is_set():
            if (x @ x.T).dtype != torch.float32 or torch.is_autocast_enabled(lane.device.type):
                wrong.append("plain thread saw the region")

    def region_work() -> None:
        for _ in range(100):
            if ran_in(model(batch(lane))[1]) != INSIDE[level]:
                wrong.append("region lost")

    plain = threading.Thread(target=plain_work)
    regions = [threading.Thread(target=region_work) for _ in range(2)]
    for thread in (plain, *regions):
        thread.start()
    for thread in regions:
        thread.join()
    stop.set()
    plain.join()
    assert wrong == []


# ---------------------------------------------------------------- garbage


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("steps", [0, 1])
def test_model_optimizer_and_session_go_when_they_are_let_go(level: str, steps: int, lane: Lane) -> None:
    model = net(lane)
    optimizer = sgd(model)
    xamp.initialize(model, optimizer, level=level, keep_fp32=["head"], verbosity=0)
    train(model, optimizer, batch(lane), steps)
    session: Any = xamp.session(model)
    masters = list(xamp.master_params(optimizer))
    gone = [weakref.ref(x) for x in (model, optimizer, session, masters[0], model.inner.weight)]
    gone += [weakref.ref(x) for x in (*optimizer.__dict__["_xamp"], session.policy)]  # the engine, and what it keeps
    del model, optimizer, session, masters
    gc.collect()
    assert [ref() for ref in gone] == [None] * len(gone)


@pytest.mark.parametrize("level", LEVELS)
def test_a_model_outlives_its_optimizer_and_an_optimizer_its_model(level: str, lane: Lane) -> None:
    model = net(lane)
    optimizer = sgd(model)
    xamp.initialize(model, optimizer, level=level, verbosity=0)
    train(model, optimizer, batch(lane))
    del optimizer
    gc.collect()
    assert ran_in(model(batch(lane))[1]) == INSIDE[level]
    assert model.state_dict()["inner.weight"].dtype == torch.float32
    other = net(lane)
    optimizer = sgd(other)
    xamp.initialize(other, optimizer, level=level, verbosity=0)
    del other
    gc.collect()
    optimizer.zero_grad()
    assert len(list(xamp.master_params(optimizer))) == 6
    xamp.session(optimizer).close()
    assert type(optimizer) is torch.optim.SGD


def test_classes_made_for_a_policy_go_with_the_users_class(lane: Lane) -> None:
    class Local(Net):
        pass

    model = start(Local().to(lane.device), "O1", lane)
    model(batch(lane))
    ref = weakref.ref(Local)
    del model, Local
    gc.collect()
    assert ref() is None
