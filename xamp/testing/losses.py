"""Tier scaling, second part: several backwards in a step, several losses or sessions; and wrong orders of calls."""

from __future__ import annotations

import pytest
import torch

import xamp
from xamp.errors import StateError
from xamp.policy import LEVELS, levels_where
from xamp.testing.exact import (
    Dot,
    Pair,
    assert_follows,
    assert_same,
    inputs,
    iterate,
    outcome,
    picture,
    plain_iterate,
    run_backward,
    sgd,
    start,
)
from xamp.testing.forms import FEW, SETTINGS, Form, begin
from xamp.testing.lane import Lane
from xamp.testing.tier import Tier, managed, scaled

__all__ = ["Losses"]

SCALE = 256.0
each_setting = pytest.mark.parametrize("setting", SETTINGS)
few_forms = pytest.mark.parametrize("form", FEW, ids=str)


class Losses(Tier):
    """Gradients of several backwards add up, and a wrong order of calls raises an error."""

    tier = "scaling"

    @each_setting
    @few_forms
    def test_accumulation_equals_one_batch(self, lane: Lane, setting: str, form: Form) -> None:
        """A step over four micro-batches equals a step over one batch that holds them all."""
        pair = begin(lane, setting, form, init_scale=SCALE)
        batches = inputs(12, lane)
        for four in (batches[:4], batches[4:8], batches[8:]):
            pair.optimizer.zero_grad()
            for x in four:
                run_backward(pair.model(x), pair.optimizer)
            pair.optimizer.step()
            plain_iterate(pair.plain_model, pair.plain_optimizer, torch.stack(four).sum(0))
        assert_follows(pair)

    @each_setting
    @few_forms
    @pytest.mark.parametrize("spoilt", [(0,), (1,), (3,), (0, 1, 2, 3)], ids=["0", "1", "3", "all"])
    def test_overflow_in_a_micro_batch(self, lane: Lane, setting: str, form: Form, spoilt: tuple[int, ...]) -> None:
        """Overflows in some of four micro-batches skip all four, halve the scale once, and spare the next four."""
        pair = begin(lane, setting, form, init_scale=SCALE)
        batches = inputs(9, lane)
        iterate(pair.model, pair.optimizer, batches[0])
        plain_iterate(pair.plain_model, pair.plain_optimizer, batches[0])
        still = picture(pair.model, pair.optimizer)
        pair.optimizer.zero_grad()
        for count, x in enumerate(batches[1:5]):
            spoil = [pair.model.first.weight] if count in spoilt else []
            run_backward(pair.model(x), pair.optimizer, lane, spoil)
        pair.optimizer.step()
        assert (outcome(pair.optimizer), xamp.loss_scale(pair.optimizer)) == ("SKIPPED", SCALE / 2)
        assert_same(picture(pair.model, pair.optimizer), still)
        pair.optimizer.zero_grad()
        for x in batches[5:]:
            run_backward(pair.model(x), pair.optimizer)
        pair.optimizer.step()
        plain_iterate(pair.plain_model, pair.plain_optimizer, *batches[5:])
        assert (outcome(pair.optimizer), xamp.loss_scale(pair.optimizer)) == ("APPLIED", SCALE / 2)
        assert_follows(pair)

    @each_setting
    @few_forms
    def test_scale_moves_between_backwards(self, lane: Lane, setting: str, form: Form) -> None:
        """Gradients that nobody clears add up exactly although the scale doubles with each step."""
        pair = begin(lane, setting, form, init_scale=8.0, growth_interval=1)
        for x in inputs(5, lane):
            run_backward(pair.model(x), pair.optimizer)
            pair.optimizer.step()
            pair.plain_model(x).backward()
            pair.plain_optimizer.step()
        assert xamp.loss_scale(pair.optimizer) == 8.0 * 2**5
        assert_follows(pair)

    @scaled
    def test_optimizers_that_step_at_different_moments(self, lane: Lane, level: str) -> None:
        """One steps after each backward, the other after two, which keeps an inf: it lowers their scale once."""
        lane.need(level)
        models = [Dot().to(lane.device), Dot().to(lane.device)]
        often, seldom = optimizers = [sgd(model.parameters()) for model in models]
        xamp.initialize(models, optimizers, level=level, init_scale=SCALE, growth_interval=3, verbosity=0)
        found = []
        for count, x in enumerate(inputs(4, lane)):
            spoil = [models[1].first.weight] if count == 0 else []
            run_backward(models[0](x) + models[1](x), optimizers, lane, spoil)
            for optimizer in optimizers[: 1 + count % 2]:
                optimizer.step()
                optimizer.zero_grad()
            found.append(xamp.loss_scale(often))
            assert count != 1 or outcome(seldom) == "SKIPPED"
        assert (found, outcome(seldom)) == ([SCALE / 2, SCALE / 2, SCALE / 2, SCALE], "APPLIED")

    @each_setting
    def test_delay_unscale(self, lane: Lane, setting: str) -> None:
        """Backwards under ``delay_unscale`` add up, the scale waits, and using scaled gradients raises."""
        pair = begin(lane, setting, FEW[0], growth_interval=1)
        batches = inputs(3, lane)
        for x in batches[:2]:
            run_backward(pair.model(x), pair.optimizer, delay_unscale=True)
            for use in (pair.optimizer.step, lambda: list(xamp.master_params(pair.optimizer))):
                with pytest.raises(StateError, match="still scaled"):
                    use()
        assert xamp.loss_scale(pair.optimizer) == 64.0
        run_backward(pair.model(batches[2]), pair.optimizer)
        pair.optimizer.step()
        plain_iterate(pair.plain_model, pair.plain_optimizer, *batches)
        assert xamp.loss_scale(pair.optimizer) == 128.0
        assert_follows(pair)

    @each_setting
    @few_forms
    @pytest.mark.parametrize("spoilt", [0, 1], ids=["delayed", "last"])
    def test_overflow_under_delay_unscale(self, lane: Lane, setting: str, form: Form, spoilt: int) -> None:
        """An overflow in a backward under ``delay_unscale`` is found when the gradients are unscaled."""
        pair = begin(lane, setting, form, init_scale=SCALE)
        batches = inputs(3, lane)
        iterate(pair.model, pair.optimizer, batches[0])
        still = picture(pair.model, pair.optimizer)
        pair.optimizer.zero_grad()
        for count, x in enumerate(batches[1:]):
            spoil = [pair.model.second.weight] if count == spoilt else []
            run_backward(pair.model(x), pair.optimizer, lane, spoil, delay_unscale=count == 0)
        pair.optimizer.step()
        assert (outcome(pair.optimizer), xamp.loss_scale(pair.optimizer)) == ("SKIPPED", SCALE / 2)
        assert_same(picture(pair.model, pair.optimizer), still)

    @scaled
    @few_forms
    @pytest.mark.parametrize("spoilt", [None, 0, 1], ids=["none", "first", "second"])
    def test_losses_with_own_scales(self, lane: Lane, level: str, form: Form, spoilt: int | None) -> None:
        """Of two losses with their own ``loss_id`` only the one that overflowed lowers its scale; gradients add up."""
        pair = begin(lane, level, form, init_scale=SCALE, growth_interval=3, num_losses=2)
        batches = inputs(6, lane)
        for step in range(3):
            pair.optimizer.zero_grad()
            two = batches[2 * step : 2 * step + 2]
            overflows = step == 1 and spoilt is not None
            for loss_id, x in enumerate(two):
                spoil = [pair.model.first.weight] if overflows and loss_id == spoilt else []
                run_backward(pair.model(x), pair.optimizer, lane, spoil, loss_id=loss_id)
            still = picture(pair.model, pair.optimizer)
            pair.optimizer.step()
            assert outcome(pair.optimizer) == ("SKIPPED" if overflows else "APPLIED")
            if overflows:
                assert_same(picture(pair.model, pair.optimizer), still)
            else:
                plain_iterate(pair.plain_model, pair.plain_optimizer, *two)
        found = [xamp.loss_scale(pair.optimizer, loss_id) for loss_id in (0, 1)]
        assert found == [SCALE / 2 if loss_id == spoilt else SCALE * 2 for loss_id in (0, 1)]
        assert_follows(pair)

    # ---------------------------------------------------------------- an overflow counts for one backward only

    @scaled
    @few_forms
    @pytest.mark.parametrize("where", ["validation", "before", "after"])
    def test_overflow_outside_backward(self, lane: Lane, level: str, form: Form, where: str) -> None:
        """An overflow in validation, before ``scale_loss``, or after it (in a metric) skips no step."""
        pair = begin(lane, level, form)
        stranger = torch.ones(4, device=lane.device)
        for x in inputs(3, lane):
            if where == "validation":
                with torch.no_grad():
                    pair.model(torch.full_like(x, 3e38))
                    lane.overflow_(stranger)
            pair.optimizer.zero_grad()
            loss = pair.model(x)
            if where == "before":
                lane.overflow_(stranger)
            run_backward(loss, pair.optimizer)
            if where == "after":
                lane.overflow_(stranger)
            pair.optimizer.step()
            plain_iterate(pair.plain_model, pair.plain_optimizer, x)
            assert outcome(pair.optimizer) == "APPLIED"
        assert xamp.loss_scale(pair.optimizer) == 64.0
        assert_follows(pair)

    @scaled
    @few_forms
    def test_overflow_in_forward(self, lane: Lane, level: str, form: Form) -> None:
        """On a chip that saturates an overflow in a training forward skips the step, though no gradient shows it."""
        if lane.can.overflow != "flag":
            lane.lacks("a flag that tells of an overflow")
        pair = begin(lane, level, form)
        spoil: list[bool] = []
        stranger = torch.ones(4, device=lane.device)
        pair.model.first.register_forward_hook(lambda *_: lane.overflow_(stranger) if spoil else None)
        for x in inputs(3, lane):
            iterate(pair.model, pair.optimizer, x)
            plain_iterate(pair.plain_model, pair.plain_optimizer, x)
            assert outcome(pair.optimizer) == "APPLIED"
            still = picture(pair.model, pair.optimizer)
            spoil.append(True)
            loss = pair.model(x)
            spoil.clear()
            with torch.no_grad():
                pair.model(x)  # validation between a forward and its backward changes nothing
            pair.optimizer.zero_grad()
            run_backward(loss, pair.optimizer)
            pair.optimizer.step()
            assert outcome(pair.optimizer) == "SKIPPED"
            assert_same(picture(pair.model, pair.optimizer), still)
        assert xamp.loss_scale(pair.optimizer) == 64.0 / 2**3
        assert_follows(pair)

    @each_setting
    @few_forms
    def test_overflow_is_gone_in_the_next_iteration(self, lane: Lane, setting: str, form: Form) -> None:
        """Every second iteration overflows; the others train as if those had not happened."""
        pair = begin(lane, setting, form)
        for count, x in enumerate(inputs(6, lane)):
            overflow = count % 2 == 0
            iterate(pair.model, pair.optimizer, x, lane, ["first.weight"] if overflow else [])
            assert outcome(pair.optimizer) == ("SKIPPED" if overflow else "APPLIED")
            if not overflow:
                plain_iterate(pair.plain_model, pair.plain_optimizer, x)
        assert xamp.loss_scale(pair.optimizer) == 64.0 / 2**3
        assert_follows(pair)

    def test_sessions_side_by_side(self, lane: Lane) -> None:
        """Sessions at different levels train in turn; none affects another's scale, outcome, dtype or overflow."""
        names = levels_where(lambda row: not row.steps_lower)
        twice = next(name for name in names if LEVELS[name].scales and LEVELS[name].master_weights)
        rows = [LEVELS[name] for name in (*names, twice) if lane.declares(name)]
        pairs = [start(lane, row.name) for row in rows]
        expected = [64.0 if row.dynamic else float(row.loss_scale) for row in rows]
        dtypes = [pair.model.first.weight.dtype for pair in pairs]
        for count, x in enumerate(inputs(6, lane)):
            hit = count % len(pairs)
            for index, (pair, row) in enumerate(zip(pairs, rows, strict=True)):
                skips = index == hit and row.scales
                iterate(pair.model, pair.optimizer, x, lane, ["first.weight"] if skips else [])
                if not skips:
                    plain_iterate(pair.plain_model, pair.plain_optimizer, x)
                assert outcome(pair.optimizer) == ("SKIPPED" if skips else "APPLIED")
                expected[index] /= 2 if skips and row.dynamic else 1
            assert [xamp.loss_scale(pair.model) for pair in pairs] == expected
        assert [pair.model.first.weight.dtype for pair in pairs] == dtypes
        for pair in pairs:
            assert_follows(pair)
        xamp.session(pairs[-1].model).close()
        for pair in pairs[:-1]:
            iterate(pair.model, pair.optimizer, x)
            plain_iterate(pair.plain_model, pair.plain_optimizer, x)
            assert_follows(pair)

    # ---------------------------------------------------------------- wrong orders of calls

    @managed
    @pytest.mark.parametrize("before", [0, 1], ids=["first-step", "later-step"])
    def test_backward_without_scale_loss(self, lane: Lane, level: str, before: int) -> None:
        """``step()`` after an unscaled backward raises and changes nothing; the next iteration works."""
        pair = start(lane, level)
        batches = inputs(3, lane)
        for x in batches[:before]:
            _iterate_both(pair, x)
        still = picture(pair.model, pair.optimizer)
        pair.optimizer.zero_grad()
        pair.model(batches[1]).backward()
        with pytest.raises(StateError, match="scale_loss"):
            pair.optimizer.step()
        assert_same(picture(pair.model, pair.optimizer), still)
        _iterate_both(pair, batches[2])
        assert_follows(pair)

    @managed
    def test_step_twice(self, lane: Lane, level: str) -> None:
        """A second ``step()`` on the same gradients raises and changes nothing."""
        pair = start(lane, level)
        iterate(pair.model, pair.optimizer, inputs(1, lane)[0])
        still = picture(pair.model, pair.optimizer)
        with pytest.raises(StateError, match="zero_grad"):
            pair.optimizer.step()
        assert_same(picture(pair.model, pair.optimizer), still)

    @managed
    def test_use_inside_the_block(self, lane: Lane, level: str) -> None:
        """Inside ``scale_loss``, stepping, clipping, closing or a second ``scale_loss`` raises and breaks nothing."""
        pair = start(lane, level)
        x = inputs(1, lane)[0]
        with xamp.scale_loss(pair.model(x), pair.optimizer) as loss:
            loss.backward()
            for use in (pair.optimizer.step, xamp.session(pair.model).close):
                with pytest.raises(StateError, match="inside"):
                    use()
            with pytest.raises(StateError, match="inside"):
                xamp.clip_grad_norm_(pair.optimizer, 1.0)
            with pytest.raises(StateError, match="another scale_loss"):
                run_backward(pair.model(x), pair.optimizer)
        pair.optimizer.step()
        plain_iterate(pair.plain_model, pair.plain_optimizer, x)
        assert_follows(pair)

    @managed
    def test_two_sessions_in_one_scale_loss(self, lane: Lane, level: str) -> None:
        """One ``scale_loss`` over optimizers of two sessions raises, because their scales differ."""
        pair, other = start(lane, level), start(lane, "O1", init_scale=8.0)
        with pytest.raises(StateError, match="different sessions"):
            xamp.scale_loss(pair.model(inputs(1, lane)[0]), [pair.optimizer, other.optimizer])
        x = inputs(1, lane)[0]
        for each in (pair, other):
            _iterate_both(each, x)
            assert_follows(each)


def _iterate_both(pair: Pair, x: torch.Tensor) -> None:
    iterate(pair.model, pair.optimizer, x)
    plain_iterate(pair.plain_model, pair.plain_optimizer, x)
