"""Tier scaling, third part: a script that uses ``xamp.GradScaler`` by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam

import xamp
from xamp.errors import LossScaleCollapsed, StateError
from xamp.testing.exact import (
    Dot,
    Pair,
    assert_follows,
    assert_same,
    clip,
    inputs,
    picture,
    start,
)
from xamp.testing.forms import FEW, Form
from xamp.testing.lane import Lane
from xamp.testing.scale_rules import Rule, overflows
from xamp.testing.tier import Tier

__all__ = ["ByHand"]

BY_HAND = [*FEW, Form(SGD, {"momentum": 0.9}, "fused"), Form(Adam, {}, "fused"), Form(Adam, {}, "foreach")]
RULE = Rule(start=1024.0, interval=4)
MAX_NORM = 0.5


class ByHand(Tier):
    """A ``xamp.GradScaler`` follows the same rules as ``initialize``."""

    tier = "scaling"

    @pytest.mark.parametrize("form", BY_HAND, ids=str)
    @pytest.mark.parametrize("way", ["step", "unscale", "clip"])
    def test_grad_scaler(self, lane: Lane, form: Form, way: str) -> None:
        """Over 60 iterations with overflows ``xamp.GradScaler`` gives the right scale, weights and outcomes."""
        pair, scaler = _by_hand(lane, form), _scaler(RULE)
        spoilt = [False, *overflows(59, seed=2)]  # torch's fused SGD makes its buffers in an applied step
        wanted = RULE.scales(spoilt)
        for overflow, x in zip(spoilt, inputs(60, lane), strict=True):
            pair.optimizer.zero_grad()
            with xamp.autocast():
                loss = pair.model(x)
            scaler.scale(loss).backward()
            if overflow:
                lane.overflow_(pair.model.second.weight.grad)
            if way != "step":
                scaler.unscale_(pair.optimizer)
            norm = clip(pair.model.parameters(), MAX_NORM) if way == "clip" else None
            still = picture(pair.model, pair.optimizer)
            scaler.step(pair.optimizer)
            if overflow:
                assert_same(picture(pair.model, pair.optimizer), still)
            else:
                plain_norm = _plain_step(pair, x, way == "clip")
                assert norm is None or torch.allclose(norm, plain_norm, rtol=1e-6, atol=0)
            scaler.update()
            assert scaler.last_step is xamp.StepOutcome["SKIPPED" if overflow else "APPLIED"]
            assert scaler.get_scale() == next(wanted)
        assert (scaler.stats.applied, scaler.stats.skipped) == (60 - sum(spoilt), sum(spoilt))
        assert_follows(pair)

    @pytest.mark.parametrize("spoilt", [0, 1])
    def test_grad_scaler_of_two_optimizers(self, lane: Lane, spoilt: int) -> None:
        """With one ``update`` for two optimizers only the one that overflowed skips (on a chip with a flag, both)."""
        scaler = _scaler(RULE)
        pairs = [_by_hand(lane, form) for form in FEW]
        for count, x in enumerate(inputs(6, lane)):
            for pair in pairs:
                pair.optimizer.zero_grad()
            scaler.scale(sum(pair.model(x) for pair in pairs)).backward()
            if count == 2:
                lane.overflow_(pairs[spoilt].model.first.weight.grad)
            for index, pair in enumerate(pairs):
                skips = count == 2 and (index == spoilt or lane.can.overflow == "flag")
                still = picture(pair.model, pair.optimizer)
                scaler.step(pair.optimizer)
                if skips:
                    assert_same(picture(pair.model, pair.optimizer), still)
                else:
                    _plain_step(pair, x, clipped=False)
            scaler.update()
            skipped = [scaler.last_step[pair.optimizer] is xamp.StepOutcome.SKIPPED for pair in pairs]
            both = lane.can.overflow == "flag"
            assert skipped == [count == 2 and (both or index == spoilt) for index in (0, 1)]
            for pair in pairs:
                assert_follows(pair)
        assert scaler.get_scale() == RULE.start / 2

    def test_grad_scaler_floor(self, lane: Lane) -> None:
        """The scale stops at the floor; 50 overflows in a row there raise one error, and the loop can go on."""
        pair, scaler = _by_hand(lane, FEW[0]), _scaler(Rule(start=8.0))
        still, reported = picture(pair.model, pair.optimizer), []
        x = inputs(1, lane)[0]
        for count in range(1, 61):
            pair.optimizer.zero_grad()
            scaler.scale(pair.model(x)).backward()
            lane.overflow_(pair.model.first.weight.grad)
            try:
                scaler.step(pair.optimizer)
            except LossScaleCollapsed:
                reported.append(count)
            scaler.update()
            assert scaler.get_scale() == max(8.0 / 2**count, 1.0)
        assert reported == [53]
        assert_same(picture(pair.model, pair.optimizer), still)

    def test_grad_scaler_order(self, lane: Lane) -> None:
        """Stepping, unscaling or updating twice raises and does nothing; so does stepping a managed optimizer."""
        pair, scaler = _by_hand(lane, FEW[0]), _scaler(RULE)
        x = inputs(1, lane)[0]
        scaler.scale(pair.model(x)).backward()
        scaler.unscale_(pair.optimizer)
        managed = start(lane, "O1")
        with pytest.raises(StateError, match="already"):
            scaler.unscale_(pair.optimizer)
        with pytest.raises(StateError, match="manages this optimizer"):
            scaler.step(managed.optimizer)
        scaler.step(pair.optimizer)
        with pytest.raises(StateError, match="already"):
            scaler.step(pair.optimizer)
        with pytest.raises(StateError, match="after step"):
            scaler.unscale_(pair.optimizer)
        scaler.update()
        with pytest.raises(StateError, match="update"):
            scaler.update()
        _plain_step(pair, x, clipped=False)
        assert_follows(pair)
        assert scaler.get_scale() == RULE.start


def _by_hand(lane: Lane, form: Form) -> Pair:
    """A model and its twin in fp32, neither managed by ``initialize``."""
    lane.need("O1")
    form.need(lane)
    model = Dot().to(lane.device)
    plain = copy.deepcopy(model)
    return Pair(model, form.make(model.parameters()), plain, form.make(plain.parameters()))


def _scaler(rule: Rule) -> Any:
    return xamp.GradScaler(
        init_scale=rule.start,
        growth_factor=rule.growth,
        backoff_factor=rule.backoff,
        growth_interval=rule.interval,
    )


def _plain_step(pair: Pair, x: torch.Tensor, clipped: bool) -> torch.Tensor:
    """Run the same iteration in plain torch, clipped if asked; return the norm before clipping."""
    pair.plain_optimizer.zero_grad()
    pair.plain_model(x).backward()
    norm = clip(pair.plain_model.parameters(), MAX_NORM if clipped else float("inf"))
    pair.plain_optimizer.step()
    return norm
