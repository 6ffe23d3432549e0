"""A step whose gradients overflowed moves nothing, bit for bit, and the scale backs off once.

Covers: xamp.scaling.step, xamp.scaling.unscale.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from lanes import Lane, needs_values
from stepping import (
    SCALED,
    Dot,
    assert_follows,
    assert_lowered_follow,
    assert_same,
    at,
    inputs,
    iterate,
    outcome,
    picture,
    plain_iterate,
    run_backward,
    step_alike,
    stepped,
    twin,
)
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

import xamp

SCALE = 256.0


@dataclasses.dataclass(frozen=True)
class Form:
    """An optimizer class, its arguments, and which of its implementations runs."""

    cls: type[Optimizer]
    options: dict[str, Any]
    name: str

    def make(self, params: Any, lane: Lane) -> Optimizer:
        made: Any = self.cls
        choice = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}, "auto": {}}
        if self.name == "fused" and self.cls.__name__ not in lane.can.fused_optimizers:
            pytest.skip(f"{lane}: its fused {self.cls.__name__} is not right under loss scaling")
        optimizer: Optimizer = made(params, lr=0.125, **self.options, **choice[self.name])
        return optimizer

    def __str__(self) -> str:
        return "-".join([self.cls.__name__, *self.options, self.name])


CLASSES: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (SGD, {"momentum": 0.9}),
    (SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (Adam, {}),
    (Adam, {"amsgrad": True}),
    (AdamW, {}),
    (Adagrad, {}),
]
FORMS = [Form(cls, options, name) for cls, options in CLASSES for name in ("for-loop", "foreach", "fused", "auto")]
FORMS += [Form(RMSprop, {"momentum": 0.9}, name) for name in ("for-loop", "foreach")]
FEW = [Form(SGD, {"momentum": 0.9}, "foreach"), Form(SGD, {"momentum": 0.9}, "auto"), Form(Adam, {}, "auto")]
each_form = pytest.mark.parametrize("form", FORMS, ids=str)
few_forms = pytest.mark.parametrize("form", FEW, ids=str)
scaled_levels = pytest.mark.parametrize("level", SCALED)


def start(lane: Lane, form: Form, level: str, **options: Any) -> tuple[Any, Optimizer, Any, Optimizer]:
    """A model under xamp, and its reference in plain fp32."""
    model = Dot().to(lane.device)
    reference = twin(model)
    plain = form.make(reference.parameters(), lane)
    optimizer = form.make(model.parameters(), lane)
    step_alike(plain, optimizer)
    options = {"init_scale": SCALE, **options}
    model, optimizer = xamp.initialize(model, optimizer, **at(level), **options)
    return model, optimizer, reference, plain


@scaled_levels
@each_form
@pytest.mark.parametrize("before", [0, 2], ids=["first-step", "later-step"])
def test_nothing_moves_and_training_goes_on_as_if_the_batch_had_not_been(
    lane: Lane, form: Form, level: str, before: int
) -> None:
    model, optimizer, reference, plain = start(lane, form, level)
    batches = inputs(before + 4, lane)
    for x in batches[:before]:
        iterate(model, optimizer, x)
        plain_iterate(reference, plain, x)
    still = picture(model, optimizer)
    for spoilt, x in zip(("a", "b"), batches[before:], strict=False):
        was = xamp.loss_scale(optimizer)
        iterate(model, optimizer, x, lane, [spoilt])
        assert_same(picture(model, optimizer), still)
        assert xamp.loss_scale(optimizer) == was / 2
        assert outcome(optimizer) == "SKIPPED"
    for x in batches[before + 2 :]:
        iterate(model, optimizer, x)
        plain_iterate(reference, plain, x)
        assert outcome(optimizer) == "APPLIED"
    assert_follows(optimizer, reference)
    assert_lowered_follow(model, optimizer)
    assert xamp.loss_scale(optimizer) == SCALE / 4
    stats = xamp.session(optimizer).stats
    assert (stats.applied, stats.skipped) == (before + 2, 2)


@scaled_levels
@few_forms
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(("name", "index"), [("a", 0), ("a", 3), ("b", 1)])
def test_one_element_that_is_not_finite_is_enough(
    lane: Lane, form: Form, level: str, value: float, name: str, index: int
) -> None:
    needs_values(lane)
    model, optimizer, _, _ = start(lane, form, level)
    first, second = inputs(2, lane)
    iterate(model, optimizer, first)
    still = picture(model, optimizer)
    optimizer.zero_grad()
    with xamp.scale_loss(model(second), optimizer) as scaled:
        scaled.backward()
        model.get_parameter(name).grad[index] = value
    optimizer.step()
    assert_same(picture(model, optimizer), still)
    assert outcome(optimizer) == "SKIPPED"


@scaled_levels
def test_a_backward_that_overflows_by_itself_is_skipped(lane: Lane, level: str) -> None:
    model, optimizer, _, _ = start(lane, FEW[0], level)
    needs_values(lane)
    still = picture(model, optimizer)
    run_backward(model(inputs(1, lane)[0]) * 3e38, optimizer)
    optimizer.step()
    assert_same(picture(model, optimizer), still)
    assert outcome(optimizer) == "SKIPPED"


@pytest.mark.parametrize("form", FEW[:2], ids=str)  # Adam's eps is zero in fp16
def test_without_masters_nothing_moves_either(lane: Lane, form: Form) -> None:
    model, optimizer, _, _ = start(lane, form, "O3", loss_scale="dynamic")
    first, second = inputs(2, lane)
    iterate(model, optimizer, first)
    still = picture(model, optimizer)
    iterate(model, optimizer, second, lane, ["a"])
    assert_same(picture(model, optimizer), still)
    assert (outcome(optimizer), xamp.loss_scale(optimizer)) == ("SKIPPED", SCALE / 2)


@scaled_levels
@pytest.mark.parametrize("form", [f for f in FORMS if f.name == "auto"], ids=str)
def test_a_parameter_whose_first_gradient_overflows_is_left_without_state(lane: Lane, form: Form, level: str) -> None:
    """torch's fused SGD would leave a momentum of uninitialised memory there."""
    model, optimizer, _, _ = start(lane, form, level)
    batches = inputs(3, lane)
    model.b.requires_grad_(False)
    for x in batches[:2]:
        iterate(model, optimizer, x)
    model.b.requires_grad_(True)
    still = picture(model, optimizer)
    iterate(model, optimizer, batches[2], lane, ["b"])
    assert_same(picture(model, optimizer), still)


@few_forms
def test_a_state_that_was_thrown_away_is_not_taken_for_one(lane: Lane, form: Form) -> None:
    model, optimizer, _, _ = start(lane, form, "O1")
    first, second = inputs(2, lane)
    iterate(model, optimizer, first)
    optimizer.state.clear()
    still = picture(model, optimizer)
    iterate(model, optimizer, second, lane, ["a"])
    assert_same(picture(model, optimizer), still)


@scaled_levels
@pytest.mark.parametrize("before", [0, 2])
def test_step_hooks_do_not_run_for_a_step_that_the_host_skips(lane: Lane, level: str, before: int) -> None:
    model, optimizer, _, _ = start(lane, FEW[0], level, fused=False)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    batches = inputs(before + 1, lane)
    for x in batches[:before]:
        iterate(model, optimizer, x)
    assert seen == ["before", "after"] * before
    iterate(model, optimizer, batches[-1], lane, ["a"])
    assert seen == ["before", "after"] * before


@scaled_levels
@few_forms
@pytest.mark.parametrize("spoilt", [0, 3, 7])
def test_of_eight_micro_batches_the_old_inf_is_not_found_again(lane: Lane, form: Form, level: str, spoilt: int) -> None:
    model, optimizer, reference, plain = start(lane, form, level)
    batches = inputs(17, lane)
    iterate(model, optimizer, batches[0])
    plain_iterate(reference, plain, batches[0])
    still = picture(model, optimizer)
    optimizer.zero_grad()
    for index, x in enumerate(batches[1:9]):
        run_backward(model(x), optimizer, lane, [model.a] if index == spoilt else ())
        assert xamp.loss_scale(optimizer) == SCALE
    optimizer.step()
    assert xamp.loss_scale(optimizer) == SCALE / 2
    assert_same(picture(model, optimizer), still)
    assert outcome(optimizer) == "SKIPPED"
    optimizer.zero_grad()
    for x in batches[9:]:
        run_backward(model(x), optimizer)
    optimizer.step()
    plain_iterate(reference, plain, *batches[9:])
    assert outcome(optimizer) == "APPLIED"
    assert_follows(optimizer, reference)
    assert xamp.loss_scale(optimizer) == SCALE / 2


@scaled_levels
@few_forms
def test_eight_micro_batches_that_all_overflow_are_one_skipped_step(lane: Lane, form: Form, level: str) -> None:
    model, optimizer, reference, plain = start(lane, form, level)
    batches = inputs(9, lane)
    still = picture(model, optimizer)
    for x in batches[:8]:
        run_backward(model(x), optimizer, lane, [model.a])
    optimizer.step()
    assert_same(picture(model, optimizer), still)
    assert xamp.session(optimizer).stats.skipped == 1
    assert xamp.loss_scale(optimizer) == SCALE / 2
    iterate(model, optimizer, batches[8])
    plain_iterate(reference, plain, batches[8])
    assert_follows(optimizer, reference)


@scaled_levels
@few_forms
@pytest.mark.parametrize("delayed", [0, 1])
def test_an_overflow_under_delay_unscale_is_found_when_it_ends(
    lane: Lane, form: Form, level: str, delayed: int
) -> None:
    model, optimizer, _, _ = start(lane, form, level)
    batches = inputs(3, lane)
    iterate(model, optimizer, batches[0])
    still = picture(model, optimizer)
    optimizer.zero_grad()
    for index, x in enumerate(batches[1:]):
        run_backward(model(x), optimizer, lane, [model.b] if index == delayed else (), delay_unscale=index == 0)
    optimizer.step()
    assert_same(picture(model, optimizer), still)
    assert (outcome(optimizer), xamp.loss_scale(optimizer)) == ("SKIPPED", SCALE / 2)


@scaled_levels
@few_forms
@pytest.mark.parametrize("spoilt", [0, 1])
def test_of_two_losses_with_own_scales_only_the_one_that_overflowed_backs_off(
    lane: Lane, form: Form, level: str, spoilt: int
) -> None:
    model, optimizer, reference, plain = start(lane, form, level, num_losses=2)
    batches = inputs(5, lane)
    iterate(model, optimizer, batches[0])
    plain_iterate(reference, plain, batches[0])
    still = picture(model, optimizer)
    optimizer.zero_grad()
    for loss_id in (0, 1):
        spoil = [model.a] if loss_id == spoilt else ()
        run_backward(model(batches[1 + loss_id]), optimizer, lane, spoil, loss_id=loss_id)
    optimizer.step()
    scales = [xamp.loss_scale(optimizer, loss_id) for loss_id in (0, 1)]
    assert scales == [SCALE / 2 if loss_id == spoilt else SCALE for loss_id in (0, 1)]
    assert_same(picture(model, optimizer), still)
    optimizer.zero_grad()
    for loss_id in (0, 1):
        run_backward(model(batches[3 + loss_id]), optimizer, loss_id=loss_id)
    optimizer.step()
    plain_iterate(reference, plain, *batches[3:])
    assert_follows(optimizer, reference)


@scaled_levels
def test_gradients_kept_from_a_skipped_step_cannot_reach_the_weights(lane: Lane, level: str) -> None:
    """The user forgot to clear them: nothing finite comes of it, but nothing breaks either."""
    needs_values(lane)
    model, optimizer, reference, plain = start(lane, FEW[0], level)
    batches = inputs(3, lane)
    still = picture(model, optimizer)
    run_backward(model(batches[0]), optimizer, lane, [model.a])
    optimizer.step()
    run_backward(model(batches[1]), optimizer)
    optimizer.step()
    assert_same(picture(model, optimizer), still)
    iterate(model, optimizer, batches[2])
    plain_iterate(reference, plain, batches[2])
    assert_follows(optimizer, reference)


@scaled_levels
def test_delay_overflow_check_neither_skips_nor_backs_off(lane: Lane, level: str) -> None:
    model, optimizer, _, _ = start(lane, FEW[0], level)
    x = inputs(1, lane)[0]
    before = [p.clone() for p in stepped(optimizer)]
    run_backward(model(x), optimizer, lane, [model.a], delay_overflow_check=True)
    optimizer.step()
    assert (outcome(optimizer), xamp.loss_scale(optimizer)) == ("APPLIED", SCALE)
    torch.testing.assert_close(stepped(optimizer)[1], before[1] - 0.125 * x[4:], rtol=1e-6, atol=1e-7)
