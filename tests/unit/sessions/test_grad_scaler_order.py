"""Methods of GradScaler in every order: what torch's refuses is refused, in the same words and kinds of exception.

Covers: xamp.sessions.grad_scaler, xamp.sessions.scaler_steps.
"""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lanes import Lane
from scaler_comparison import FORMS, ON_CPU, data, failure, net, spoil, theirs
from stepping import assert_same
from torch import nn
from torch.optim import SGD, Adam, Optimizer

import xamp

FUSED = ("SGD", "Adam-fused")


class Training:
    """Two models and their optimizers, and one scaler over both."""

    def __init__(self, scaler: Any, device: torch.device = ON_CPU) -> None:
        torch.manual_seed(0)
        self.scaler = scaler
        self.device = device
        self.models = [net(device=device), net(device=device)]
        self.optimizers = [FORMS[form](m.parameters()) for form, m in zip(FUSED, self.models, strict=True)]
        self.index = 0

    def do(self, action: tuple[Any, ...]) -> Any:
        name, *rest = action
        return ACTIONS[name](self, *rest)

    def backward(self, which: int) -> None:
        self.index += 1
        self.scaler.scale(self.models[which](data(self.index, self.device)).square().mean()).backward()

    def spoil(self, which: int, value: float) -> None:
        if any(p.grad is not None for p in self.models[which].parameters()):
            spoil(self.models[which].parameters(), value)

    def factor(self, value: float) -> None:
        self.scaler.set_growth_factor(value)
        self.scaler.set_backoff_factor(1 / value)

    def state(self) -> Any:
        weights = [[p.detach() for p in m.parameters()] for m in self.models]
        return self.scaler.get_scale(), self.scaler.state_dict(), weights


ACTIONS: dict[str, Any] = {
    "backward": Training.backward,
    "spoil": Training.spoil,
    "factor": Training.factor,
    "scale_only": lambda run: run.scaler.scale(torch.ones(2, device=run.device)),
    "unscale": lambda run, which: run.scaler.unscale_(run.optimizers[which]),
    "clip": lambda run, which: nn.utils.clip_grad_norm_(run.models[which].parameters(), 1.0),
    "step": lambda run, which: run.scaler.step(run.optimizers[which]),
    "update": lambda run, value: run.scaler.update(value),
    "zero": lambda run, which: run.optimizers[which].zero_grad(),
    "copy": lambda run: setattr(run, "scaler", copy.deepcopy(run.scaler)),
    "pickled": lambda run: setattr(run, "scaler", pickle.loads(pickle.dumps(run.scaler))),
    "reload": lambda run: run.scaler.load_state_dict(run.scaler.state_dict()),
    "longer": lambda run: run.scaler.set_growth_interval(run.scaler.get_growth_interval() + 1),
}

which = st.integers(0, 1)
actions = st.one_of(
    st.tuples(st.just("backward"), which),
    st.tuples(st.just("unscale"), which),
    st.tuples(st.just("step"), which),
    st.tuples(st.just("update"), st.one_of(st.none(), st.sampled_from([2.0, 1024.0]))),
    st.tuples(st.just("spoil"), which, st.sampled_from([float("inf"), float("nan")])),
    st.tuples(st.just("zero"), which),
    st.tuples(st.just("clip"), which),
    st.sampled_from([("scale_only",), ("copy",), ("pickled",), ("reload",), ("longer",)]),
    st.tuples(st.just("factor"), st.sampled_from([2.0, 4.0])),
)
ITERATION = [("backward", 0), ("backward", 1), ("step", 0), ("step", 1), ("update", None), ("zero", 0), ("zero", 1)]
plans = st.lists(st.one_of(actions.map(lambda a: [a]), st.just(ITERATION)), max_size=14)


@settings(max_examples=150, deadline=None, database=None, derandomize=True)
@given(plans)
def test_any_sequence_of_calls_does_and_refuses_what_torch_does(plan: list[list[tuple[Any, ...]]]) -> None:
    options: dict[str, Any] = {"init_scale": 64.0, "growth_interval": 2}
    ours, torchs = Training(xamp.GradScaler(**options)), Training(theirs(**options))
    ours.scaler.min_loss_scale = 2.0**-100  # torch's has no floor
    for action in (action for part in plan for action in part):
        found, wanted = failure(ours.do, action), failure(torchs.do, action)
        assert (found is None) == (wanted is None), f"{action}: xamp {found!r}, torch {wanted!r}"
        if found is not None:
            assert isinstance(found, xamp.XampError), action
            if isinstance(wanted, AttributeError):  # an accident of torch's, which leaves the fused optimizer broken:
                return  # unscale_ without gradients, then a step with some
            assert isinstance(found, type(wanted)), f"{action}: {found!r} is no {wanted!r}"
        assert_same(ours.state(), torchs.state(), str(action))


REFUSED: dict[str, tuple[list[tuple[Any, ...]], str]] = {
    "unscale twice": (
        [("backward", 0), ("unscale", 0), ("unscale", 0)],
        "unscale_() has already been called on this optimizer since the last update().",
    ),
    "unscale after step": ([("backward", 0), ("step", 0), ("unscale", 0)], "unscale_() is being called after step()."),
    "step twice": (
        [("backward", 0), ("step", 0), ("step", 0)],
        "step() has already been called since the last update().",
    ),
    "step twice, skipped": (
        [("backward", 0), ("spoil", 0, float("inf")), ("step", 0), ("step", 0)],
        "step() has already been called since the last update().",
    ),
    "step before scale": ([("step", 0)], "Attempted step but _scale is None"),
    "unscale before scale": ([("unscale", 0)], "Attempted unscale_ but _scale is None"),
    "update before scale": ([("update", None)], "Attempted update but _scale is None"),
    "set before scale": ([("update", 2.0)], "Attempted update but _scale is None"),
    "update without step": ([("backward", 0), ("update", None)], "No inf checks were recorded prior to update."),
    "update twice": (
        [("backward", 0), ("step", 0), ("update", None), ("update", None)],
        "No inf checks were recorded prior to update.",
    ),
    "step without gradients": ([("scale_only",), ("step", 0)], "No inf checks were recorded for this optimizer."),
    "unscale, then step without gradients": (
        [("scale_only",), ("unscale", 0), ("backward", 0), ("step", 0)],
        "No inf checks were recorded for this optimizer.",
    ),
    "step without gradients, after an iteration that ended before its step": (
        [("backward", 0), ("unscale", 0), ("update", None), ("zero", 0), ("scale_only",), ("step", 0)],
        "No inf checks were recorded for this optimizer.",
    ),
    "unscale, then fused step without gradients": (
        [("scale_only",), ("unscale", 1), ("backward", 1), ("step", 1)],
        "No inf checks were recorded for this optimizer.",
    ),
    "pickled after unscale": (
        [("backward", 0), ("unscale", 0), ("pickled",)],
        "A GradScaler instance may only be pickled at the beginning of an iteration, or at the end after "
        "scaler.update().",
    ),
    "copied after step": (
        [("backward", 0), ("step", 0), ("copy",)],
        "A GradScaler instance may only be pickled at the beginning",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_call_at_the_wrong_moment(case: str, lane: Lane) -> None:
    plan, text = REFUSED[case]
    for scaler in (xamp.GradScaler(init_scale=64.0), theirs(lane, init_scale=64.0)):
        training = Training(scaler, lane.device)
        for action in plan[:-1]:
            training.do(action)
        before = copy.deepcopy(training.state())
        error = failure(training.do, plan[-1])
        if isinstance(error, AttributeError):  # see above
            continue
        assert isinstance(error, (RuntimeError, AssertionError))
        assert re.sub(" +", " ", str(error)).startswith(text)
        assert_same(training.state(), before)
    assert isinstance(failure(Training(xamp.GradScaler()).do, ("step", 0)), xamp.StateError)


class Fails(SGD):
    """An optimizer whose step fails once."""

    fail = True

    def step(self, closure: Any = None) -> Any:
        if self.fail:
            self.fail = False
            raise MemoryError("once")
        return super().step(closure)


def test_a_step_that_raised_may_be_tried_again(lane: Lane) -> None:
    results = []
    for scaler in (xamp.GradScaler(init_scale=8.0), theirs(lane, init_scale=8.0)):
        weight = nn.Parameter(torch.ones(2, device=lane.device))
        optimizer = Fails([weight], lr=0.125)
        scaler.scale((weight * 2).sum()).backward()
        with pytest.raises(MemoryError):
            scaler.step(optimizer)
        scaler.step(optimizer)
        scaler.update()
        results.append((weight.tolist(), scaler.state_dict()))
    assert results[0] == results[1]
    assert results[0][0] == [0.75, 0.75]


def test_closures_are_refused(lane: Lane) -> None:
    for scaler in (xamp.GradScaler(), theirs(lane)):
        training = Training(scaler, lane.device)
        training.do(("backward", 0))
        with pytest.raises(RuntimeError, match="Closure use is not currently supported if GradScaler is enabled"):
            scaler.step(training.optimizers[0], closure=lambda: 1.0)
    ours = Training(xamp.GradScaler(), lane.device)
    ours.do(("backward", 0))
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        ours.scaler.step(ours.optimizers[0], lambda: 1.0)  # torch's runs it, on scaled gradients
    ours.scaler.step(ours.optimizers[0])


@pytest.mark.parametrize("wrong", [None, 3, "a string", {"a": 1}, [1.0], object()])
def test_what_cannot_be_scaled(wrong: Any) -> None:
    scaler = xamp.GradScaler()
    with pytest.raises(ValueError, match=r"GradScaler.scale\(outputs\): must be a tensor or an iterable of tensors"):
        list(scaler.scale(wrong))
    assert scaler._scale is None


@pytest.mark.parametrize("call", ["unscale_", "step"])
def test_what_is_no_optimizer(call: str) -> None:
    scaler = xamp.GradScaler()
    scaler.scale(torch.ones(()))
    with pytest.raises(xamp.PolicyError, match=rf"GradScaler.{call}\(Linear\): must be given an optimizer"):
        getattr(scaler, call)(nn.Linear(2, 2))


def test_a_loss_kept_over_an_update_does_not_go_backward(lane: Lane) -> None:
    for scaler in (xamp.GradScaler(init_scale=8.0), theirs(lane, init_scale=8.0)):
        for update in (None, 16.0):
            weight = nn.Parameter(torch.ones(2, device=lane.device))
            optimizer = Adam([weight], lr=0.1)
            old = scaler.scale((weight * 2).sum())
            scaler.scale((weight * 3).sum()).backward()
            scaler.step(optimizer)
            scaler.update(update)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                old.backward()


@pytest.mark.parametrize("count", [1, 9])
def test_neither_does_one_kept_over_the_steps_of_several_optimizers(count: int) -> None:
    scaler = xamp.GradScaler(init_scale=8.0)
    weights = [nn.Parameter(torch.ones(2)) for _ in range(count)]
    optimizers: list[Optimizer] = [SGD([w], lr=0.125) for w in weights]
    losses = [scaler.scale((w * 2).sum()) for w in weights]
    old = scaler.scale((weights[0] * 2).sum())
    for loss, optimizer in zip(losses, optimizers, strict=True):
        loss.backward()  # after earlier ones have stepped
        scaler.step(optimizer)
    late = scaler.scale((weights[0] * 2).sum())
    scaler.update()
    assert [w.tolist() for w in weights] == [[0.75, 0.75]] * count
    for kept in (old, late):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            kept.backward()
