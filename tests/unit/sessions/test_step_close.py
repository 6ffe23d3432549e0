"""How ``session().close()`` gives everything back, and that ``enabled=False`` never took it.

Covers: xamp.sessions.session, xamp.sessions.set_up.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from lanes import Lane, lower
from stepping import (
    OPTIMIZERS,
    SCALED,
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
    step_alike,
    stepped,
    twin,
)
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR

import xamp
from xamp.errors import StateError

scaled_levels = pytest.mark.parametrize("level", SCALED)
all_levels = pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
each_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


# ---------------------------------------------------------------- how it gives back


class Normed(nn.Module):
    """Parameters that are cast and some that are not, buffers, and a part that stays fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 2)
        self.register_buffer("offset", torch.ones(2) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.norm(self.first(x)).relu()) + self.offset
        return y


def hooks_of(model: nn.Module) -> list[int]:
    names = [name for name in vars(model) if name.endswith("_hooks")]
    return [len(getattr(module, name)) for module in model.modules() for name in names]


@all_levels
@pytest.mark.parametrize("keep_fp32", [(), ("last",)])
def test_close_gives_plain_fp32_objects_back(lane: Lane, level: str, keep_fp32: tuple[str, ...]) -> None:
    model: Any = Normed().to(lane.device)
    params, buffers = list(model.parameters()), list(model.named_buffers())
    optimizer: Any = AdamW(model.parameters(), lr=0.125, eps=1e-3)
    groups = copy.deepcopy([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups])
    attributes, hooks = (set(vars(model)), set(vars(optimizer))), hooks_of(model)
    model, optimizer = xamp.initialize(model, optimizer, keep_fp32=keep_fp32, **at(level))
    x = torch.randn(5, 4, device=lane.device)
    for _ in range(2):
        optimizer.zero_grad()
        run_backward(model(x).square().mean(), optimizer)
        optimizer.step()
    exact = [p.clone() for p in stepped(optimizer)]
    session = xamp.session(model)
    session.close()
    session.close()
    assert type(model) is Normed
    assert type(model.last) is nn.Linear
    assert type(optimizer) is AdamW
    assert all(a is b for a, b in zip(model.parameters(), params, strict=True))
    found = {name: b for name, b in model.named_buffers() if b.is_floating_point()}
    assert [name for name, _ in model.named_buffers()] == [name for name, _ in buffers]
    assert all(t.dtype == torch.float32 for t in (*model.parameters(), *found.values()))
    assert [id(p) for group in optimizer.param_groups for p in group["params"]] == [id(p) for p in params]
    assert {id(key) for key in optimizer.state} == {id(p) for p in params}
    if level != "O3":
        assert all(torch.equal(p, e) for p, e in zip(params, exact, strict=True))
    assert [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups] == groups
    assert (set(vars(model)), set(vars(optimizer)) - {"_opt_called"}) == (
        attributes[0],
        attributes[1] - {"_opt_called"},
    )
    assert hooks_of(model) == hooks
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in params)
    with pytest.raises(StateError, match="not given to xamp"):
        xamp.session(model)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
@each_optimizer
def test_training_goes_on_in_plain_torch_after_close_and_under_another_level_after_that(
    lane: Lane, level: str, make: Any
) -> None:
    model = Dot().to(lane.device)
    reference = twin(model)
    plain, optimizer = make(reference.parameters()), make(model.parameters())
    step_alike(plain, optimizer)
    model, optimizer = xamp.initialize(model, optimizer, init_scale=64.0, **at(level))
    for count, x in enumerate(inputs(8, lane)):
        if count == 3:
            xamp.session(optimizer).close()
        if count == 5:
            model, optimizer = xamp.initialize(model, optimizer, level="O2", init_scale=64.0, verbosity=0)
        (plain_iterate if count in (3, 4) else iterate)(model, optimizer, x)
        plain_iterate(reference, plain, x)
    assert_follows(optimizer, reference)


@scaled_levels
def test_gradients_survive_close(lane: Lane, level: str) -> None:
    model, optimizer = start(lane, level)
    reference = Dot().to(lane.device)
    reference.load_state_dict(model.state_dict())
    plain = SGD(reference.parameters(), lr=0.125, momentum=0.9)
    first, second = inputs(2, lane)
    run_backward(model(first), optimizer)
    xamp.session(model).close()
    model(second).backward()
    optimizer.step()
    plain_iterate(reference, plain, first, second)
    assert_follows(optimizer, reference)


@pytest.mark.parametrize("level", ["O1", "O2", "O4"])
@pytest.mark.parametrize(("when", "steps"), [("before", 0), ("before", 1), ("after", 1)])
def test_schedulers_work_on_after_close(lane: Lane, level: str, steps: int, when: str) -> None:
    model = Dot().to(lane.device)
    optimizer: Any = SGD(model.parameters(), lr=1.0)
    early = StepLR(optimizer, 1, 0.5) if when == "before" else None
    model, optimizer = xamp.initialize(model, optimizer, init_scale=64.0, **at(level))
    scheduler = early or StepLR(optimizer, 1, 0.5)
    x = inputs(1, lane)[0]
    for _ in range(steps):
        iterate(model, optimizer, x)
        scheduler.step()
    xamp.session(model).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain_iterate(model, optimizer, x)
        scheduler.step()
    assert scheduler.get_last_lr() == [0.5 ** (steps + 1)]


# ---------------------------------------------------------------- enabled=False


@all_levels
def test_not_enabled_nothing_is_done_anywhere(lane: Lane, level: str) -> None:
    model: Any = Normed().to(lane.device)
    optimizer: Any = AdamW(model.parameters(), lr=0.125)
    reference = twin(model)
    plain = AdamW(reference.parameters(), lr=0.125)
    attributes = set(vars(model)), set(vars(optimizer)), hooks_of(model)
    model, optimizer = xamp.initialize(model, optimizer, level=level, enabled=False)
    assert (type(model), type(optimizer)) == (Normed, AdamW)
    assert (set(vars(model)), set(vars(optimizer)), hooks_of(model)) == attributes
    assert xamp.session(model).policy.level == "O0"
    for x in torch.randn(3, 5, 4, device=lane.device):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        with xamp.scale_loss(loss, optimizer, loss_id=7, delay_unscale=True) as scaled:
            assert scaled is loss
            scaled.backward()
        norm = xamp.clip_grad_norm_(optimizer, 0.1)
        optimizer.step()
        plain.zero_grad()
        reference(x).square().mean().backward()
        assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1))
        plain.step()
    assert_same(picture(model, optimizer), picture(reference, plain))
    assert (xamp.loss_scale(optimizer), outcome(optimizer)) == (1.0, None)
    with xamp.session(model).autocast():
        assert not torch.is_autocast_enabled(lane.device.type)
    optimizer.step(lambda: None)
    xamp.session(model).close()
    assert type(model) is Normed


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_close_leaves_state_that_the_optimizer_keeps_in_half(lane: Lane, level: str) -> None:
    """Some optimizers do, to save memory; nobody lowered it here."""
    model = Dot().to(lane.device)
    optimizer = SGD(model.parameters(), lr=0.125)
    xamp.initialize(model, optimizer, level, verbosity=0)
    stepped_first = optimizer.param_groups[0]["params"][0]
    optimizer.state[stepped_first]["average"] = torch.zeros(4, dtype=lower(lane), device=lane.device)
    xamp.session(model).close()
    assert optimizer.state[model.a]["average"].dtype == lower(lane)


@pytest.mark.parametrize("steps", [0, 1])
def test_close_gives_state_from_before_back_unless_a_step_changed_it(steps: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False)
    optimizer = SGD(model.parameters(), lr=0.125, momentum=0.5)
    model(torch.full((1, 3), 1 / 3)).sum().backward()
    optimizer.step()
    before = optimizer.state[model.weight]["momentum_buffer"]
    assert not torch.equal(before, before.half().float()), "fp16 does not hold it"
    xamp.initialize(model, optimizer, "O3", verbosity=0)
    for _ in range(steps):
        optimizer.zero_grad()
        run_backward(model(torch.ones(1, 3)).sum(), optimizer)
        optimizer.step()
    xamp.session(optimizer).close()
    found = optimizer.state[model.weight]["momentum_buffer"]
    if steps:
        torch.testing.assert_close(found, before / 2 + 1, rtol=1e-3, atol=0.0)
    else:
        assert found is before


def test_a_block_that_was_made_before_the_session_was_closed_runs() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = xamp.initialize(model, optimizer, level="O5", verbosity=0)
    block = xamp.scale_loss(model(torch.ones(1, 4)).sum(), optimizer)
    before = model.state_dict()["weight"].clone()
    xamp.session(optimizer).close()
    with block as scaled:
        scaled.backward()
    assert torch.equal(model.weight, before)
    assert model.weight.dtype is torch.float32
