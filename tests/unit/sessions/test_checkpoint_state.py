"""What is in a state, that it is a copy, and that a run goes on from it as if it had never stopped.

Covers: xamp.sessions.checkpoint.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from checkpoints import (
    OPTIMIZERS,
    ORDERS,
    each_order,
    each_variant,
    everything,
    load,
    save,
    start,
    through_a_file,
    train,
)
from lanes import Lane
from snapshot import Snapshot
from stepping import assert_same
from torch.distributed.checkpoint.stateful import Stateful

import xamp
from xamp.scaling.counts import Counts


@each_variant
def test_a_state_comes_out_of_a_file_as_it_went_in(lane: Lane, variant: str) -> None:
    run = start(lane, variant)
    train(run, lane, range(3), overflows=[1])
    state = xamp.state_dict(run.optimizer)
    assert_same(through_a_file(state), state)
    assert_same(xamp.state_dict(run.model), state)
    session: Any = xamp.session(run.model)
    assert_same(session.state_dict(), state)
    assert isinstance(session, Stateful)


def test_its_content_at_o1(lane: Lane) -> None:
    run = start(lane, "O1")
    train(run, lane, range(6), overflows=[4])
    assert xamp.state_dict(run.optimizer) == {
        "format": "xamp",
        "schema": 1,
        "level": "O1",
        "dtype": "float16",
        "steps": {"applied": 5, "skipped": 1},
        "scalers": [{"dynamic": True, "scale": 64.0, "growth_tracker": 1}],  # 64, after three steps 128, back to 64
        "optimizers": [{"overflow_run": 0, "masters": {}}],
        "masters": [{}],
    }


def test_its_content_at_o2(lane: Lane) -> None:
    run = start(lane, "O2", num_losses=2)
    train(run, lane, range(3))
    state: Any = xamp.state_dict(run.optimizer)
    masters = state.pop("masters")
    assert state == {
        "format": "xamp",
        "schema": 1,
        "level": "O2",
        "dtype": "float16",
        "steps": {"applied": 3, "skipped": 0},
        "scalers": [
            {"dynamic": True, "scale": 128.0, "growth_tracker": 0},
            {"dynamic": True, "scale": 64.0, "growth_tracker": 0},
        ],
        "optimizers": [{"overflow_run": 0, "masters": {}}],
    }
    [named] = masters
    assert list(named) == ["inner.weight", "inner.bias", "head.weight", "head.bias"], "batch norm stays fp32 itself"
    stepped = dict(zip(dict(run.model.named_parameters()), xamp.master_params(run.optimizer), strict=True))
    for name, master in named.items():
        assert torch.equal(master, stepped[name].detach().cpu())
        assert not torch.equal(master, run.model.get_parameter(name).detach().float().cpu()), "no more than fp16 holds"


@each_variant
def test_a_state_is_a_copy_both_ways(lane: Lane, variant: str) -> None:
    run = start(lane, variant)
    train(run, lane, range(2))
    state = xamp.state_dict(run.optimizer)
    before = copy.deepcopy(state)
    train(run, lane, range(2, 4))
    assert_same(state, before)
    xamp.load_state_dict(state, run.optimizer)
    train(run, lane, range(2, 4))
    assert_same(state, before)
    now = everything(run)
    for named in state["masters"]:
        for master in named.values():
            master.fill_(7.0)
    assert_same(everything(run), now)


@each_variant
def test_saving_changes_nothing(lane: Lane, variant: str) -> None:
    run = start(lane, variant)
    train(run, lane, range(3), overflows=[1])
    before = Snapshot(run.model, run.optimizer)
    for kind in ("xamp", "torch", "torch_npu"):
        xamp.state_dict(run.optimizer, format=kind)
    before.assert_same()


@pytest.mark.drawn(40)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@each_order
@each_variant
def test_a_resumed_run_ends_as_the_one_that_went_on(
    lane: Lane, variant: str, order: Sequence[str], optimizer: str
) -> None:
    run = start(lane, variant, optimizer=optimizer)
    train(run, lane, range(8), overflows=[5])
    state = save(run)
    outcomes = train(run, lane, range(8, 16), overflows=[10, 11])
    resumed = start(lane, variant, seed=2, optimizer=optimizer)
    load(resumed, state, order)
    assert train(resumed, lane, range(8, 16), overflows=[10, 11]) == outcomes
    assert_same(everything(resumed), everything(run))


@each_order
@pytest.mark.parametrize("steps", [0, 1])
def test_a_run_saved_before_anything_had_stepped(lane: Lane, order: Sequence[str], steps: int) -> None:
    """After nothing, and after one step that was skipped, so that the optimizer has no state."""
    run = start(lane, "O2")
    train(run, lane, range(steps), overflows=[0])
    state = save(run)
    train(run, lane, range(1, 5))
    resumed = start(lane, "O2", seed=2)
    load(resumed, state, order)
    train(resumed, lane, range(1, 5))
    assert_same(everything(resumed), everything(run))


@pytest.mark.parametrize("part", ORDERS[0])
@each_variant
def test_what_is_loaded_alone_brings_its_own_and_leaves_the_rest(lane: Lane, variant: str, part: str) -> None:
    run = start(lane, variant)
    train(run, lane, range(8), overflows=[7])
    state, resumed = save(run), start(lane, variant, seed=2)
    before, wanted = everything(resumed), everything(run)
    load(resumed, state, [part])
    after = everything(resumed)
    if part == "optimizer":
        assert_same(after, {**before, "optimizer": wanted["optimizer"]})
    elif part == "model":
        own = ["parameters", "buffers", "masters"]
        assert_same([after[key] for key in own], [wanted[key] for key in own])
        left = [before["optimizer"], before["stats"], before["xamp"]["scalers"]]
        assert_same([after["optimizer"], after["stats"], after["xamp"]["scalers"]], left)
    else:
        assert_same([after["xamp"], after["stats"]], [state["xamp"], wanted["stats"]])
        assert after["stats"] == ([7, 1] if xamp.session(run.optimizer).policy.checks else [8, 0])
        assert_same([after["optimizer"], after["buffers"]], [before["optimizer"], before["buffers"]])
        old = dict(zip(dict(resumed.model.named_parameters()), before["parameters"], strict=True))
        for name, param in resumed.model.named_parameters():
            master = state["xamp"]["masters"][0].get(name)
            assert torch.equal(param, old[name] if master is None else master.to(param))


def test_masters_keep_their_memory_format(lane: Lane) -> None:
    torch.manual_seed(1)
    model: Any = torch.nn.Conv2d(3, 4, 3).to(lane.device)
    try:
        model = model.to(memory_format=torch.channels_last)
    except RuntimeError as error:
        pytest.skip(f"{lane} has no channels_last: {error}")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if "O2" not in lane.can.levels:
        pytest.skip(f"{lane} cannot run O2")
    xamp.initialize(model, optimizer, "O2", verbosity=0)
    state = xamp.state_dict(optimizer)
    assert state["masters"][0]["weight"].is_contiguous(memory_format=torch.channels_last)
    exact = next(xamp.master_params(optimizer)).detach().clone()
    with torch.no_grad():
        next(xamp.master_params(optimizer)).zero_()
    xamp.load_state_dict(through_a_file(state), optimizer)
    assert torch.equal(next(xamp.master_params(optimizer)), exact)
    assert model.weight.is_contiguous(memory_format=torch.channels_last)


def test_a_load_that_is_interrupted_at_its_end_changes_no_number(lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    source, run = (start(lane, "O1", init_scale=scale) for scale in (64.0, 1024.0))
    train(source, lane, range(3))
    train(run, lane, range(2), overflows=[1])
    state, before = xamp.state_dict(source.optimizer), xamp.state_dict(run.optimizer)
    resume = Counts.resume

    def interrupted(counts: Counts, *given: Any) -> None:
        resume(counts, *given)
        raise KeyboardInterrupt

    monkeypatch.setattr(Counts, "resume", interrupted)
    with pytest.raises(KeyboardInterrupt):
        xamp.load_state_dict(state, run.optimizer)
    assert xamp.state_dict(run.optimizer) == before != state
