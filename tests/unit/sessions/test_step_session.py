"""What a session tells, what it takes over, and what it costs the host.

Covers: xamp.sessions.session, xamp.scaling.weights.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lanes import Lane, needs_values
from stepping import (
    OPTIMIZERS,
    SCALED,
    Dot,
    HostReads,
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
    start,
    step_alike,
    stepped,
    twin,
)
from torch.optim import SGD

import xamp
from xamp.errors import StateError

scaled_levels = pytest.mark.parametrize("level", SCALED)
all_levels = pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
each_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


@all_levels
@pytest.mark.parametrize("fused", [False, "auto"])
def test_step_without_gradients_is_harmless(lane: Lane, level: str, fused: str | bool) -> None:
    model, optimizer = start(lane, level, fused=fused)
    still = picture(model, optimizer)
    optimizer.step()
    assert_same(picture(model, optimizer), still)
    iterate(model, optimizer, inputs(1, lane)[0])
    optimizer.zero_grad()
    still = picture(model, optimizer)
    optimizer.step()
    assert_same(picture(model, optimizer), still)
    iterate(model, optimizer, inputs(1, lane)[0])


@scaled_levels
def test_the_outcome_of_several_optimizers_is_a_dict(lane: Lane, level: str) -> None:
    needs_values(lane)
    models: Any = [Dot().to(lane.device), Dot().to(lane.device)]
    made: Any = [SGD(m.parameters(), lr=0.125) for m in models]
    models, (first, second) = xamp.initialize(models, made, init_scale=64.0, **at(level))
    session = xamp.session(models[1])
    assert session.last_step == {first: None, second: None}
    x = inputs(1, lane)[0]
    run_backward(models[0](x) + models[1](x), [first, second], lane, [models[1].b])
    first.step()
    assert session.last_step == {first: xamp.StepOutcome.APPLIED, second: None}
    second.step()
    assert session.last_step == {first: xamp.StepOutcome.APPLIED, second: xamp.StepOutcome.SKIPPED}
    assert xamp.session(first).last_step is xamp.StepOutcome.APPLIED
    assert xamp.session(second).last_step is xamp.StepOutcome.SKIPPED


# ---------------------------------------------------------------- what it takes over


@pytest.mark.parametrize("level", ["O0", *SCALED, "O4", "O5"])
@each_optimizer
def test_an_optimizer_that_has_trained_before_goes_on_where_it_was(lane: Lane, level: str, make: Any) -> None:
    model = Dot().to(lane.device)
    reference = twin(model)
    plain, optimizer = make(reference.parameters()), make(model.parameters())
    step_alike(plain, optimizer)
    batches = inputs(6, lane)
    for x in batches[:3]:
        plain_iterate(model, optimizer, x)
        plain_iterate(reference, plain, x)
    model, optimizer = xamp.initialize(model, optimizer, init_scale=64.0, **at(level))
    assert_follows(optimizer, reference, rtol=0, atol=0)
    if level in SCALED:  # it may overflow at once
        still = picture(model, optimizer)
        iterate(model, optimizer, batches[3], lane, ["a"])
        assert_same(picture(model, optimizer), still)
    for x in batches[3:]:
        iterate(model, optimizer, x)
        plain_iterate(reference, plain, x)
    assert_follows(optimizer, reference)
    assert_lowered_follow(model, optimizer)


@scaled_levels
def test_gradients_that_are_there_already_count(lane: Lane, level: str) -> None:
    model = Dot().to(lane.device)
    reference = twin(model)
    plain = SGD(reference.parameters(), lr=0.125)
    optimizer: Any = SGD(model.parameters(), lr=0.125)
    first, second = inputs(2, lane)
    model(first).backward()
    model, optimizer = xamp.initialize(model, optimizer, init_scale=64.0, **at(level))
    run_backward(model(second), optimizer)
    optimizer.step()
    plain_iterate(reference, plain, first, second)
    assert_follows(optimizer, reference)


@all_levels
@each_optimizer
def test_an_optimizer_made_after_the_model_was_cast(lane: Lane, level: str, make: Any) -> None:
    if level == "O3" and make is not OPTIMIZERS["SGD"]:
        pytest.skip("an eps that is zero in fp16 is refused at O3")
    model = Dot().to(lane.device)
    reference = twin(model)
    plain = make(reference.parameters())
    model = xamp.initialize(model, init_scale=64.0, **at(level))
    optimizer = make(model.parameters())
    step_alike(plain, optimizer)
    model, optimizer = xamp.initialize(model, optimizer, init_scale=64.0, **at(level))
    if level != "O3":
        assert_follows(optimizer, reference, rtol=0, atol=0)
    for x in inputs(3, lane):
        iterate(model, optimizer, x)
        plain_iterate(reference, plain, x)
        assert outcome(optimizer) == "APPLIED"
    rough = 4e-3 if level == "O3" else 1e-6
    torch.testing.assert_close(
        [p.float() for p in stepped(optimizer)], [p.detach() for p in reference.parameters()], rtol=rough, atol=rough
    )
    assert_lowered_follow(model, optimizer)


@pytest.mark.parametrize("level", SCALED)
def test_an_optimizer_made_later_must_come_with_the_same_policy(lane: Lane, level: str) -> None:
    model: Any = Dot().to(lane.device)
    model = xamp.initialize(model, **at(level))
    optimizer = SGD(model.parameters(), lr=0.125)
    with pytest.raises(StateError, match="was given to initialize before"):
        xamp.initialize(model, optimizer, level="O0", verbosity=0)
    assert type(optimizer) is SGD
    xamp.initialize(model, optimizer, **at(level))
    with pytest.raises(StateError, match="was given to initialize before"):
        xamp.initialize(model, SGD(model.parameters(), lr=0.125), **at(level))


@pytest.mark.parametrize("level", SCALED)
@pytest.mark.parametrize("part", ["all", "a"])
def test_weights_written_into_the_model_before_the_first_step_are_trained(lane: Lane, level: str, part: str) -> None:
    """As an initialization or a broadcast does; a weight that nobody touched keeps its exact master."""
    model: Any = Dot().to(lane.device)
    reference = twin(model)
    optimizer: Any = SGD(model.parameters(), lr=0.125)
    model, optimizer = xamp.initialize(model, optimizer, init_scale=64.0, **at(level))
    for under in (model, reference):
        with torch.no_grad():
            under.a.fill_(0.5)
            if part == "all":
                under.b.fill_(-0.25)
    x = inputs(1, lane)[0]
    iterate(model, optimizer, x)
    plain_iterate(reference, SGD(reference.parameters(), lr=0.125), x)
    assert_follows(optimizer, reference)


# ---------------------------------------------------------------- what it costs


@scaled_levels
def test_accumulation_and_clipping_wait_for_nothing(lane: Lane, level: str) -> None:
    model, optimizer = start(lane, level)
    batches = inputs(6, lane)
    with HostReads() as reads:
        for x in batches:
            run_backward(model(x), optimizer)
        xamp.clip_grad_norm_(optimizer, 1.0)
    assert (reads.scalars, reads.lists) == (0, 0)
