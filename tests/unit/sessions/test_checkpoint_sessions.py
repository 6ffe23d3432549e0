"""Wrapped models, disabled sessions, sessions without an optimizer, and which session is meant.

Covers: xamp.sessions.checkpoint, xamp.sessions.session.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from checkpoints import Run, each_order, each_variant, everything, load, save, start, through_a_file, train
from lanes import Lane
from managed_models import Net, data_parallel
from stepping import assert_same
from torch import nn
from torch.optim import SGD

import xamp
from xamp.errors import StateError

pytestmark = pytest.mark.usefixtures("no_other_sessions")


def level_on(lane: Lane, level: str) -> dict[str, Any]:
    if level not in lane.can.levels:
        pytest.skip(f"{lane} cannot run {level}")
    return {"level": level, "init_scale": 64.0, "growth_interval": 3, "verbosity": 0}


@pytest.mark.parametrize("level", ["O1", "O2"])
@each_order
@pytest.mark.parametrize("wrapper", ["compiled", "data parallel"])
def test_a_wrapped_model_loads_from_a_bare_one_and_back(
    lane: Lane, level: str, order: Sequence[str], wrapper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrap: Any = (
        data_parallel(lane, monkeypatch)
        if wrapper == "data parallel"
        else functools.partial(torch.compile, backend="eager")
    )

    def wrapped(seed: int) -> Run:
        torch.manual_seed(seed)
        model = Net().to(lane.device)
        optimizer = SGD(model.parameters(), lr=0.125, momentum=0.9)
        outer = wrap(model)
        xamp.initialize(outer, optimizer, **level_on(lane, level))
        return Run(outer, optimizer)

    bare = start(lane, level)
    train(bare, lane, range(3))
    state = save(bare)
    run = wrapped(2)
    xamp.load_state_dict(state["xamp"], run.model)
    assert_same(xamp.state_dict(run.optimizer), state["xamp"])
    own = save(run)
    resumed = wrapped(3)
    load(resumed, own, order)
    assert_same(save(resumed), own)
    back = start(lane, level, seed=4)
    load(back, own, ["xamp"])
    assert_same(xamp.state_dict(back.model), state["xamp"])


@each_variant
@each_order
def test_a_disabled_session_saves_and_loads_and_does_nothing(lane: Lane, variant: str, order: Sequence[str]) -> None:
    source = start(lane, variant)
    train(source, lane, range(3))
    off = start(lane, "O0", seed=2, enabled=False)
    load(off, save(source), order)
    assert xamp.loss_scale(off.optimizer) == 1.0
    state = xamp.state_dict(off.model)
    assert (state["scalers"], state["masters"], state["optimizers"]) == ([], [{}], [])
    assert xamp.state_dict(off.model, format="torch") == {}
    torch.amp.GradScaler("cpu", enabled=False).load_state_dict(xamp.state_dict(off.model, format="torch"))
    xamp.load_state_dict({}, off.model)
    on = start(lane, variant, seed=3)
    before = everything(on)
    xamp.load_state_dict(through_a_file(state), on.model)
    assert_same(everything(on), before)


def test_without_an_object_the_only_session_is_meant(lane: Lane) -> None:
    gc.collect()  # what other tests left in cycles
    with pytest.raises(StateError, match=r"state_dict\(\): 0 sessions are live.*Pass a model or optimizer"):
        xamp.state_dict()
    with pytest.raises(StateError, match=r"load_state_dict\(\): 0 sessions are live"):
        xamp.load_state_dict({})
    run = start(lane, "O1")
    state = xamp.state_dict()
    assert_same(state, xamp.state_dict(run.model))
    xamp.load_state_dict(state)
    other = start(lane, "O1")
    with pytest.raises(StateError, match=r"state_dict\(\): 2 sessions are live"):
        xamp.state_dict()
    with pytest.raises(StateError, match=r"load_state_dict\(\): 2 sessions are live"):
        xamp.load_state_dict(state)
    xamp.session(other.model).close()
    xamp.load_state_dict(state)
    with pytest.raises(StateError, match=r"^state_dict\(obj=Linear\): not given to xamp.initialize"):
        xamp.state_dict(nn.Linear(1, 1))


@each_order
def test_an_inference_session_that_loads_before_its_optimizer_comes(lane: Lane, order: Sequence[str]) -> None:
    source = start(lane, "O2")
    train(source, lane, range(4))
    state = save(source)
    train(source, lane, range(4, 8))
    torch.manual_seed(2)
    model: Any = Net().to(lane.device)
    told = level_on(lane, "O2")
    xamp.initialize(model, **told)
    parts = [part for part in order if part != "optimizer"]
    for part in parts:
        (xamp.session(model) if part == "xamp" else model).load_state_dict(state[part])
    optimizer = SGD(model.parameters(), lr=0.125, momentum=0.9)
    xamp.initialize(model, optimizer, **told)
    optimizer.load_state_dict(state["optimizer"])
    run = Run(model, optimizer)
    train(run, lane, range(4, 8))
    assert_same(everything(run), everything(source))
