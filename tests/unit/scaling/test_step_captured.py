"""A captured step, replayed without Python, does what the eager step does: weights, scale and counts, bit for bit.

Covers: xamp.scaling.capture, xamp.scaling.counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph_recorder import GraphRecorder
from late_history import LateHistory
from stepping import closeness
from torch import nn

import xamp
from xamp.errors import LossScaleCollapsed, StateError
from xamp.registry import registry
from xamp.torch_compat import kernels

INTERVAL = 7
SPOILT = frozenset((4, 5, 30, 31, 32, 100, 177, 299))


class Training:
    """One small model; ``step`` runs one whole training step on ``x``, whose storage stays."""

    def __init__(
        self,
        way: str,
        *,
        fused: bool = True,
        floor: float = 2.0**-3,
        device: str = "cpu",
        make: Any = torch.optim.SGD,
        **options: Any,
    ) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).to(device)
        extra = {"fused": fused or None} if make is torch.optim.SGD else {}
        self.optimizer = make(self.model.parameters(), lr=0.05, momentum=0.9, **extra)
        self.x = torch.zeros(3, 5, device=device)
        self.scaler: Any = None
        if way == "GradScaler":
            self.scaler = xamp.GradScaler(init_scale=2.0**10, growth_interval=INTERVAL)
            self.scaler.min_loss_scale = floor
        else:
            xamp.initialize(
                self.model, self.optimizer, level=way, growth_interval=INTERVAL, init_scale=2.0**10,
                min_loss_scale=floor, fused="auto" if fused else False, verbosity=0, **options,
            )  # fmt: skip

    def feed(self, number: int, spoilt: bool) -> None:
        self.x.copy_(torch.randn(3, 5, generator=torch.Generator().manual_seed(number)))
        if spoilt:
            self.x.fill_(float("inf"))

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss = self.model(self.x).float().square().mean()
        if self.scaler is None:
            with xamp.scale_loss(loss, self.optimizer) as scaled:
                scaled.backward()
            self.optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()

    @property
    def engine(self) -> Any:
        return xamp.session(self.optimizer).engine

    @property
    def told(self) -> Any:
        return self.scaler if self.scaler is not None else xamp.session(self.optimizer)

    def scale(self) -> float:
        return float(self.scaler.get_scale() if self.scaler is not None else xamp.loss_scale(self.optimizer))

    def weights(self) -> list[torch.Tensor]:
        return [p.detach() for group in self.optimizer.param_groups for p in group["params"]]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> GraphRecorder:
    """A recorder of which the CPU's backend asks whether a graph is being captured."""
    found = GraphRecorder()
    check: Callable[..., Any] = lambda self, device: lambda: found.is_capturing  # noqa: E731
    monkeypatch.setattr(type(registry.resolve("auto", "cpu")), "capture_check", check)
    return found


@pytest.mark.parametrize("captured_at", [1, 2])
@pytest.mark.parametrize("way", ["O1", "O2", "O4", "O5", "GradScaler"])
def test_replays_are_eager_steps(recorder: GraphRecorder, way: str, captured_at: int) -> None:
    """300 replays, some with an overflow, and 5 eager steps after them."""
    eager, replayed = Training(way), Training(way)
    spoils = way not in ("O4", "O5")
    for number in range(305):
        spoilt = spoils and number in SPOILT
        eager.feed(number, spoilt)
        eager.step()
        replayed.feed(number, spoilt)
        if number == captured_at:  # the recorder runs what it captures: this is the first replay
            with recorder.capture():
                replayed.step()
        elif captured_at < number < 300:
            recorder.replay()
        else:
            replayed.step()
        if number in (6, 40, 299, 304):
            assert replayed.scale() == eager.scale()
            assert replayed.told.last_step is eager.told.last_step
            if way == "GradScaler":  # replays of one are not counted
                counted = replayed.told.stats
                assert counted.applied + counted.skipped == captured_at + max(number - 299, 0)
            else:
                assert repr(replayed.told.stats) == repr(eager.told.stats)
            near = number * closeness(eager.optimizer)  # a graph holds no pass
            torch.testing.assert_close(replayed.weights(), eager.weights(), rtol=near, atol=near)
    assert (eager.told.stats.skipped >= len(SPOILT)) == spoils  # a scale that grows too far overflows too


@pytest.mark.parametrize("way", ["O1", "GradScaler"])
def test_the_scale_stays_at_its_floor_and_a_session_tells_of_the_collapse(recorder: GraphRecorder, way: str) -> None:
    loop = Training(way)
    for number in range(2):
        loop.feed(number, False)
        loop.step()
    with recorder.capture():
        loop.step()
    for number in range(200):
        loop.feed(number, True)
        recorder.replay()
    assert loop.scale() == 2.0**-3
    if way == "GradScaler":
        assert repr(loop.told.stats) == "Stats(applied=2, skipped=0)"
        return
    with pytest.raises(LossScaleCollapsed, match="50 overflows in a row"):
        loop.told.stats  # noqa: B018
    assert repr(loop.told.stats) == "Stats(applied=3, skipped=200)"


def captured(recorder: GraphRecorder, **options: Any) -> Training:
    """Return a loop whose third step is captured; its scale is at its floor."""
    loop = Training("O1", floor=2.0**10, **options)
    for number in range(2):
        loop.feed(number, False)
        loop.step()
    with recorder.capture():
        loop.step()
    return loop


def overflow(loop: Training, step: Callable[[], None], times: int) -> None:
    for number in range(times):
        loop.feed(number, True)
        step()


def run_of(loop: Training) -> int:
    found: int = xamp.state_dict(loop.optimizer)["optimizers"][0]["overflow_run"]
    return found


@pytest.mark.parametrize("late", [False, True])
def test_replays_and_eager_steps_are_one_run(
    recorder: GraphRecorder, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """50 overflows in a row raise, whoever ran the steps; a clean step of either starts again."""
    if late:
        monkeypatch.setattr("xamp.scaling.outcomes.History", LateHistory)
    loop = captured(recorder)
    overflow(loop, recorder.replay, 30)
    overflow(loop, loop.step, 10)
    loop.feed(0, False)
    loop.step()
    assert run_of(loop) == 0
    overflow(loop, loop.step, 15)
    overflow(loop, recorder.replay, 20)
    assert run_of(loop) == 35
    overflow(loop, loop.step, 14)
    assert run_of(loop) == 49
    loop.feed(0, True)
    with pytest.raises(LossScaleCollapsed, match="50 overflows in a row"):
        loop.step()
    assert repr(loop.told.stats) == "Stats(applied=4, skipped=90)"  # and no second error


def test_a_load_sets_the_run_of_replays(recorder: GraphRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run goes on from the checkpoint; where the load fails, it is what it was."""
    loop = captured(recorder)
    overflow(loop, recorder.replay, 20)
    state = xamp.state_dict(loop.optimizer)
    overflow(loop, recorder.replay, 25)
    with monkeypatch.context() as broken:
        broken.setattr(type(loop.engine.memory), "lower_flags", raising)
        with pytest.raises(KeyboardInterrupt):
            xamp.load_state_dict(state, loop.optimizer)
    assert (run_of(loop), loop.told.stats.skipped) == (45, 45)
    xamp.load_state_dict(state, loop.optimizer)
    assert run_of(loop) == 20
    overflow(loop, recorder.replay, 29)
    assert loop.told.stats.skipped == 49  # those of the checkpoint and 29, and no error
    overflow(loop, recorder.replay, 1)
    with pytest.raises(LossScaleCollapsed):
        loop.told.stats  # noqa: B018


def raising(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("way", ["O1", "O2", "GradScaler"])
def test_a_capture_of_what_the_host_decides_is_refused(recorder: GraphRecorder, way: str) -> None:
    """The message names the cure, the weights stay, and training goes on."""
    for fused, before, cure in ((False, 2, "fused=True"), (True, 0, "before the capture")):
        loop = Training(way, fused=fused)
        for number in range(before):
            loop.feed(number, False)
            loop.step()
        held = [w.clone() for w in loop.weights()]
        with pytest.raises(StateError, match=cure), recorder.capture():
            loop.step()
        assert all(torch.equal(a, b) for a, b in zip(loop.weights(), held, strict=True))
        if loop.scaler is not None:
            loop.scaler.update()
        loop.step()
        assert not all(torch.equal(a, b) for a, b in zip(loop.weights(), held, strict=True))


@pytest.mark.parametrize("way", ["O1", "O2", "O5", "GradScaler"])
def test_a_graph_unscales_rightly_by_a_scale_that_is_set_later(
    recorder: GraphRecorder, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """A power of two may be cast to the dtype of the gradients; a graph is replayed at scales that are none."""
    options: dict[str, Any] = {"loss_scale": "dynamic"} if way == "O5" else {}
    loop = Training(way, **options)
    for number in range(2):
        loop.feed(number, False)
        loop.step()
    unscaled, unscale_ = [], kernels.unscale_

    def watched(*args: Any) -> None:
        unscaled.append(getattr(args[2], kernels.POWER_OF_TWO))
        unscale_(*args)

    monkeypatch.setattr(kernels, "unscale_", watched)
    loop.feed(2, False)
    loop.step()
    with recorder.capture():
        loop.step()
    assert unscaled == [True, False]  # what is recorded is what replays do
    if way != "GradScaler":
        (scaler,) = loop.engine.scalers
        scaler.set(2.0)
        assert not getattr(scaler.inverse, kernels.POWER_OF_TWO)


def test_the_cure_is_one_that_the_device_has(recorder: GraphRecorder) -> None:
    """An optimizer without a fused implementation is not told to be made fused."""
    loop = Training("O1", make=torch.optim.RMSprop)
    for number in range(2):
        loop.feed(number, False)
        loop.step()
    cure = "Take an optimizer with a fused implementation that is right on cpu, as Adagrad, Adam, AdamW or SGD have"
    with pytest.raises(StateError, match=cure), recorder.capture():
        loop.step()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="real graphs need a GPU")
@pytest.mark.parametrize("way", ["O1", "O2", "GradScaler"])
def test_real_graph(way: str) -> None:
    """As above, with ``torch.cuda.graph`` on a GPU."""
    eager, replayed = Training(way, device="cuda"), Training(way, device="cuda")
    stream = torch.cuda.Stream()
    for number in range(3):  # warm, on the stream of the capture
        with torch.cuda.stream(stream):
            for loop in (eager, replayed):
                loop.feed(number, False)
                loop.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        replayed.step()
    for number in range(3, 300):
        for loop in (eager, replayed):
            loop.feed(number, number in SPOILT)
        eager.step()
        graph.replay()
    assert replayed.scale() == eager.scale()
    if way != "GradScaler":
        assert repr(replayed.told.stats) == repr(eager.told.stats)
    for one, other in zip(replayed.weights(), eager.weights(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
