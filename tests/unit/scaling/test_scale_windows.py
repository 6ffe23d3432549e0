"""A window, from one step to the next, is one update of each loss scale, as with torch.amp.

Covers: xamp.scaling.backwards, xamp.scaling.scale, xamp.scaling.engine.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import compiling
import pytest
import torch
from graph_recorder import GraphRecorder
from lanes import Lane
from saturating_chip import SATURATING, SaturatingBackend
from stepping import SCALED, Dot, at, inputs, outcome, run_backward
from torch._dynamo.testing import CompileCounter
from torch.optim import SGD
from window_programs import Program, Scalers, Session, programs

import xamp
from xamp.registry import registry

each_level = pytest.mark.parametrize("level", SCALED)
torchs_scaler = functools.partial(torch.amp.GradScaler, "cpu")


def spoil(grad: torch.Tensor) -> None:
    grad[0] = torch.inf


def wrong(drawn: Iterable[Program]) -> list[Any]:
    """The programs whose scales are not torch.amp's after each step, and what each way found."""
    found = []
    for program in drawn:
        wanted = Scalers(program, torchs_scaler).run()
        ways = {level: Session(program, level, spoil).run() for level in ("O1", "O2")}
        ways["GradScaler"] = Scalers(program, xamp.GradScaler).run()
        found += [(program, way, got, wanted) for way, got in ways.items() if got != wanted]
    return found


def test_a_sample_of_programs_moves_the_scales_as_torch_does() -> None:
    assert wrong(programs(24)) == []


@pytest.mark.thorough
@pytest.mark.parametrize("part", range(10))
def test_programs_move_the_scales_as_torch_does(part: int) -> None:
    assert wrong(programs(50, 50 * part)) == []


def test_the_sample_has_each_kind() -> None:
    drawn = list(programs(24))
    assert {program.shape for program in drawn} == {"apart", "together", "onto one"}
    names = [name for program in drawn for name, *_ in program.events]
    assert names.count("resume") >= 4
    assert any(event[0] == "backward" and event[2] for program in drawn for event in program.events)


# ---------------------------------------------------------------- a chip's flag, graphs, the compiler


def test_a_chips_flag_moves_the_scales_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [Scalers(program, torchs_scaler).run() for program in programs(24)]
    monkeypatch.setattr(registry, "REGISTRY", registry.Registry((SATURATING,), group=None))
    chip = registry.resolve("auto", "cpu")
    assert isinstance(chip, SaturatingBackend)
    for program, scales in zip(programs(24), wanted, strict=True):
        if not any(event == ("resume", True) for event in program.events):  # its gradients show no overflow any more
            assert Session(program, "O2", chip.make_overflow_).run() == scales, program


@each_level
@pytest.mark.parametrize("num_losses", [1, 2])
def test_a_captured_micro_batch_that_is_replayed_is_a_part_of_one_window(
    level: str, num_losses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One graph holds a micro-batch, another the step: the scale moves with the second, by all that the first found."""
    recorders = [GraphRecorder(), GraphRecorder()]
    captures: Any = lambda self, device: lambda: any(recorder.is_capturing for recorder in recorders)  # noqa: E731
    monkeypatch.setattr(type(registry.resolve("auto", "cpu")), "capture_check", captures)
    model = Dot()
    optimizer = SGD(model.parameters(), lr=0.125)
    options: dict[str, Any] = {"init_scale": 64.0, "growth_interval": 3, "num_losses": num_losses}
    xamp.initialize(model, optimizer, **options, **at(level))
    x = torch.ones(7)
    for part in range(4):  # the first two windows are eager
        if part == 2:
            with recorders[0].capture():
                optimizer.zero_grad(set_to_none=False)
                run_backward(model(x), optimizer)
        else:
            run_backward(model(x), optimizer)
        if part in (0, 1):
            optimizer.step()
    assert xamp.loss_scale(optimizer) == 64.0
    with recorders[1].capture():
        optimizer.step()
    found = [xamp.loss_scale(optimizer)]
    for window in ("..", "x.", ".x", "xx", "...."):
        for kind in window:
            x.fill_(torch.inf if kind == "x" else 1.0)
            recorders[0].replay()
        recorders[1].replay()
        found.append(xamp.loss_scale(optimizer))
    assert found == [128, 128, 64, 32, 16, 16]


@each_level
@pytest.mark.parametrize("num_losses", [1, 2])
@pytest.mark.parametrize("cleared", ["before both captures", "between them"])
def test_no_graph_holds_the_end_of_a_window_that_was_cleared(
    cleared: str, num_losses: int, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warm-up of micro-batches without a step is no part of what is replayed."""
    recorders = [GraphRecorder(), GraphRecorder()]
    captures: Any = lambda self, device: lambda: any(recorder.is_capturing for recorder in recorders)  # noqa: E731
    monkeypatch.setattr(type(registry.resolve("auto", "cpu")), "capture_check", captures)
    model = Dot()
    optimizer = SGD(model.parameters(), lr=0.125)
    xamp.initialize(model, optimizer, init_scale=64.0, growth_interval=100, num_losses=num_losses, **at(level))
    x = torch.ones(7)

    def warm_up() -> None:
        run_backward(model(x), optimizer)
        optimizer.zero_grad(set_to_none=False)

    run_backward(model(x), optimizer)
    optimizer.step()  # the first step of a parameter makes its state
    optimizer.zero_grad(set_to_none=False)
    if cleared == "before both captures":
        warm_up()
    with recorders[0].capture():
        run_backward(model(x), optimizer)
    if cleared == "between them":
        warm_up()
        warm_up()
        run_backward(model(x), optimizer)
    with recorders[1].capture():
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    found = []
    for window in ("..", "xx", ".x.", "...", "xxxx"):
        for kind in window:
            x.fill_(torch.inf if kind == "x" else 1.0)
            recorders[0].replay()
        recorders[1].replay()
        found.append(xamp.loss_scale(optimizer))
    assert found == [64, 32, 16, 16, 8]


# The tracer of torch itself asks the scaled loss for its .grad after a break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_compiled_micro_batches_are_one_window(level: str) -> None:
    """And after three windows nothing is compiled any more."""
    found, frames, counter = [], [], CompileCounter()
    for compiled in (False, True):
        torch.manual_seed(0)
        compiling.forget()
        model = torch.nn.Linear(4, 2)
        optimizer = SGD(model.parameters(), lr=0.125)
        xamp.initialize(model, optimizer, level, init_scale=64.0, growth_interval=2, verbosity=0)

        def micro(x: torch.Tensor, model: Any = model, optimizer: Any = optimizer) -> None:
            with xamp.scale_loss(model(x).square().mean(), optimizer) as scaled:
                scaled.backward()

        def step(optimizer: Any = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        if compiled:
            micro, step = (torch.compile(function, backend=counter) for function in (micro, step))
        scales = []
        for window in ("...", ".....", "x..", "xxxx", "...", ".x.x", ".", "........"):
            for kind in window:
                micro(torch.full((3, 4), torch.inf if kind == "x" else 0.25))
            step()
            scales.append(xamp.loss_scale(optimizer))
            frames.append(counter.frame_count)
        found.append(scales)
    assert found == [[64, 128, 64, 32, 32, 16, 16, 32]] * 2
    assert frames[-6] == frames[-1] > 0


# ---------------------------------------------------------------- what a window is


@each_level
def test_an_overflow_of_one_loss_hides_none_of_another(lane: Lane, level: str) -> None:
    """Also at O1, where both have their gradients in the same tensors; and the sum is what it was."""
    model = Dot().to(lane.device)
    optimizer = SGD(model.parameters(), lr=0.125)
    xamp.initialize(model, optimizer, num_losses=3, init_scale=64.0, growth_interval=1, **at(level))
    x, y, z = inputs(3, lane)
    run_backward(model(x), optimizer, lane, [model.a], loss_id=0)
    run_backward(model(y), optimizer, lane, [model.a], loss_id=1)
    run_backward(model(z), optimizer, loss_id=2)
    optimizer.step()
    assert [xamp.loss_scale(optimizer, loss_id) for loss_id in range(3)] == [32.0, 32.0, 128.0]
    optimizer.zero_grad()
    for loss_id, batch in enumerate((x, y, z, x)):
        run_backward(model(batch), optimizer, loss_id=loss_id % 3)
    found = torch.cat([p.grad for p in xamp.master_params(optimizer) if p.grad is not None])
    torch.testing.assert_close(found, (2 * x + y + z).to(found.dtype), rtol=1e-6, atol=0)


@each_level
def test_an_overflow_counts_in_its_own_window_only(lane: Lane, level: str) -> None:
    """One optimizer steps after two backwards; the other keeps its gradients, and with them the infs of the first."""
    models = [Dot().to(lane.device), Dot().to(lane.device)]
    often, seldom = optimizers = [SGD(model.parameters(), lr=0.125) for model in models]
    xamp.initialize(models, optimizers, init_scale=64.0, growth_interval=100, **at(level))
    found = []
    for count, x in enumerate(inputs(10, lane)):
        spoil = [models[1].a] if count in (0, 5) else []
        run_backward(models[0](x) + models[1](x), optimizers, lane, spoil)
        if count % 2 == 1:
            often.step()
            often.zero_grad()
            found.append(xamp.loss_scale(often))
    seldom.step()
    assert (found, outcome(often), outcome(seldom)) == ([32, 32, 16, 16, 16], "APPLIED", "SKIPPED")


@each_level
@pytest.mark.parametrize("init_scale", [64.0, 1000.0])
def test_a_delayed_backward_counts_no_overflow_again(lane: Lane, level: str, init_scale: float) -> None:
    """What was counted in a window lies under the gradients of a later backward, which is checked with another one."""
    model = Dot().to(lane.device)
    first, second = optimizers = [SGD([param], lr=0.125) for param in (model.a, model.b)]
    xamp.initialize(model, optimizers, init_scale=init_scale, growth_interval=100, **at(level))
    x, y, z = inputs(3, lane)
    run_backward(model(x), optimizers, lane, [model.b])
    first.step()  # ends the window
    with xamp.scale_loss(model(y), second, delay_unscale=True) as scaled:
        scaled.backward()
    run_backward(model(z), second, lane)
    assert xamp.loss_scale(model) == init_scale / 2
    second.step()
    of_first = "SKIPPED" if lane.can.overflow == "flag" else "APPLIED"  # a flag does not say whose gradient it was
    assert (xamp.loss_scale(model), outcome(first), outcome(second)) == (init_scale / 2, of_first, "SKIPPED")


CLEAR: dict[str, Any] = {
    "optimizer.zero_grad()": lambda model, optimizer: optimizer.zero_grad(),
    "zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model.zero_grad()": lambda model, optimizer: model.zero_grad(),
}


@each_level
@pytest.mark.parametrize("clear", CLEAR.values(), ids=CLEAR)
@pytest.mark.parametrize("count", [1, 2], ids=["one-optimizer", "two-optimizers"])
def test_a_window_whose_gradients_are_cleared_lowers_the_scale_if_it_overflowed(
    lane: Lane, level: str, clear: Any, count: int
) -> None:
    """As in a script that looks at the norm and goes on without a step: it would overflow for ever."""
    models = [Dot().to(lane.device) for _ in range(count)]
    optimizers = [SGD(model.parameters(), lr=0.125) for model in models]
    xamp.initialize(models, optimizers, init_scale=64.0, growth_interval=2, **at(level))
    (model, *_), (optimizer, *_) = models, optimizers
    for kind in "xx.x":
        run_backward(model(inputs(1, lane)[0]), optimizer, lane, [model.a] if kind == "x" else ())
        clear(model, optimizer)
    run_backward(model(inputs(1, lane)[0]), optimizer)
    assert xamp.loss_scale(optimizer) == 8.0
    optimizer.step()
    assert outcome(optimizer) == "SKIPPED"  # a backward since the last step overflowed
    clear(model, optimizer)
    run_backward(model(inputs(1, lane)[0]), optimizer)
    optimizer.step()
    assert (outcome(optimizer), xamp.loss_scale(optimizer)) == ("APPLIED", 16.0)  # two clean ones were counted


@each_level
@pytest.mark.parametrize("fused", [False, "auto"])
def test_a_collapse_counts_windows(lane: Lane, level: str, fused: Any) -> None:
    """Fifty windows at the floor of three micro-batches that all overflow, not fifty micro-batches."""
    model = Dot().to(lane.device)
    optimizer = SGD(model.parameters(), lr=0.125)
    xamp.initialize(model, optimizer, init_scale=2.0, fused=fused, **at(level))
    x = inputs(1, lane)[0]
    for _ in range(50):  # the first comes down to the floor
        optimizer.zero_grad()
        for _ in range(3):
            run_backward(model(x), optimizer, lane, [model.a])
        optimizer.step()
    with pytest.raises(xamp.LossScaleCollapsed):  # noqa: PT012
        for _ in range(20):
            optimizer.zero_grad()
            run_backward(model(x), optimizer, lane, [model.a])
            optimizer.step()
    assert xamp.session(optimizer).stats.skipped <= 51 + 16


@each_level
@pytest.mark.parametrize("saved_after", [0, 1, 2])
@pytest.mark.parametrize("kind", ["...", "x..", "..x"])
def test_a_state_that_is_saved_in_a_window_changes_nothing(lane: Lane, level: str, saved_after: int, kind: str) -> None:
    """Nor does one that is loaded there, into the very run: gradients that are there already are checked again."""
    model = Dot().to(lane.device)
    optimizer = SGD(model.parameters(), lr=0.125)
    xamp.initialize(model, optimizer, init_scale=64.0, growth_interval=2, **at(level))
    found = []
    for window in range(2):
        for count, (bad, x) in enumerate(zip(kind, inputs(3, lane), strict=True)):
            if count == saved_after:
                state = xamp.state_dict(optimizer)
                if window == 1 and lane.can.overflow == "inf":
                    xamp.load_state_dict(state, optimizer)
            run_backward(model(x), optimizer, lane, [model.a] if bad == "x" else ())
        optimizer.step()
        optimizer.zero_grad()
        found.append(xamp.loss_scale(optimizer))
    assert found == ([32.0, 16.0] if "x" in kind else [64.0, 128.0])
