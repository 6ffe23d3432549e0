"""What a script changes between a backward and its step, or between steps, counts as it does in torch's steps.

Covers: xamp.plans.steps, xamp.scaling.one_pass.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_pass_loops import AS_TORCH, IN_ONE_PASS, Loop, assert_alike, assert_near
from stepping import assert_same
from torch import nn

import xamp
from xamp.onepass import Plan, Row, Rule

pytestmark = pytest.mark.usefixtures("interpreter")


def both(change: Callable[[Loop], object], form: str = "AdamW", level: str = "O2") -> tuple[Loop, Loop]:
    """Train two loops, and change something before the fourth step."""
    loops = Loop(IN_ONE_PASS, level, form), Loop(AS_TORCH, level, form)
    for loop in loops:
        loop.run(range(3))
        change(loop)
        loop.run(range(3))
    return loops


def options(**values: Any) -> Callable[[Loop], None]:
    def change(loop: Loop) -> None:
        for group in loop.optimizer.param_groups:
            group.update(values)

    return change


@pytest.mark.parametrize(
    ("form", "values"),
    [
        ("SGD", {"momentum": 0.9}),
        ("momentum", {"momentum": 0.0, "dampening": 0.0}),
        ("AdamW", {"lr": 0.1, "betas": (0.5, 0.9), "weight_decay": 0.5}),
        ("AdamW", {"step": "decoder", "first": True, "lr_decay": "cosine", "norm_type": "none"}),
    ],
)
def test_options_of_a_group(form: str, values: dict[str, Any]) -> None:
    assert_alike(*both(options(**values), form))


def test_a_momentum_that_rests_stays_as_it_is() -> None:
    def rest(loop: Loop) -> None:
        options(momentum=0.0)(loop)
        loop.run(range(2))
        options(momentum=0.9)(loop)

    assert_alike(*both(rest, "nesterov"))


@pytest.mark.parametrize("held", [False, True])
def test_a_state_that_no_kernel_takes_is_stepped_as_torch_steps(held: bool) -> None:
    """A script may have loaded moments in another order in memory: of these torch's fused kernel knows nothing."""
    loops = Loop(IN_ONE_PASS), Loop(False)
    for loop in loops:
        loop.run(range(3))
        loop.optimizer.zero_grad()
        if held:
            loop.backward()
        state = loop.optimizer.state[loop.masters[0]]
        state["exp_avg"] = state["exp_avg"].t().contiguous().t()
        if not held:
            loop.backward()
        loop.optimizer.step()
    assert not loops[0].holds()
    assert_alike(*loops)


@pytest.mark.parametrize("overflow", [False, True])
def test_a_write_into_a_master_reaches_the_model(overflow: bool) -> None:
    loops = Loop(IN_ONE_PASS), Loop(AS_TORCH)
    for loop in loops:
        loop.run(range(2))
        loop.optimizer.zero_grad()
        loop.backward(overflow)
        with torch.no_grad():
            for master in loop.masters:
                master.mul_(0.5)
        loop.optimizer.step()
        loop.loss()
    assert_near(loops[0].weights(), loops[1].weights())
    for tensor, master in zip(loops[0].model.parameters(), loops[0].masters, strict=True):
        assert torch.equal(tensor.detach(), master.detach().to(tensor.dtype))


def test_a_parameter_that_was_replaced_by_hand_is_not_stepped() -> None:
    loop = Loop(IN_ONE_PASS).run(range(2))
    loop.optimizer.zero_grad()
    loop.backward()
    group = loop.optimizer.param_groups[0]
    gone, group["params"][0] = group["params"][0], nn.Parameter(torch.ones(2))
    before = gone.detach().clone()
    loop.optimizer.step()
    assert torch.equal(gone.detach(), before)


def test_autograd_and_copies_see_what_was_written() -> None:
    loop = Loop(IN_ONE_PASS).run(range(2))
    direct = [p for p in loop.model.parameters() if p.dtype == torch.float32]
    assert direct
    held = [*direct, *loop.masters, *(t for s in loop.optimizer.state.values() for t in s.values())]
    before = [t._version for t in held]
    loop.run(range(1))
    assert loop.holds()
    assert all(t._version > version for t, version in zip(held, before, strict=True))


@pytest.mark.parametrize("options", [(), (True,)])
@pytest.mark.parametrize("named", [False, True])
def test_clearing_makes_no_gradient_in_fp32(
    options: tuple[bool, ...], named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(IN_ONE_PASS).run(range(2))
    made: list[object] = []
    monkeypatch.setattr("xamp.scaling.held.Held.move", lambda self, chunks: made.append(chunks))
    if named:
        loop.optimizer.zero_grad(**({"set_to_none": options[0]} if options else {}))
    else:
        loop.optimizer.zero_grad(*options)
    assert not made
    assert all(p.grad is None for p in (*loop.masters, *loop.model.parameters()))


def test_the_state_goes_with_its_optimizer() -> None:
    loop = Loop(IN_ONE_PASS).run(range(2))
    states = [weakref.ref(t) for s in loop.optimizer.state.values() for t in s.values()]
    model = loop.model
    del loop
    gc.collect()
    assert not any(ref() is not None for ref in states)
    assert model is not None


@pytest.mark.parametrize("number", range(4))
def test_after_an_interrupt_between_two_kernels_training_goes_on(
    number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """From masters and states as the kernels left them, which the model follows: factors, and steps of two dtypes."""
    loop = Loop(IN_ONE_PASS).run(range(2))
    loop.optimizer.zero_grad()
    loop.backward()
    run, left = Plan._run, [number]

    def interrupted(self: Plan, *args: Any, **constants: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        run(self, *args, **constants)

    with monkeypatch.context() as patched:
        patched.setattr(Plan, "_run", interrupted)
        with contextlib.nullcontext() if number == 3 else pytest.raises(KeyboardInterrupt):
            loop.optimizer.step()
    fresh = Loop(IN_ONE_PASS)
    fresh.load(loop.saved())
    fresh.made = loop.made
    assert len(caplog.records) == (number < 3)
    assert not loop.holds() or number == 3
    assert xamp.session(loop.optimizer).stats.applied == (3 if number == 3 else 2)
    for each in (loop, fresh):
        each.run(range(3))
    assert_same(loop.saved()[0], fresh.saved()[0])
    assert_same(loop.moments(), fresh.moments())


@pytest.mark.parametrize(
    ("rule", "states"),
    [
        (Rule("adam"), (torch.zeros(4),)),
        (Rule("adam"), (torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16))),
        (Rule("sgd"), (torch.zeros(4), torch.zeros(4))),
    ],
)
def test_states_that_a_rule_does_not_have_are_refused(rule: Rule, states: tuple[torch.Tensor, ...]) -> None:
    with pytest.raises(ValueError, match="kernels take fp32, fp16 and bf16"):
        Plan(rule, [Row(torch.zeros(4), None, states)])
