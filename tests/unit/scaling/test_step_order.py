"""Every wrong order of calls is a typed error that says what to do; what looks odd and is right is let through.

Covers: xamp.scaling.engine, xamp.scaling.gradients.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lanes import Lane
from stepping import (
    Dot,
    assert_follows,
    assert_same,
    at,
    inputs,
    iterate,
    outcome,
    picture,
    plain_iterate,
    run_backward,
    start,
    twin,
)
from torch.optim import LBFGS, SGD, Adam

import xamp
from xamp.errors import PolicyError, StateError

scaled_levels = pytest.mark.parametrize("level", ["O1", "O2"])
strict_levels = pytest.mark.parametrize("level", ["O1", "O2", "O5"])
loose_levels = pytest.mark.parametrize("level", ["O0", "O3", "O4"])
all_levels = pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
STRAY = r"optimizer\.step\(\): there are gradients that did not come through scale_loss.*inside the with block"
STILL_SCALED = r"{}: the gradients are still scaled, because delay_unscale=True postponed it\. Run a scale_loss"
INSIDE = r"{}: inside `with xamp\.scale_loss"


# ---------------------------------------------------------------- gradients that never were scaled


@strict_levels
@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("fused", [False, "auto"])
def test_step_after_a_plain_backward(lane: Lane, level: str, before: int, fused: str | bool) -> None:
    model, optimizer = start(lane, level, fused=fused)
    batches = inputs(before + 2, lane)
    for x in batches[:before]:
        iterate(model, optimizer, x)
    optimizer.zero_grad()
    model(batches[before]).backward()
    still = picture(model, optimizer)
    with pytest.raises(StateError, match=STRAY):
        optimizer.step()
    assert_same(picture(model, optimizer), still)
    iterate(model, optimizer, batches[-1])
    assert outcome(optimizer) == "APPLIED"


@strict_levels
def test_step_after_a_plain_backward_that_took_the_place_of_a_right_one(lane: Lane, level: str) -> None:
    model, optimizer = start(lane, level)
    first, second = inputs(2, lane)
    run_backward(model(first), optimizer)
    optimizer.zero_grad()
    model(second).backward()
    with pytest.raises(StateError, match=STRAY):
        optimizer.step()


@strict_levels
def test_step_after_backward_outside_the_block(lane: Lane, level: str) -> None:
    model, optimizer = start(lane, level)
    with xamp.scale_loss(model(inputs(1, lane)[0]), optimizer) as scaled:
        pass
    scaled.backward()
    with pytest.raises(StateError, match=STRAY):
        optimizer.step()


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_step_after_a_plain_backward_on_top_of_a_right_one(lane: Lane, level: str) -> None:
    """Its gradients would be left out: they are in the low-precision parameters."""
    model, optimizer = start(lane, level)
    first, second = inputs(2, lane)
    run_backward(model(first), optimizer)
    model(second).backward()
    with pytest.raises(StateError, match=STRAY):
        optimizer.step()


@strict_levels
def test_step_of_an_optimizer_that_scale_loss_was_not_given(lane: Lane, level: str) -> None:
    models: Any = [Dot().to(lane.device), Dot().to(lane.device)]
    made: Any = [SGD(m.parameters(), lr=0.125) for m in models]
    models, made = xamp.initialize(models, made, init_scale=64.0, **at(level))
    x = inputs(1, lane)[0]
    run_backward(models[0](x) + models[1](x), made[0])
    made[0].step()
    with pytest.raises(StateError, match=STRAY):
        made[1].step()


@scaled_levels
def test_a_second_step_on_the_same_gradients(lane: Lane, level: str) -> None:
    model, optimizer = start(lane, level)
    run_backward(model(inputs(1, lane)[0]), optimizer)
    optimizer.step()
    with pytest.raises(StateError, match="clear the gradients with optimizer"):
        optimizer.step()


@loose_levels
def test_a_plain_backward_is_fine_where_nothing_is_scaled(lane: Lane, level: str) -> None:
    model, optimizer = start(lane, level)
    model(inputs(1, lane)[0]).backward()
    optimizer.step()
    assert outcome(optimizer) == "APPLIED"


# ---------------------------------------------------------------- gradients that are still scaled


@scaled_levels
def test_reading_or_stepping_under_delay_unscale(lane: Lane, level: str) -> None:
    model, optimizer = start(lane, level)
    first, second = inputs(2, lane)
    run_backward(model(first), optimizer, delay_unscale=True)
    still = picture(model, optimizer)
    with pytest.raises(StateError, match=STILL_SCALED.format(r"optimizer\.step\(\)")):
        optimizer.step()
    with pytest.raises(StateError, match=STILL_SCALED.format(r"master_params\(optimizer\)")):
        list(xamp.master_params(optimizer))
    with pytest.raises(StateError, match="still scaled"):
        xamp.clip_grad_norm_(optimizer, 1.0)
    assert_same(picture(model, optimizer), still)
    run_backward(model(second), optimizer)
    optimizer.step()
    assert outcome(optimizer) == "APPLIED"


@scaled_levels
def test_clearing_the_gradients_ends_delay_unscale(lane: Lane, level: str) -> None:
    model, optimizer = start(lane, level)
    reference = twin(Dot().to(lane.device))
    reference.load_state_dict(model.state_dict())
    plain = SGD(reference.parameters(), lr=0.125, momentum=0.9)
    first, second = inputs(2, lane)
    run_backward(model(first), optimizer, delay_unscale=True)
    optimizer.zero_grad()
    list(xamp.master_params(optimizer))
    iterate(model, optimizer, second)
    plain_iterate(reference, plain, second)
    assert_follows(optimizer, reference)


@strict_levels
def test_reading_or_stepping_inside_the_block(lane: Lane, level: str) -> None:
    model, optimizer = start(lane, level)
    with xamp.scale_loss(model(inputs(1, lane)[0]), optimizer) as scaled:
        scaled.backward()
        with pytest.raises(StateError, match=INSIDE.format(r"optimizer\.step\(\)")):
            optimizer.step()
        with pytest.raises(StateError, match=INSIDE.format(r"clip_grad_norm_\(optimizer\)")):
            xamp.clip_grad_norm_(optimizer, 1.0)
        with pytest.raises(StateError, match=r"session\.close\(\): inside"):
            xamp.session(model).close()
    optimizer.step()
    assert outcome(optimizer) == "APPLIED"


@strict_levels
def test_a_scale_loss_inside_another_over_the_same_optimizer(lane: Lane, level: str) -> None:
    model, optimizer = start(lane, level)
    x = inputs(1, lane)[0]
    with xamp.scale_loss(model(x), optimizer) as scaled:
        with pytest.raises(StateError, match="another scale_loss over this optimizer or with this loss_id is open"):
            xamp.scale_loss(model(x), optimizer).__enter__()
        scaled.backward()
    optimizer.step()


@scaled_levels
@pytest.mark.parametrize("loss_id", [0, 1])
def test_a_scale_loss_inside_another_over_another_optimizer_is_right_or_refused(
    lane: Lane, level: str, loss_id: int
) -> None:
    """With one scale for both, the inner one would move it under the outer one's backward."""
    models: Any = [Dot().to(lane.device), Dot().to(lane.device)]
    references = [twin(m) for m in models]
    made: Any = [SGD(m.parameters(), lr=0.125) for m in models]
    options: dict[str, Any] = {"init_scale": 64.0, "growth_interval": 1, "num_losses": 2}
    models, made = xamp.initialize(models, made, **at(level), **options)
    x = inputs(1, lane)[0]
    with xamp.scale_loss(models[0](x), made[0]) as outer:
        refused = False
        try:
            run_backward(models[1](x), made[1], loss_id=loss_id)
        except StateError:
            refused = True
        outer.backward()
    assert not refused or loss_id == 0
    if refused:
        run_backward(models[1](x), made[1])
    for optimizer, reference in zip(made, references, strict=True):
        optimizer.step()
        plain_iterate(reference, SGD(reference.parameters(), lr=0.125), x)
        assert_follows(optimizer, reference)


# ---------------------------------------------------------------- closures


@strict_levels
@pytest.mark.parametrize("how", ["argument", "keyword"])
def test_a_closure(lane: Lane, level: str, how: str) -> None:
    model, optimizer = start(lane, level)

    def closure() -> float:
        raise AssertionError("must not run")

    pattern = rf"SGD\.step\(closure\): .*level {level}\).*Compute the loss before step\(\), in scale_loss"
    with pytest.raises(StateError, match=pattern):
        optimizer.step(closure) if how == "argument" else optimizer.step(closure=closure)
    run_backward(model(inputs(1, lane)[0]), optimizer)
    optimizer.step(None)
    assert outcome(optimizer) == "APPLIED"


@strict_levels
@pytest.mark.parametrize("how", ["argument", "keyword"])
def test_a_closure_without_a_backward_is_called_once(lane: Lane, level: str, how: str) -> None:
    """As Lightning passes one to each step, with its hooks in it: they may clip."""
    torch.manual_seed(1)
    model, optimizer = start(lane, level)
    torch.manual_seed(1)
    reference, plain = start(lane, level)
    x = inputs(1, lane)[0]
    calls = []
    for _ in range(2):
        for under, of in ((model, optimizer), (reference, plain)):
            of.zero_grad()
            run_backward(under(x), of)

        def closure() -> float:
            calls.append(float(xamp.clip_grad_norm_(optimizer, 0.125)))
            return 7.0

        found = optimizer.step(closure) if how == "argument" else optimizer.step(closure=closure)
        xamp.clip_grad_norm_(plain, 0.125)
        plain.step()
        assert found == 7.0
        assert outcome(optimizer) == "APPLIED"
    assert len(calls) == 2
    for mine, other in zip(xamp.master_params(optimizer), xamp.master_params(plain), strict=True):
        assert torch.equal(mine, other)


@strict_levels
def test_a_closure_with_a_backward_after_one_through_scale_loss(lane: Lane, level: str) -> None:
    model, optimizer = start(lane, level)
    x = inputs(1, lane)[0]
    before = [param.detach().clone() for param in xamp.master_params(optimizer)]
    run_backward(model(x), optimizer)

    def closure() -> float:
        loss: torch.Tensor = model(x)
        loss.backward()
        return float(loss.detach())

    with pytest.raises(
        StateError, match=rf"SGD\.step\(closure\): .*level {level}\) a closure ran backward without them"
    ):
        optimizer.step(closure)
    optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(before, xamp.master_params(optimizer), strict=True))


@strict_levels
def test_lbfgs(lane: Lane, level: str) -> None:
    model = Dot().to(lane.device)
    optimizer: Any = LBFGS(model.parameters(), lr=0.125)
    model, optimizer = xamp.initialize(model, optimizer, **at(level))
    with pytest.raises(StateError, match=r"LBFGS\.step\(closure\).*works at O0 and O4"):
        optimizer.step(lambda: model(inputs(1, lane)[0]))


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True to a scalar:UserWarning")  # torch 2.8's
@pytest.mark.parametrize("level", ["O0", "O4"])
def test_lbfgs_where_nothing_is_scaled(lane: Lane, level: str) -> None:
    model = Dot().to(lane.device)
    reference = twin(model)
    x = inputs(1, lane)[0]
    made: Any = [LBFGS(m.parameters(), lr=0.125, max_iter=3) for m in (model, reference)]
    xamp.initialize(model, made[0], **at(level))
    losses = []
    for under, optimizer in zip((model, reference), made, strict=True):

        def closure(under: Any = under, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = under(x)
            if under is model:
                run_backward(loss, optimizer)
            else:
                loss.backward()
            return loss

        losses.append(optimizer.step(closure))
    assert outcome(made[0]) == "APPLIED"
    assert_follows(made[0], reference)
    torch.testing.assert_close(losses[0], losses[1])


# ---------------------------------------------------------------- arguments of scale_loss


@all_levels
def test_optimizers_that_nothing_manages(lane: Lane, level: str) -> None:
    model, _ = start(lane, level)
    loss = model(inputs(1, lane)[0])
    stranger = Adam(model.parameters(), lr=0.1)
    with pytest.raises(StateError, match=r"scale_loss: Adam was not given to xamp\.initialize as an optimizer"):
        xamp.scale_loss(loss, stranger)
    with pytest.raises(StateError, match=r"scale_loss: Dot was not given to xamp\.initialize as an optimizer"):
        xamp.scale_loss(loss, model)
    with pytest.raises(StateError, match="no optimizer given"):
        xamp.scale_loss(loss, [])


@all_levels
def test_a_closed_session(lane: Lane, level: str) -> None:
    model, optimizer = start(lane, level)
    xamp.session(model).close()
    with pytest.raises(StateError, match="or its session was closed"):
        xamp.scale_loss(model(inputs(1, lane)[0]), optimizer)
    with pytest.raises(StateError, match="its session was closed"):
        xamp.session(optimizer)


@all_levels
def test_optimizers_of_two_sessions(lane: Lane, level: str) -> None:
    model, optimizer = start(lane, level)
    _, other = start(lane, "O1")
    with pytest.raises(StateError, match=r"belong to different sessions.*one xamp\.initialize call"):
        xamp.scale_loss(model(inputs(1, lane)[0]), [optimizer, other])


@all_levels
def test_a_loss_that_is_none(lane: Lane, level: str) -> None:
    model, optimizer = start(lane, level)
    still = picture(model, optimizer)
    wrong: list[tuple[Any, str]] = [
        (torch.ones(3, device=lane.device), r"one floating element, and is torch\.float32, shape \(3,\)"),
        (torch.tensor(1, device=lane.device), r"and is torch\.int64, shape \(\)"),
        (torch.tensor(1j), r"and is torch\.complex64"),
        (1.0, "and is float"),
        (torch.zeros((), device="meta"), r"the loss is on meta, the model on .*Compute the loss where"),
    ]
    for loss, message in wrong:
        with pytest.raises(PolicyError, match=message):
            xamp.scale_loss(loss, optimizer)
    assert_same(picture(model, optimizer), still)
    iterate(model, optimizer, inputs(1, lane)[0])


@all_levels
def test_a_loss_of_one_element_in_any_shape(lane: Lane, level: str) -> None:
    model, optimizer = start(lane, level)
    run_backward(model(inputs(1, lane)[0]).reshape(1, 1), optimizer)
    optimizer.step()
    assert outcome(optimizer) == "APPLIED"


@all_levels
@pytest.mark.parametrize("loss_id", [2, -1, 0.0, "0", None])
def test_loss_id_out_of_range(lane: Lane, level: str, loss_id: Any) -> None:
    model, optimizer = start(lane, level, num_losses=2)
    pattern = rf"loss_id={loss_id!r}\): initialize was called with num_losses=2, so loss_id is one of 0 to 1"
    with pytest.raises(PolicyError, match=rf"scale_loss\({pattern}"):
        xamp.scale_loss(model(inputs(1, lane)[0]), optimizer, loss_id=loss_id)
    with pytest.raises(PolicyError, match=rf"loss_scale\({pattern}"):
        xamp.loss_scale(optimizer, loss_id)
