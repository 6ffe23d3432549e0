"""Saved at one level, loaded at another; with other settings; with scales out of this session's bounds.

Covers: xamp.sessions.checkpoint, xamp.scaling.masters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from checkpoints import (
    OPTIMIZERS,
    ORDERS,
    VARIANTS,
    Run,
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
from stepping import assert_same

import xamp
from xamp.errors import CheckpointError


def assert_weights(run: Run, saved: dict[str, torch.Tensor]) -> None:
    """The fp32 weights of ``saved``, as the level of ``run`` means them: cast, and exact in a master."""
    stepped = dict(zip(dict(run.model.named_parameters()), xamp.master_params(run.optimizer), strict=True))
    for name, param in run.model.named_parameters():
        assert torch.equal(param.detach().cpu(), saved[name].to(param.dtype)), name
        assert torch.equal(stepped[name].detach().cpu(), saved[name].to(stepped[name].dtype)), name
    for name, buffer in run.model.named_buffers():
        assert torch.equal(buffer.cpu(), saved[name].to(buffer.dtype)), name


@pytest.mark.drawn(100)
@each_order
@each_variant
@pytest.mark.parametrize("there", VARIANTS)
def test_any_level_loads_what_any_other_saved(lane: Lane, there: str, variant: str, order: Sequence[str]) -> None:
    source = start(lane, there, optimizer="Adam")
    train(source, lane, range(4))
    state, run = save(source), start(lane, variant, seed=2, optimizer="Adam", init_scale=16.0)
    own = run.scale
    load(run, state, order)
    assert_weights(run, state["model"])
    moves = [xamp.session(one.optimizer).policy.dynamic for one in (source, run)]
    assert run.scale == (128.0 if all(moves) else own)
    for param, kept in run.optimizer.state.items():
        assert kept["exp_avg"].dtype == param.dtype
    assert train(run, lane, range(4, 6)) == ["APPLIED"] * 2
    assert all(bool(p.isfinite().all()) for p in run.model.parameters())


@pytest.mark.parametrize("keep", [(["head"], ()), ((), ["head"]), (["head"], ["inner"])], ids=str)
@each_order
def test_another_part_of_the_model_kept_in_fp32(lane: Lane, keep: Any, order: Sequence[str]) -> None:
    source = start(lane, "O2", keep_fp32=keep[0])
    train(source, lane, range(4))
    state, run = save(source), start(lane, "O2", seed=2, keep_fp32=keep[1])
    load(run, state, order)
    assert_weights(run, state["model"])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_masters_of_a_parameter_without_one_go_into_the_parameter(lane: Lane, optimizer: str) -> None:
    """xamp's state alone: at O1 the parameter is what the master was, at O3 it is that rounded."""
    source = start(lane, "O2", optimizer=optimizer)
    train(source, lane, range(4))
    state = save(source)
    for variant in ("O1", "O3"):
        run = start(lane, variant, seed=2)
        load(run, state, ["xamp"])
        for name, master in state["xamp"]["masters"][0].items():
            param = run.model.get_parameter(name).detach().cpu()
            assert torch.equal(param, master.to(param.dtype))


@pytest.mark.parametrize("losses", [(2, 1), (1, 2), (3, 2)])
def test_another_number_of_losses_is_refused(lane: Lane, losses: tuple[int, int]) -> None:
    source = start(lane, "O2", num_losses=losses[0])
    state, run = save(source), start(lane, "O2", seed=2, num_losses=losses[1])
    before = everything(run)
    message = (
        rf"load_state_dict\(state\): it holds {losses[0]} loss scales, and initialize was called with "
        rf"num_losses={losses[1]}: the scale of loss_id={min(losses)} has no counterpart.*Nothing was loaded"
    )
    with pytest.raises(CheckpointError, match=message):
        load(run, state, ["xamp"])
    assert_same(everything(run), before)


@pytest.mark.parametrize(("there", "variant"), [("O1 static", "O1"), ("O1", "O1 static"), ("O2", "O5"), ("O4", "O2")])
def test_another_number_of_losses_does_not_matter_where_scales_do_not_move(
    lane: Lane, there: str, variant: str
) -> None:
    state = save(start(lane, there, num_losses=2))
    run = start(lane, variant, num_losses=3)
    own = [xamp.loss_scale(run.optimizer, i) for i in range(3)]
    load(run, state)
    assert [xamp.loss_scale(run.optimizer, i) for i in range(3)] == own


@pytest.mark.parametrize(("saved", "here"), [(2.0**20, 512.0), (0.25, 8.0), (100.0, 100.0), (2.0**-149, 8.0)])
def test_a_scale_out_of_this_sessions_bounds_stops_at_them(lane: Lane, saved: float, here: float) -> None:
    run = start(lane, "O1", min_loss_scale=8.0, max_loss_scale=512.0)
    state = xamp.state_dict(run.optimizer)
    state["scalers"][0]["scale"] = saved
    xamp.load_state_dict(state, run.optimizer)
    assert run.scale == here


@pytest.mark.parametrize(("tracker", "updates"), [(0, 3), (1, 2), (2, 1), (3, 1), (2000, 1), (2**31 - 1, 1)])
def test_a_count_beyond_this_sessions_interval_grows_at_the_next_update(lane: Lane, tracker: int, updates: int) -> None:
    run = start(lane, "O1")
    state = xamp.state_dict(run.optimizer)
    state["scalers"][0]["growth_tracker"] = tracker
    xamp.load_state_dict(state, run.optimizer)
    train(run, lane, range(updates - 1))
    assert run.scale == 64.0
    train(run, lane, [updates])
    assert run.scale == 128.0


def test_factors_and_interval_are_those_of_this_session(lane: Lane) -> None:
    state = save(start(lane, "O1", growth_factor=4.0, backoff_factor=0.25, growth_interval=1))
    run = start(lane, "O1")
    load(run, state)
    train(run, lane, range(2))
    assert run.scale == 64.0
    train(run, lane, [2])
    assert run.scale == 128.0
    train(run, lane, [3], overflows=[3])
    assert run.scale == 64.0


def test_weights_that_the_lower_dtype_cannot_hold_come_back_from_it(lane: Lane) -> None:
    """2**17 is too large for fp16: the master stays 2**17, also when the model is loaded after it, and trained."""
    source = start(lane, "O1")
    with torch.no_grad():
        source.model.inner.weight[0, 0] = 2.0**17
    state = save(source)
    for order in ORDERS:
        run = start(lane, "O2", seed=2)
        load(run, state, order)
        held = math.inf if lane.can.overflow == "inf" else torch.finfo(torch.float16).max
        assert float(run.model.inner.weight.detach()[0, 0]) == held
        assert float(run.model.state_dict()["inner.weight"][0, 0]) == 2.0**17
        train(run, lane, [0])
        assert float(through_a_file(run.model.state_dict())["inner.weight"][0, 0]) == 2.0**17
