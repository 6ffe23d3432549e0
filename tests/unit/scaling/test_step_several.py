"""Several optimizers, losses and models in one step; and gradient clipping.

Covers: xamp.scaling.engine, xamp.scaling.optimizer, xamp.sessions.clipping.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lanes import Lane, needs_values
from stepping import (
    Dot,
    HostReads,
    assert_follows,
    assert_lowered_follow,
    assert_same,
    at,
    inputs,
    outcome,
    picture,
    plain_iterate,
    run_backward,
    step_alike,
    stepped,
    twin,
)
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import xamp
from xamp.errors import PolicyError, StateError

each_level = pytest.mark.parametrize("level", ["O1", "O2"])
each_fused = pytest.mark.parametrize("fused", [False, "auto"])
MAX_NORM = 0.5


def initialize(models: Any, optimizers: Any, **options: Any) -> Any:
    return xamp.initialize(models, optimizers, verbosity=0, **options)


def clip(optimizer: Optimizer, how: str) -> torch.Tensor:
    if how == "xamp":
        return xamp.clip_grad_norm_(optimizer, MAX_NORM)
    return torch.nn.utils.clip_grad_norm_(xamp.master_params(optimizer), MAX_NORM)


@each_level
@each_fused
@pytest.mark.parametrize("how", ["xamp", "torch"])
@pytest.mark.parametrize("overflow_at", [1, 3, 4])
def test_on_one_joint_loss_no_optimizer_changes_the_size_of_anothers_update(
    lane: Lane, level: str, fused: str | bool, how: str, overflow_at: int
) -> None:
    """accelerate and Fabric are wrong here by 1024x, 2x and 0.5x."""
    needs_values(lane)
    models = [Dot().to(lane.device), Dot().to(lane.device)]
    references = [twin(m) for m in models]
    plain = [SGD(references[0].parameters(), lr=0.125, momentum=0.9), Adam(references[1].parameters(), lr=0.125)]
    made = [SGD(models[0].parameters(), lr=0.125, momentum=0.9), Adam(models[1].parameters(), lr=0.125)]
    for other, optimizer in zip(plain, made, strict=True):
        step_alike(other, optimizer)
    models, made = initialize(models, made, level=level, init_scale=1024.0, growth_interval=2, fused=fused)
    for count, x in enumerate(inputs(6, lane)):
        for optimizer in (*made, *plain):
            optimizer.zero_grad()
        run_backward(models[0](x) + models[1](x), made, lane, [models[0].a] if count == overflow_at else ())
        norms = [clip(o, how) for o in made]
        (references[0](x) + references[1](x)).backward()
        plain_norms = [torch.nn.utils.clip_grad_norm_(r.parameters(), MAX_NORM) for r in references]
        for index, (optimizer, other) in enumerate(zip(made, plain, strict=True)):
            skipped = count == overflow_at and index == 0
            optimizer.step()
            if not skipped:
                torch.testing.assert_close(norms[index], plain_norms[index], rtol=1e-6, atol=0)
                other.step()
            assert outcome(optimizer) == ("SKIPPED" if skipped else "APPLIED")
        for optimizer, reference in zip(made, references, strict=True):
            assert_follows(optimizer, reference)
    # Two clean updates double it and an overflow halves it and starts the count again.
    assert xamp.loss_scale(made[0]) == {1: 2048.0, 3: 2048.0, 4: 2048.0}[overflow_at]


@each_level
def test_growth_between_two_losses_of_one_step_changes_no_update(lane: Lane, level: str) -> None:
    models = [Dot().to(lane.device), Dot().to(lane.device)]
    references = [twin(m) for m in models]
    plain = [SGD(r.parameters(), lr=0.125) for r in references]
    models, made = initialize(
        models, [SGD(m.parameters(), lr=0.125) for m in models], level=level, init_scale=8.0, growth_interval=1
    )
    for x in inputs(3, lane):
        for model, optimizer in zip(models, made, strict=True):
            optimizer.zero_grad()
            run_backward(model(x), optimizer)
        for optimizer in made:
            optimizer.step()
        for reference, other in zip(references, plain, strict=True):
            plain_iterate(reference, other, x)
    assert xamp.loss_scale(made[0]) == 8.0 * 2**3  # once for both losses, at the first step
    for optimizer, reference in zip(made, references, strict=True):
        assert_follows(optimizer, reference)


@each_level
def test_the_scale_moves_once_a_window_however_many_optimizers_overflow(lane: Lane, level: str) -> None:
    needs_values(lane)
    models = [Dot().to(lane.device) for _ in range(3)]
    models, made = initialize(models, [SGD(m.parameters(), lr=0.125) for m in models], level=level, init_scale=64.0)
    still = [picture(m, o) for m, o in zip(models, made, strict=True)]
    x = inputs(1, lane)[0]
    run_backward(sum(m(x) for m in models), made, lane, [models[0].a, models[2].b])
    for optimizer in made:
        optimizer.step()
    assert xamp.loss_scale(made[0]) == 32.0
    assert [outcome(o) for o in made] == ["SKIPPED", "APPLIED", "SKIPPED"]
    assert_same(picture(models[0], made[0]), still[0])
    assert_same(picture(models[2], made[2]), still[2])


@each_level
def test_a_parameter_in_two_optimizers_is_refused(lane: Lane, level: str) -> None:
    """Each would unscale its gradient."""
    model = Dot().to(lane.device)
    made: Any = [SGD(model.parameters(), lr=0.125), SGD([model.a], lr=0.25)]
    with pytest.raises(PolicyError, match=r"optimizers\[0\] and optimizers\[1\] hold the same parameter"):
        xamp.initialize(model, made, init_scale=64.0, **at(level))
    assert type(made[0]) is SGD
    assert model.a.dtype == torch.float32
    made = [SGD([model.b], lr=0.125), SGD([model.a], lr=0.25)]
    model, made = xamp.initialize(model, made, init_scale=64.0, **at(level))
    with pytest.raises(StateError, match=r"first\.weight is in another optimizer of this session"):
        made[0].add_param_group({"params": [model.a]})
    assert len(made[0].param_groups) == 1


def test_a_parameter_in_two_optimizers_works_where_nothing_is_scaled(lane: Lane) -> None:
    model = Dot().to(lane.device)
    made: Any = [SGD(model.parameters(), lr=0.125), SGD([model.a], lr=0.25)]
    model, made = xamp.initialize(model, made, level="O0", verbosity=0)
    before = model.a.detach().clone()
    x = inputs(1, lane)[0]
    run_backward(model(x), made)
    for optimizer in made:
        optimizer.step()
    torch.testing.assert_close(model.a.detach(), before - 0.375 * x[:4])


class Pair(nn.Module):
    """Its two halves may share a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.left = Dot()
        self.right = Dot()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.left(x) + self.right(x.flip(0))
        return loss


@each_level
def test_a_parameter_shared_by_two_modules_is_one(lane: Lane, level: str) -> None:
    model = Pair().to(lane.device)
    model.right.first.weight = model.left.first.weight
    reference = twin(model)
    assert reference.right.a is reference.left.a
    plain = AdamW(reference.parameters(), lr=0.125)
    optimizer: Any = AdamW(model.parameters(), lr=0.125)
    step_alike(plain, optimizer)
    shared, optimizer = initialize(model, optimizer, level=level, init_scale=64.0)
    assert shared.right.a is shared.left.a
    for x in inputs(3, lane):
        optimizer.zero_grad()
        run_backward(shared(x), optimizer)
        optimizer.step()
        plain_iterate(reference, plain, x)
    assert_follows(optimizer, reference)
    assert_lowered_follow(shared, optimizer)


@each_level
def test_a_parameter_shared_by_two_models_with_own_optimizers(lane: Lane, level: str) -> None:
    models = [Dot().to(lane.device), Dot().to(lane.device)]
    models[1].first.weight = models[0].first.weight
    pair = twin(nn.ModuleList(models))
    plain = [SGD(pair[0].parameters(), lr=0.125), SGD([pair[1].b], lr=0.25)]
    made: Any = [SGD(models[0].parameters(), lr=0.125), SGD([models[1].b], lr=0.25)]
    (first, second), made = initialize(models, made, level=level, init_scale=64.0)
    for x in inputs(3, lane):
        for optimizer in (*made, *plain):
            optimizer.zero_grad()
        run_backward(first(x) + second(x), made)
        (pair[0](x) + pair[1](x)).backward()
        for optimizer in (*made, *plain):
            optimizer.step()
    for optimizer, other in zip(made, plain, strict=True):
        torch.testing.assert_close(stepped(optimizer), stepped(other), rtol=1e-6, atol=1e-7)


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(sum((4, 3))))

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return self.gain * z


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4"])
@pytest.mark.parametrize("clear", ["model", "optimizer"])
@pytest.mark.parametrize("sessions", [1, 2])
def test_adversaries_follow_fp32(lane: Lane, level: str, clear: str, sessions: int) -> None:
    """The generator's backward leaves gradients in the discriminator, which clears them before its own."""
    made: Any = [Generator().to(lane.device), Dot().to(lane.device)]
    references = [twin(m) for m in made]
    plain = [SGD(m.parameters(), lr=0.0625) for m in references]
    optimizers: Any = [SGD(m.parameters(), lr=0.0625) for m in made]
    options: dict[str, Any] = {"level": level, "init_scale": 64.0, "verbosity": 0}
    if sessions == 1:
        made, optimizers = xamp.initialize(made, optimizers, **options)
    else:
        for model, optimizer in zip(made, optimizers, strict=True):
            xamp.initialize(model, optimizer, **options)

    def train(models: Any, steppers: Any, real: torch.Tensor, z: torch.Tensor, scaled: bool) -> None:
        def descend(loss: torch.Tensor, optimizer: Optimizer) -> None:
            run_backward(loss, optimizer) if scaled else loss.backward()

        for index in (1, 0):
            models[index].zero_grad() if clear == "model" else steppers[index].zero_grad()
            if index == 1:
                descend(-models[1](real), steppers[1])
                descend(models[1](models[0](z).detach()), steppers[1])
            else:
                descend(-models[1](models[0](z)), steppers[0])
            steppers[index].step()

    batches = inputs(12, lane)
    for real, z in zip(batches[::2], batches[1::2], strict=True):
        train(made, optimizers, real, z, scaled=True)
        train(references, plain, real, z, scaled=False)
    rough = {"O0": 1e-6, "O1": 1e-6, "O2": 4e-3, "O4": 1e-6}[level]
    for optimizer, reference in zip(optimizers, references, strict=True):
        assert_follows(optimizer, reference, rtol=rough, atol=rough)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
@pytest.mark.parametrize("how", ["xamp", "torch"])
def test_clipping_sees_what_fp32_sees_and_waits_for_nothing(lane: Lane, level: str, how: str) -> None:
    model = Dot().to(lane.device)
    reference = twin(model)
    plain = SGD(reference.parameters(), lr=0.125)
    optimizer: Any = SGD(model.parameters(), lr=0.125)
    model, optimizer = xamp.initialize(model, optimizer, init_scale=64.0, **at(level))
    for x in inputs(3, lane):
        optimizer.zero_grad()
        run_backward(model(x), optimizer)
        with HostReads() as reads:
            norm = clip(optimizer, how)
        assert (reads.scalars, reads.lists) == (0, 0)
        plain.zero_grad()
        reference(x).backward()
        wanted = torch.nn.utils.clip_grad_norm_(reference.parameters(), MAX_NORM)
        torch.testing.assert_close(norm, wanted, rtol=1e-6, atol=0)
        optimizer.step()
        plain.step()
    assert_follows(optimizer, reference)


@each_level
@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_several_optimizers_can_be_clipped_as_one_vector(lane: Lane, level: str, norm_type: float) -> None:
    models = [Dot().to(lane.device), Dot().to(lane.device)]
    references = [twin(m) for m in models]
    models, made = initialize(models, [SGD(m.parameters(), lr=0.125) for m in models], level=level, init_scale=64.0)
    x = inputs(1, lane)[0]
    run_backward(models[0](x) + 2 * models[1](x), made)
    (references[0](x) + 2 * references[1](x)).backward()
    everything = [p for r in references for p in r.parameters()]
    wanted = torch.nn.utils.clip_grad_norm_(everything, MAX_NORM, norm_type)
    torch.testing.assert_close(xamp.clip_grad_norm_(made, MAX_NORM, norm_type), wanted, rtol=1e-6, atol=0)
    found = [p.grad for o in made for p in xamp.master_params(o)]
    torch.testing.assert_close(found, [p.grad for p in everything], rtol=1e-6, atol=1e-7)


def test_clipping_works_on_an_optimizer_that_nothing_manages(lane: Lane) -> None:
    model = Dot().to(lane.device)
    optimizer = SGD(model.parameters(), lr=0.125)
    model(inputs(1, lane)[0]).backward()
    xamp.clip_grad_norm_(optimizer, MAX_NORM)
    norm = torch.linalg.vector_norm(torch.cat([p.grad for p in model.parameters() if p.grad is not None]))
    assert float(norm) == pytest.approx(MAX_NORM, rel=1e-5)


@pytest.mark.parametrize("which", [0, 1])
@each_level
def test_zero_grad_of_one_of_two_models_clears_its_gradients_only(level: str, which: int) -> None:
    """Both models are stepped by one optimizer."""
    torch.manual_seed(0)
    models = [nn.Linear(3, 1, bias=False), nn.Linear(3, 1, bias=False)]
    optimizer = SGD([p for model in models for p in model.parameters()], lr=1.0)
    initialize(models, optimizer, level=level, init_scale=64.0)
    before = [p.detach().clone() for p in xamp.master_params(optimizer)]
    x = torch.tensor([[1.0, 2.0, -4.0]])
    run_backward(models[0](x).sum() + models[1](x).sum(), optimizer)
    models[which].zero_grad()
    optimizer.step()
    moved = [(old - new.detach()) for old, new in zip(before, xamp.master_params(optimizer), strict=True)]
    assert_same(moved[which], torch.zeros(1, 3))
    torch.testing.assert_close(moved[1 - which], x)


@each_level
@pytest.mark.parametrize("which", [0, 1])
def test_an_overflow_of_either_optimizer_lowers_the_scale(level: str, which: int) -> None:
    models = [nn.Linear(3, 1), nn.Linear(3, 1)]
    made = [SGD(model.parameters(), lr=0.1) for model in models]
    initialize(models, made, level=level, init_scale=64.0)
    factors = [torch.inf if index == which else 1.0 for index in range(2)]
    loss = sum(model(torch.ones(2, 3)).sum() * factor for model, factor in zip(models, factors, strict=True))
    run_backward(loss, made)
    for optimizer in made:
        optimizer.step()
    assert [outcome(optimizer) for optimizer in made] == ["SKIPPED" if f == torch.inf else "APPLIED" for f in factors]
    assert xamp.loss_scale(made[0]) == 32.0


@each_level
@pytest.mark.parametrize("shared", ["scale", "optimizer"])
def test_a_block_inside_another_over_the_same_scale_or_optimizer_is_refused(level: str, shared: str) -> None:
    models = [nn.Linear(3, 1), nn.Linear(3, 1)]
    made = [SGD(model.parameters(), lr=0.1) for model in models]
    initialize(models, made, level=level, init_scale=64.0, num_losses=2)
    inner, loss_id = (made[1], 0) if shared == "scale" else (made[0], 1)
    losses = [model(torch.ones(2, 3)).sum() for model in models]
    with xamp.scale_loss(losses[0], made[0], loss_id=0) as scaled:
        with (
            pytest.raises(StateError, match="another scale_loss over this optimizer or with this loss_id is open"),
            xamp.scale_loss(losses[1], inner, loss_id=loss_id),
        ):
            pass
        scaled.backward()
