"""Ctrl-C, a hook that raises and memory that runs out, at the places where they once did damage."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from injection import Fault
from snapshot import Snapshot
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import xamp
from xamp.errors import StateError
from xamp.scaling.engine import Engine, ScaledLoss
from xamp.scaling.gradients import Gradients

LEVELS = ("O1", "O2", "O5")
X = torch.linspace(-1.0, 1.0, 12).reshape(3, 4)


def made(level: str, optimizer: Any = torch.optim.SGD, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    made = optimizer(model.parameters(), lr=0.125, **options)
    xamp.initialize(model, made, level, init_scale=64.0, verbosity=0)
    return model, made


def backward(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with xamp.scale_loss(model(X).square().mean(), optimizer) as scaled:
        scaled.backward()


def interrupted(*_: object, **__: object) -> Any:
    raise KeyboardInterrupt


# --- scale_loss


@pytest.mark.parametrize("kind", ["line", "operator"])
@pytest.mark.parametrize("level", LEVELS)
def test_an_entry_that_is_interrupted_is_closed_though_its_object_is_kept(level: str, kind: str) -> None:
    """The object is alive, so that no later call can take the block for an abandoned one."""
    model, optimizer = made(level)
    block = xamp.scale_loss(model(X).square().mean(), optimizer)
    with Fault(kind) as fault:
        block.__enter__()
    block.__exit__(None, None, None)
    kept = []
    for n in range(fault.points):
        kept.append(xamp.scale_loss(model(X).square().mean(), optimizer))
        with Fault(kind, n) as fault:
            kept[-1].__enter__()
        if not fault.raised:  # a later entry reaches fewer lines
            kept[-1].__exit__(None, None, None)
        with xamp.scale_loss(model(X).square().mean(), optimizer) as scaled:  # else: another scale_loss is open
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_an_interrupt_of_the_entry_keeps_the_gradients_of_the_masters() -> None:
    """Between two lines of the sentinel it once looked as if somebody had cleared the gradients."""
    model, optimizer = made("O2")
    backward(model, optimizer)
    engine = xamp.session(optimizer).engine
    gradients, scaler = engine.states[0].gradients, engine.scalers[0]
    before = [p.grad.clone() for p in xamp.master_params(optimizer) if p.grad is not None]

    def enter(n: int | None) -> int:
        with Fault("line", n) as fault:
            gradients.enter(scaler)
        gradients.abandon(scaler)
        return fault.points

    for n in range(enter(None)):
        enter(n)
        after = [p.grad for p in xamp.master_params(optimizer) if p.grad is not None]
        assert len(after) == len(before)
        assert all(map(torch.equal, after, before))


def _exit_with_self(self: ScaledLoss, *_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("keeps", [False, True], ids=["gone", "its traceback is kept"])
def test_a_block_whose_exit_never_began_is_recognised(level: str, keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
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
    if keeps:  # the frame of __exit__ with its `self` is among what the traceback shows
        assert kept[0].__traceback__ is not None
    optimizer.zero_grad()
    backward(model, optimizer)
    optimizer.step()
    twin, other = made(level)
    backward(twin, other)
    other.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)
    xamp.session(model).close()


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


@pytest.mark.parametrize("level", LEVELS)
def test_an_end_that_is_interrupted_leaves_no_half_of_it(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = made(level)
    scale = xamp.loss_scale(model)
    with monkeypatch.context() as patched:
        patched.setattr(Engine, "leave", interrupted)
        with pytest.raises(KeyboardInterrupt):
            backward(model, optimizer)
    assert all(p.grad is None for p in (*model.parameters(), *xamp.master_params(optimizer)))
    assert xamp.loss_scale(model) == scale
    backward(model, optimizer)
    optimizer.step()


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_gradients_cleared_before_an_entry_that_is_interrupted_stay_cleared(level: str) -> None:
    """The user clears those of the model's own parameters; the masters hold the values."""

    def steps(n: int | None) -> tuple[list[torch.Tensor], int]:
        model, optimizer = made(level)
        backward(model, optimizer)
        for param in model.parameters():
            param.grad = None
        block = xamp.scale_loss(model(X).square().mean(), optimizer)
        with Fault("line", n) as fault:
            block.__enter__()
        if not fault.raised:
            block.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
        backward(model, optimizer)
        optimizer.step()
        return [p.detach().clone() for p in xamp.master_params(optimizer)], fault.points

    model, optimizer = made(level)
    backward(model, optimizer)
    optimizer.step()
    expected = [p.detach().clone() for p in xamp.master_params(optimizer)]
    found, points = steps(None)
    for n in range(points):
        assert all(map(torch.equal, found, expected))
        found, _ = steps(n)


@pytest.mark.parametrize("level", LEVELS)
def test_an_interrupt_when_all_is_done_ends_the_block_though_its_object_is_kept(
    level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = made(level)
    leave = Engine.leave
    block = xamp.scale_loss(model(X).square().mean(), optimizer)
    block.__enter__().backward()
    with monkeypatch.context() as patched:
        patched.setattr(Engine, "leave", lambda *args: (leave(*args), interrupted()))
        with pytest.raises(KeyboardInterrupt):
            block.__exit__(None, None, None)
    backward(model, optimizer)  # else: another scale_loss is open
    optimizer.step()


@pytest.mark.parametrize("level", LEVELS)
def test_a_body_that_raises_and_a_clean_up_that_is_interrupted_keep_the_gradients(
    level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The body did not touch them: what the backward before it left is there."""
    model, optimizer = made(level)
    backward(model, optimizer)
    before = [None if p.grad is None else p.grad.clone() for p in xamp.master_params(optimizer)]
    assert any(grad is not None for grad in before)
    abandon, calls = Gradients.abandon, []

    def once(self: Gradients, scaler: Any) -> None:
        calls.append(scaler)
        if len(calls) == 1:
            raise KeyboardInterrupt
        abandon(self, scaler)

    monkeypatch.setattr(Gradients, "abandon", once)
    with pytest.raises(KeyboardInterrupt), xamp.scale_loss(model(X).square().mean(), optimizer):
        raise ValueError
    for param, grad in zip(xamp.master_params(optimizer), before, strict=True):
        assert (param.grad is None) == (grad is None)
        assert grad is None or torch.equal(param.grad, grad)  # type: ignore[arg-type]
    optimizer.step()


# --- step


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_step_whose_copy_into_the_model_is_interrupted_does_it_again(level: str) -> None:
    class Interrupt(TorchDispatchMode):
        left = 1

        def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._foreach_copy_.default and self.left:
                self.left -= 1
                raise KeyboardInterrupt
            return func(*args, **(kwargs or {}))

    model, optimizer = made(level)
    backward(model, optimizer)
    try:
        with Interrupt(), pytest.raises(KeyboardInterrupt):  # type: ignore[no-untyped-call]
            optimizer.step()
        assert torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)
    for param, master in zip(model.parameters(), xamp.master_params(optimizer), strict=True):
        assert torch.equal(param, master.to(param.dtype))
    assert xamp.session(optimizer).stats.applied == 1


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
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
        assert xamp.session(hooked).stats.applied == number + 1
        assert xamp.session(hooked).last_step is xamp.session(other).last_step


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("form", ["foreach", "fused"])
@pytest.mark.parametrize("base", [torch.optim.SGD, torch.optim.AdamW])
def test_an_interrupt_right_behind_a_step_comes_after_a_whole_step(level: str, base: type, form: str) -> None:
    """Without hooks too. A fused step leaves no trace in the tensors' versions."""
    own = type("Interrupted", (base,), {"_optimizer_step_code": lambda self: self.then()})
    (model, optimizer), (twin, other) = (made(level, one, **{form: True}) for one in (own, base))
    for number, then in enumerate((lambda: None, interrupted, interrupted)):
        optimizer.then = then  # type: ignore[attr-defined]
        for one, its in ((model, optimizer), (twin, other)):
            its.zero_grad()
            backward(one, its)
        with pytest.raises(KeyboardInterrupt) if number else contextlib.nullcontext():
            optimizer.step()
        other.step()
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
        assert xamp.session(optimizer).stats.applied == number + 1


@pytest.mark.parametrize("level", LEVELS)
def test_a_pre_hook_that_raises_comes_before_the_step(level: str) -> None:
    model, optimizer = made(level)
    backward(model, optimizer)
    before = Snapshot(model)
    handle = optimizer.register_step_pre_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    handle.remove()
    before.assert_same()
    assert xamp.session(optimizer).stats.applied == 0
    optimizer.step()
    assert xamp.session(optimizer).stats.applied == 1


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


@pytest.mark.parametrize("level", LEVELS)
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


# --- in the middle of a step


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
        optimizer.zero_grad()
        backward(model, optimizer)
        optimizer.step()
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
    masters = list(xamp.master_params(optimizer))
    assert not any(map(torch.equal, before, masters))
    with torch.no_grad():
        model(X)
    assert all(torch.equal(p, m.to(p.dtype)) for p, m in zip(model.parameters(), masters, strict=True))
    for _ in range(20):
        optimizer.zero_grad()
        backward(model, optimizer)
        optimizer.step()
    assert not caplog.records
