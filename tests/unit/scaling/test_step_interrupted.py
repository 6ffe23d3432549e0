"""The one rule for exceptions: a part of xamp that one has ended is found by whatever comes next, repaired and told.

``tests/faults/test_injection.py`` asks at every point that training then goes on as from the states that are there.

Covers: xamp.scaling.writing_mark, xamp.scaling.parts, xamp.scaling.block, xamp.scaling.step.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from injection import Fault, ends_of, warnings_of_repairs
from snapshot import Snapshot
from stepping import Dot
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import xamp
from xamp.errors import LossScaleCollapsed, PolicyError, StateError
from xamp.scaling import masters
from xamp.scaling.block import ScaledLoss
from xamp.scaling.counts import COLLAPSE_RUN
from xamp.scaling.gradients import Gradients
from xamp.scaling.step import OptimizerState
from xamp.scaling.writing_mark import WritingMark
from xamp.sessions import clipping

LEVELS = ("O1", "O2", "O5")
X = torch.linspace(-1.0, 1.0, 12).reshape(3, 4)

each_level = pytest.mark.parametrize("level", LEVELS)


def made(level: str, optimizer: Any = torch.optim.SGD, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    made = optimizer(model.parameters(), lr=0.125, **options)
    xamp.initialize(model, made, level, init_scale=64.0, verbosity=0)
    return model, made


def backward(model: nn.Module, optimizer: Any, **options: Any) -> None:
    with xamp.scale_loss(model(X).square().mean(), optimizer, **options) as scaled:
        scaled.backward()


def iterate(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    backward(model, optimizer)
    optimizer.step()


def interrupted(*_: object, **__: object) -> Any:
    raise KeyboardInterrupt


def gradients(model: nn.Module, optimizer: Any) -> list[list[float]]:
    """Those on the model and of what the optimizer steps, as they are: nothing is asked of xamp."""
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    return [p.grad.tolist() for p in (*model.parameters(), *stepped) if p.grad is not None]


def weights(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    return [p.detach().clone() for p in (*model.parameters(), *stepped)]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other))


# --- the mark

PARTS: dict[str, tuple[Any, str, Callable[[Any, Any], Any]]] = {
    "entering scale_loss": (Gradients, "enter", backward),
    "leaving scale_loss": (Gradients, "unscale", backward),
    "clip_grad_norm_": (clipping, "clip_grads_with_norm_", lambda _, optimizer: xamp.clip_grad_norm_(optimizer, 1.0)),
    "master_params": (Gradients, "move_held", lambda _, optimizer: list(xamp.master_params(optimizer))),
    "optimizer.step": (OptimizerState, "end_step", lambda _, optimizer: optimizer.step()),
    "zero_grad": (Gradients, "cleared", lambda _, optimizer: optimizer.zero_grad()),
}
"""Where each is ended, and the call."""

NEXT: dict[str, Callable[[Any, Any], Any]] = {
    "a session": lambda model, _: xamp.session(model).stats,
    "loss_scale": lambda model, _: xamp.loss_scale(model),
    "state_dict": lambda model, _: xamp.state_dict(model),
    "the optimizer's state": lambda _, optimizer: optimizer.state_dict(),
    "zero_grad": lambda _, optimizer: optimizer.zero_grad(),
    "scale_loss": lambda model, optimizer: xamp.scale_loss(model(X).mean(), optimizer).__enter__(),
    "master_params": lambda _, optimizer: list(xamp.master_params(optimizer)),
    "clip_grad_value_": lambda _, optimizer: xamp.clip_grad_value_(optimizer, 1.0),
    "a group": lambda _, optimizer: optimizer.add_param_group({"params": [torch.zeros(2, requires_grad=True)]}),
    "step": lambda _, optimizer: optimizer.step(),
    "a forward": lambda model, _: model(X),
}


@each_level
@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_an_exception_has_ended_drops_the_window_and_is_told_once(
    level: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, call = PARTS[part]
    for next_, reaches in NEXT.items():
        if next_ == "a forward" and level == "O1":
            continue  # only where a model has masters must it follow them
        model, optimizer = made(level)
        iterate(model, optimizer)
        backward(model, optimizer)
        with warnings_of_repairs() as told:
            with monkeypatch.context() as patched:
                patched.setattr(owner, name, interrupted)
                with pytest.raises(KeyboardInterrupt):
                    call(model, optimizer)
            assert told == []
            reaches(model, optimizer)
            assert len(told) == 1, next_
            assert told[0].startswith(part.removeprefix("entering ").removeprefix("leaving "))
            assert not gradients(model, optimizer)
            iterate(model, optimizer)
            assert len(told) == 1, next_
        assert xamp.session(optimizer).last_step is xamp.StepOutcome.APPLIED
        for param, master in zip(model.parameters(), xamp.master_params(optimizer), strict=False):
            assert torch.equal(param, master.to(param.dtype))


def test_no_line_between_foreign_code_and_ours_loses_the_mark() -> None:
    def run(n: int | None) -> tuple[list[str], Fault]:
        repaired: list[str] = []
        mark = WritingMark(lambda: None, repaired.append)
        with Fault("line", n) as fault:
            mark.begin("a call")
            mark.run_foreign(lambda: None)
            mark.end()
        mark.settle()
        return repaired, fault

    repaired, fault = run(None)
    assert repaired == []
    begun = next(n for n, where in enumerate(fault.seen) if "self._part = call" in _line(where))
    ended = next(n for n, where in enumerate(fault.seen) if "self._part = None" in _line(where) and n > begun + 4)
    for n in range(fault.points):
        repaired, _ = run(n)
        assert repaired == (["a call"] if begun < n <= ended else []), fault.seen[n]


def _line(where: str) -> str:
    file, _, number = where.rpartition(":")
    with open(file) as lines:
        return lines.read().splitlines()[int(number) - 1]


@each_level
def test_a_repair_that_is_interrupted_itself_is_done_again(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def repair(n: int | None) -> tuple[list[torch.Tensor], Fault]:
        model, optimizer = made(level, torch.optim.AdamW)
        iterate(model, optimizer)
        backward(model, optimizer)
        with monkeypatch.context() as patched:
            patched.setattr(OptimizerState, "end_step", interrupted)
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
        with warnings_of_repairs() as told:
            engine = xamp.session(optimizer)._engine
            with Fault("line", n) as fault:
                engine.settle()
            iterate(model, optimizer)
        assert told
        return weights(model, optimizer), fault

    expected, fault = repair(None)
    for n in ends_of(fault.seen)[LEVELS.index(level) :: 3]:  # each level tries other lines
        found, _ = repair(n)
        assert same(found, expected), fault.seen[n]


def test_an_interrupt_while_one_call_clips_for_two_sessions_is_told_by_both(monkeypatch: pytest.MonkeyPatch) -> None:
    (model, optimizer), (other, its) = made("O2"), made("O1")
    backward(model, optimizer)
    backward(other, its)
    with warnings_of_repairs() as told:
        with monkeypatch.context() as patched:
            patched.setattr(clipping, "clip_grads_with_norm_", interrupted)
            with pytest.raises(KeyboardInterrupt):
                xamp.clip_grad_norm_([optimizer, its], 0.125)
        for each, own in ((model, optimizer), (other, its)):
            assert xamp.session(own).stats.applied == 0
            assert not gradients(each, own)
        assert len(told) == 2
        iterate(model, optimizer)
        iterate(other, its)
    assert len(told) == 2


def test_a_call_for_two_sessions_that_one_of_them_refuses_changes_neither() -> None:
    (model, optimizer), (other, its) = made("O2"), made("O1")
    backward(model, optimizer)
    backward(other, its, delay_unscale=True)
    before = gradients(model, optimizer), gradients(other, its)
    with warnings_of_repairs() as told:
        with pytest.raises(StateError, match="still scaled"):
            xamp.clip_grad_norm_([optimizer, its], 0.125)
        assert (gradients(model, optimizer), gradients(other, its)) == before
        optimizer.step()
        backward(other, its)
        its.step()
    assert told == []
    assert xamp.session(optimizer).stats.applied == xamp.session(its).stats.applied == 1


# --- what marks nothing


def _nested(model: Any, optimizer: Any) -> None:
    backward(model, optimizer)


def _two_elements(model: Any, optimizer: Any) -> None:
    with xamp.scale_loss(model(X), optimizer):
        pass


def _clip(_: Any, optimizer: Any) -> None:
    xamp.clip_grad_norm_(optimizer, 1.0)


def _step(_: Any, optimizer: Any) -> None:
    optimizer.step()


def _closure(_: Any, optimizer: Any) -> None:
    optimizer.step(lambda: 0.0)


def _close(model: Any, _: Any) -> None:
    xamp.session(model).close()


def _inside(model: Any, optimizer: Any, refused: Callable[[], None]) -> None:
    with xamp.scale_loss(model(X).square().mean(), optimizer) as scaled:
        scaled.backward()
        refused()


def _scaled(model: Any, optimizer: Any, refused: Callable[[], None]) -> None:
    backward(model, optimizer, delay_unscale=True)
    refused()
    optimizer.zero_grad()
    backward(model, optimizer)


def _stray(model: Any, optimizer: Any, refused: Callable[[], None]) -> None:
    model(X).square().mean().backward()
    refused()
    for param in model.parameters():
        param.grad = None
    backward(model, optimizer)


def _cleared(model: Any, optimizer: Any, refused: Callable[[], None]) -> None:
    refused()
    backward(model, optimizer)


@each_level
@pytest.mark.parametrize(
    ("when", "call", "error"),
    [
        (_inside, _nested, StateError),
        (_inside, _clip, StateError),
        (_inside, _step, StateError),
        (_inside, _close, StateError),
        (_scaled, _clip, StateError),
        (_scaled, _step, StateError),
        (_scaled, _close, StateError),
        (_stray, _step, StateError),
        (_cleared, _closure, StateError),
        (_cleared, _two_elements, PolicyError),
    ],
)
def test_a_refusal_marks_nothing_and_changes_nothing(level: str, when: Any, call: Any, error: Any) -> None:
    model, optimizer = made(level, momentum=0.5)
    twin, other = made(level, momentum=0.5)
    iterate(model, optimizer)
    iterate(twin, other)
    optimizer.zero_grad()
    other.zero_grad()

    def refused() -> None:
        before, counts = Snapshot(model, optimizer), repr(xamp.session(model).stats)
        with pytest.raises(error):
            call(model, optimizer)
        before.assert_same()
        assert repr(xamp.session(model).stats) == counts

    with warnings_of_repairs() as told:
        when(model, optimizer, refused)
        backward(twin, other)
        for each in (optimizer, other):
            each.step()
        assert same(weights(model, optimizer), weights(twin, other))
    assert told == []


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_collapse_marks_nothing(level: str) -> None:
    torch.manual_seed(0)
    model: Any = Dot()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.125)
    xamp.initialize(model, optimizer, level, init_scale=1.0, verbosity=0)

    def spoilt() -> None:
        optimizer.zero_grad()
        with xamp.scale_loss(model(torch.ones(7)), optimizer) as scaled:
            scaled.backward()
            model.a.grad[0] = torch.inf
        optimizer.step()

    with warnings_of_repairs() as told:
        for _ in range(COLLAPSE_RUN - 1):
            spoilt()
        with pytest.raises(LossScaleCollapsed):
            spoilt()
        assert repr(xamp.session(model).stats) == f"Stats(applied=0, skipped={COLLAPSE_RUN})"
        spoilt()
        assert xamp.session(model).stats.skipped == COLLAPSE_RUN + 1
    assert told == []


@each_level
@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_an_exception_in_the_body_marks_nothing(level: str, error: type[BaseException]) -> None:
    model, optimizer = made(level)
    with warnings_of_repairs() as told:
        with pytest.raises(error), xamp.scale_loss(model(X).square().mean(), optimizer) as scaled:  # noqa: PT012
            scaled.backward()
            raise error
        assert not gradients(model, optimizer)
        iterate(model, optimizer)
    assert told == []
    assert xamp.session(optimizer).stats.applied == 1


class ClearsItself(torch.optim.SGD):
    """Steps, then clears its gradients; both of its methods look at their session."""

    cleared = 0

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        assert xamp.session(self).stats.applied == self.cleared
        self.zero_grad()

    def zero_grad(self, set_to_none: bool = True) -> None:
        if xamp_session(self) is not None:
            assert xamp.loss_scale(self) > 0
        super().zero_grad(set_to_none)
        self.cleared += 1


def xamp_session(found: object) -> Any:
    try:
        return xamp.session(found)
    except StateError:
        return None


@each_level
def test_code_of_others_within_a_step_finds_no_mark(level: str) -> None:
    """An optimizer whose step clears, hooks that read, a closure that reads."""
    model, optimizer = made(level, ClearsItself)
    twin, other = made(level)
    found: list[int] = []

    def look(*_: object) -> None:
        found.append(len(list(xamp.master_params(optimizer))))
        xamp.state_dict(optimizer)
        xamp.clip_grad_norm_(optimizer, 1e9)

    optimizer.register_step_pre_hook(look)
    optimizer.register_step_post_hook(look)
    with warnings_of_repairs() as told:
        for _ in range(2):
            backward(model, optimizer)
            optimizer.step(lambda: look())
            iterate(twin, other)
            assert not gradients(model, optimizer)
    assert told == []
    assert found == [4] * 10, "a step within a step calls the hooks twice"
    assert same(weights(model, optimizer), weights(twin, other))
    assert xamp.session(optimizer).stats.applied == 2


@each_level
def test_a_call_that_is_ended_within_a_hook_which_goes_on_is_told_once(
    level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = made(level)
    twin, other = made(level)

    def hook(*_: object) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(clipping, "clip_grads_with_norm_", interrupted)
            with contextlib.suppress(KeyboardInterrupt):
                xamp.clip_grad_norm_(optimizer, 1.0)

    handle = optimizer.register_step_post_hook(hook)
    with warnings_of_repairs() as told:
        iterate(model, optimizer)
        handle.remove()
        assert len(told) == 1
        assert told[0].startswith("clip_grad_norm_")
        iterate(model, optimizer)
        assert len(told) == 1
    for _ in range(2):
        iterate(twin, other)
    assert same(weights(model, optimizer), weights(twin, other))
    assert xamp.session(optimizer).stats.applied == 2


# --- blocks that were never left


def _exit_with_self(self: ScaledLoss, *_: object) -> None:
    raise KeyboardInterrupt


@each_level
@pytest.mark.parametrize("call", [backward, _step, _clip], ids=["scale_loss", "step", "clip"])
@pytest.mark.parametrize("keeps", [False, True], ids=["gone", "its traceback is kept"])
def test_a_block_whose_exit_never_began_costs_one_error_at_most(
    level: str, keeps: bool, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where Ctrl-C comes in the moment in which ``__exit__`` is entered; a notebook keeps the last traceback."""
    model, optimizer = made(level)
    kept: list[BaseException] = []
    with monkeypatch.context() as patched:
        patched.setattr(ScaledLoss, "__exit__", _exit_with_self)
        try:
            backward(model, optimizer)
        except KeyboardInterrupt as error:
            if keeps:
                kept.append(error)
    if keeps:
        with pytest.raises(StateError, match=r"another scale_loss|inside `with xamp\.scale_loss"):
            call(model, optimizer)
    call(model, optimizer)
    iterate(model, optimizer)
    twin, other = made(level)
    iterate(twin, other)
    assert same(weights(model, optimizer), weights(twin, other))
    assert xamp.session(optimizer).stats.applied == 1
    xamp.session(model).close()
    assert len(kept) == keeps


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_forward_drops_a_block_that_was_abandoned(level: str) -> None:
    model, optimizer = made(level)
    backward(model, optimizer)
    before = gradients(model, optimizer)
    xamp.scale_loss(model(X).square().mean(), optimizer).__enter__()
    model(X)
    assert not xamp.session(model).engine.blocks.entered
    assert gradients(model, optimizer) == before, "its backward never began"


@each_level
@pytest.mark.parametrize("ran", [False, True])
def test_an_abandoned_block_is_never_dropped_by_half(level: str, ran: bool) -> None:
    """Of what an earlier micro-batch has left all is kept, or nothing."""

    def dropped(n: int | None) -> tuple[list[Any], list[Any], Fault]:
        model, optimizer = made(level)
        backward(model, optimizer)
        before = gradients(model, optimizer)
        scaled = xamp.scale_loss(model(X).square().mean(), optimizer).__enter__()
        if ran:
            scaled.backward()
        engine = xamp.session(optimizer)._engine
        with Fault("line", n) as fault:
            engine.settle()
        engine.settle()  # as the next call does
        return before, gradients(model, optimizer), fault

    before, found, fault = dropped(None)
    assert found == ([] if ran and level == "O1" else before)
    for n in ends_of(fault.seen):
        before, found, _ = dropped(n)
        assert found in (before, []), fault.seen[n]


def test_a_block_that_is_open_stays_open() -> None:
    """In a with statement, on an ExitStack, in a variable, in a generator that waits."""
    model, optimizer = made("O2")

    def loss() -> torch.Tensor:
        found: torch.Tensor = model(X).square().mean()
        return found

    def refused() -> None:
        with pytest.raises(StateError, match="another scale_loss over this optimizer"):
            backward(model, optimizer)
        with pytest.raises(StateError, match=r"inside `with xamp\.scale_loss"):
            optimizer.step()

    with xamp.scale_loss(loss(), optimizer):
        refused()
    with contextlib.ExitStack() as stack:
        stack.enter_context(xamp.scale_loss(loss(), optimizer))
        refused()
    manager = xamp.scale_loss(loss(), optimizer)
    manager.__enter__()
    refused()
    manager.__exit__(None, None, None)

    def waiting() -> Iterator[None]:
        with xamp.scale_loss(loss(), optimizer):
            yield

    generator = waiting()
    next(generator)
    refused()
    list(generator)
    backward(model, optimizer)
    optimizer.step()


def test_a_block_that_a_call_within_it_has_closed_says_so_when_it_is_left() -> None:
    model, optimizer = made("O2")
    block = xamp.scale_loss(model(X).square().mean(), optimizer)
    block.__enter__().backward()
    for _ in range(2):
        with contextlib.suppress(StateError):
            optimizer.step()
    with pytest.raises(StateError, match="this block was closed by a call within it"):
        block.__exit__(None, None, None)
    assert not gradients(model, optimizer)
    iterate(model, optimizer)


# --- weights and groups


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_what_was_written_into_the_model_before_its_first_backward_outlives_an_interrupt(level: str) -> None:
    def written(n: int | None) -> Fault:
        model, optimizer = made(level)
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(3.0)
        block = xamp.scale_loss(model(X).square().mean(), optimizer)
        with Fault("line", n) as fault:
            block.__enter__()
        del block
        assert xamp.session(optimizer).stats.applied == 0  # the next call
        for tensor in (*model.parameters(), *map(masters.exact, model.parameters())):
            assert bool((tensor == 3.0).all()), n
        return fault

    for n in ends_of(written(None).seen):
        written(n)


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_group_that_is_taken_in_by_half_is_taken_in_again(level: str, by_hand: bool) -> None:
    def trained(n: int | None) -> tuple[list[torch.Tensor], Fault]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        optimizer: Any = torch.optim.SGD(model[0].parameters(), lr=0.125, momentum=0.5)
        xamp.initialize(model, optimizer, level, init_scale=64.0, verbosity=0)
        backward(model, optimizer)
        optimizer.step()
        group = {**optimizer.param_groups[0], "params": list(model[1].parameters())}
        if by_hand:
            optimizer.param_groups.append(group)
        optimizer.zero_grad()
        loss = model(X).square().mean()
        with Fault("line", n) as fault:
            if by_hand:
                with xamp.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
            else:
                optimizer.add_param_group({"params": list(model[1].parameters())})
        if len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": list(model[1].parameters())})
        for _ in range(2):
            iterate(model, optimizer)
        model.zero_grad()
        assert all(param.grad is None for group in optimizer.param_groups for param in group["params"])
        if level == "O2":
            assert all(masters.master_of(param) is not None for param in model.parameters())
        return weights(model, optimizer), fault

    expected, fault = trained(None)
    for n in ends_of(fault.seen)[LEVELS.index(level) :: 3]:
        found, _ = trained(n)
        assert same(found, expected), fault.seen[n]


# --- step


@each_level
@pytest.mark.parametrize("form", ["foreach", "fused"])
@pytest.mark.parametrize("base", [torch.optim.SGD, torch.optim.AdamW])
def test_an_interrupt_right_behind_a_step_leaves_what_it_has_stepped(level: str, base: type, form: str) -> None:
    """Without hooks too. A fused step leaves no trace in the tensors' versions; the model follows its masters."""

    def step(self: Any, *args: Any) -> None:
        base.step(self, *args)  # type: ignore[attr-defined]
        self.then()

    own = type("Interrupted", (base,), {"step": step})
    (model, optimizer), (twin, other) = (made(level, one, **{form: True}) for one in (own, base))
    with warnings_of_repairs() as told:
        for number, then in enumerate((lambda: None, interrupted, interrupted)):
            optimizer.then = then
            for one, its in ((model, optimizer), (twin, other)):
                its.zero_grad()
                backward(one, its)
            with pytest.raises(KeyboardInterrupt) if number else contextlib.nullcontext():
                optimizer.step()
            other.step()
            model(X)
            assert same(list(model.parameters()), list(twin.parameters()))
            assert xamp.session(optimizer).stats.applied == 1, "a step that has not ended is not counted"
            assert len(told) == number


@pytest.mark.parametrize("level", [*LEVELS, "O0", "O3", "O4"])
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"momentum": 0.5}),
        (torch.optim.AdamW, {"eps": 1e-4}),
        (torch.optim.Adagrad, {"eps": 1e-4}),
    ],
)
def test_a_post_hook_that_raises_comes_after_a_whole_step(level: str, optimizer: Any, options: dict[str, Any]) -> None:
    model, hooked = made(level, optimizer, **options)
    twin, other = made(level, optimizer, **options)
    for number in range(3):
        handle = hooked.register_step_post_hook(interrupted) if number else None
        for one, its in ((model, hooked), (twin, other)):
            its.zero_grad()
            backward(one, its)
        with pytest.raises(KeyboardInterrupt) if handle else contextlib.nullcontext():
            hooked.step()
        other.step()
        if handle is not None:
            handle.remove()
        assert xamp.session(hooked).stats.applied == 1
        assert same(list(model.parameters()), list(twin.parameters()))
        assert "found_inf" not in vars(hooked)


@each_level
def test_a_pre_hook_that_raises_comes_before_the_step(level: str) -> None:
    model, optimizer = made(level)
    backward(model, optimizer)
    before = weights(model, optimizer)
    handle = optimizer.register_step_pre_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    handle.remove()
    assert xamp.session(optimizer).stats.applied == 0
    assert same(weights(model, optimizer), before)
    iterate(model, optimizer)
    assert xamp.session(optimizer).stats.applied == 1


@pytest.mark.parametrize("loaded", [False, True], ids=["", "after a load"])
@pytest.mark.parametrize("fused", [False, "auto"])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_model_follows_a_step_that_was_interrupted_after_it_moved_the_masters(
    level: str, fused: Any, loaded: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Fused kernels leave no trace that they have run. Nobody is blamed later for what the step itself did."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.125)
    xamp.initialize(model, optimizer, level, init_scale=64.0, verbosity=0, fused=fused)
    module = sys.modules["torch.optim.adam"]
    real: Any = module.adam

    def interrupted_at_its_end(*args: Any, **kwargs: Any) -> None:
        real(*args, **kwargs)
        raise KeyboardInterrupt

    for _ in range(3):
        iterate(model, optimizer)
    optimizer.zero_grad()
    backward(model, optimizer)
    if loaded:
        state = xamp.state_dict(optimizer)
        xamp.load_state_dict(state, optimizer)
        backward(model, optimizer)
    before = [master.detach().clone() for master in xamp.master_params(optimizer)]
    with monkeypatch.context() as patched:
        patched.setattr(module, "adam", interrupted_at_its_end)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    masters_now = [p for group in optimizer.param_groups for p in group["params"]]
    assert not any(map(torch.equal, before, masters_now))
    with torch.no_grad():
        model(X)
    assert all(torch.equal(p, m.to(p.dtype)) for p, m in zip(model.parameters(), masters_now, strict=True))
    for _ in range(20):
        iterate(model, optimizer)
    assert [record.getMessage()[:40] for record in caplog.records] == ["optimizer.step() was ended by an excepti"]


# --- load_state_dict, close


class NoMemory(TorchDispatchMode):
    """From the n-th operator that ``counts`` on, nothing that ``counts`` runs."""

    def __init__(self, n: int, counts: Callable[[Any], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._left, self._counts = n, counts

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._counts(func):
            self._left -= 1
            if self._left == -1:
                raise torch.OutOfMemoryError("put in by a test")
        return func(*args, **(kwargs or {}))


@each_level
@pytest.mark.parametrize("n", range(12))
def test_a_load_whose_writes_fail_changes_nothing(level: str, n: int) -> None:
    model, optimizer = made(level)
    for _ in range(3):
        backward(model, optimizer)
        optimizer.step()
    saved = xamp.state_dict(model)
    model, optimizer = made(level)
    backward(model, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    before, state = Snapshot(model, optimizer), str(xamp.state_dict(model))
    try:
        with NoMemory(n, lambda func: func._schema.is_mutable):
            xamp.load_state_dict(saved, model)
    except torch.OutOfMemoryError:
        before.assert_same()
        assert str(xamp.state_dict(model)) == state
    else:
        assert str(xamp.state_dict(model)) != state


@pytest.mark.parametrize("n", range(0, 12, 3))
def test_a_load_whose_writes_fail_leaves_the_window_of_a_backward(n: int) -> None:
    """The next step still moves the scale, by what that backward found."""
    model, optimizer = made("O2")
    backward(model, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    saved = xamp.state_dict(model)
    with xamp.scale_loss(model(X).sum() * math.inf, optimizer) as scaled:
        scaled.backward()
    scale = xamp.loss_scale(model)
    with pytest.raises(torch.OutOfMemoryError), NoMemory(n, lambda func: func._schema.is_mutable):
        xamp.load_state_dict(saved, model)
    optimizer.step()
    assert xamp.loss_scale(model) == scale / 2
    assert xamp.session(model).stats.skipped == 1


def test_a_close_without_memory_leaves_a_session_that_goes_on() -> None:
    model, optimizer = made("O3", momentum=0.5, nesterov=False)
    backward(model, optimizer)
    optimizer.step()
    before = [p.detach().clone() for p in model.parameters()]
    with NoMemory(0, lambda func: "_to_copy" in str(func)), pytest.raises(torch.OutOfMemoryError):
        xamp.session(model).close()
    backward(model, optimizer)  # it still is what it was
    assert xamp.session(optimizer).policy.level == "O3"
    optimizer.zero_grad()
    xamp.session(model).close()
    for param, value in zip(model.parameters(), before, strict=True):
        assert param.dtype == torch.float32
        assert torch.equal(param, value.float())


def test_a_session_that_is_asked_in_the_midst_of_a_part_is_not_repaired(caplog: pytest.LogCaptureFixture) -> None:
    """By another thread, and by a handler of the very message of a repair."""
    torch.manual_seed(0)
    model: Any = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    xamp.initialize(model, optimizer, "O2", verbosity=0)
    engine: Any = xamp.session(model).engine
    seen: list[float] = []

    def ask() -> None:
        seen.append(xamp.loss_scale(model))

    def take_in_writes(new_wrappers: Any) -> None:
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        whole(new_wrappers)

    whole = engine.weights.take_in_writes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.weights, "take_in_writes", take_in_writes)
        with xamp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled:
            scaled.backward()
    assert seen == [65536.0]
    assert not caplog.records
    engine.mark.begin("a part that an exception ended")
    handler = logging.Handler()
    handler.emit = lambda record: ask()  # type: ignore[method-assign]
    logging.getLogger("xamp").addHandler(handler)
    try:
        optimizer.zero_grad()
    finally:
        logging.getLogger("xamp").removeHandler(handler)
    assert len(seen) == 2
    assert len(caplog.records) == 1
