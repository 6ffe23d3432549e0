"""Steps in one pass that a graph holds: replays, which run no Python, do what eager steps do.

Covers: xamp.plans.graphs, xamp.scaling.capture.
"""

from __future__ import annotations

import gc
import importlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from graph_recorder import GraphRecorder
from one_pass_loops import FORMS
from stepping import assert_same
from torch import nn

import xamp
from xamp.apex import optimizers
from xamp.errors import StateError
from xamp.plans import graphs, lists
from xamp.registry import registry
from xamp.scaling.moves import ModelGradient

pytestmark = pytest.mark.usefixtures("interpreter")

RUNS = 11
SPOILT = frozenset((1, 4, 5, 9))


class Training:
    """A model with an fp32 norm; its data lie where they lay. ``fused`` is what ``initialize`` gets."""

    def __init__(self, level: str, form: str = "AdamW", *, clip: float | None = None, fused: Any = "one-pass") -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 3))
        kind, own = FORMS[form]
        make: Any = kind
        self.optimizer: Any = make(self.model.parameters(), **own)
        options: Any = {"init_scale": 2.0**10, "growth_interval": 3} if level == "O2" else {}
        xamp.initialize(self.model, self.optimizer, level, fused=fused, verbosity=0, **options)
        self.x, self.factor, self.clip = torch.zeros(8, 6), torch.ones(()), clip

    def feed(self, number: int, x: torch.Tensor | None = None) -> None:
        x = self.x if x is None else x
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(number)))
        self.factor.fill_(1e30 if number in SPOILT else 1.0)

    def backward(self, x: torch.Tensor | None = None) -> None:
        loss = self.model(self.x if x is None else x).square().mean() * self.factor
        with xamp.scale_loss(loss, self.optimizer) as scaled:
            scaled.backward()

    def step(self, x: torch.Tensor | None = None) -> None:
        self.optimizer.zero_grad()
        self.backward(x)
        if self.clip is not None:
            xamp.clip_grad_norm_(self.optimizer, self.clip)
        self.optimizer.step()

    def all(self) -> Any:
        """Return weights, states, scale and counts."""
        found = self.model.state_dict(), self.optimizer.state_dict(), xamp.loss_scale(self.optimizer)
        return (*found, repr(xamp.session(self.optimizer).stats))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> GraphRecorder:
    """A recorder; xamp is told of its capture, by the CPU's backend and by torch's module of the host."""
    found = GraphRecorder()
    check: Callable[..., Any] = lambda self, device: lambda: found.is_capturing  # noqa: E731
    monkeypatch.setattr(type(registry.resolve("auto", "cpu")), "capture_check", check)
    monkeypatch.setattr(torch.cpu, "is_current_stream_capturing", lambda: found.is_capturing, raising=False)
    return found


def eager(training: Training, numbers: Sequence[int]) -> Training:
    for number in numbers:
        training.feed(number)
        training.step()
    return training


def replay_between_eager_steps(recorder: GraphRecorder, level: str, form: str, clip: float | None) -> Training:
    """Check that replays, and eager steps between them that use the ring again and again, are eager steps."""
    theirs = eager(Training(level, form, clip=clip), range(RUNS))
    ours = eager(Training(level, form, clip=clip), range(3))
    ours.feed(3)
    with recorder.capture():
        ours.step()
    assert all(param.grad is None or isinstance(param.grad, ModelGradient) for param in ours.model.parameters())
    assert ours.optimizer._xamp.state.gradients.held is None, "replays would change them unseen"
    for number in range(4, RUNS):
        ours.feed(number)
        ours.step() if 5 <= number < 10 else recorder.replay()
    assert_same(ours.all(), theirs.all())
    return ours


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize(("level", "form"), [("O2", "AdamW"), ("O2", "momentum"), ("O5", "amsgrad"), ("O5", "SGD")])
def test_replays_are_eager_steps(recorder: GraphRecorder, level: str, form: str, clip: float | None) -> None:
    """Bit for bit, with overflows."""
    replay_between_eager_steps(recorder, level, form, clip)
    check = ["sums"] if level == "O2" or clip is not None else []
    assert recorder.launches == [*check, *(["total", "clip_factor"] if clip is not None else []), "factors", "step"]


def test_several_graphs_have_tables_of_their_own(recorder: GraphRecorder) -> None:
    """Of two sizes of a batch, captured one after the other and replayed in turn."""
    ours, theirs = (eager(Training("O2"), range(2)) for _ in range(2))
    second, graphs = torch.zeros(4, 6), [recorder, GraphRecorder()]
    inputs = [ours.x, second]
    for graph, x, number in zip(graphs, inputs, (2, 3), strict=True):
        ours.feed(number, x)
        recorder.is_capturing = True  # the one of which xamp is told
        with graph.capture():
            ours.step(x)
        recorder.is_capturing = False
    for number in range(4, RUNS):
        ours.feed(number, inputs[number % 2])
        graphs[number % 2].replay()
    small = torch.zeros(4, 6)
    for number in range(2, RUNS):
        x = small if number % 2 else theirs.x
        theirs.feed(number, x)
        theirs.step(x)
    assert_same(ours.all(), theirs.all())


@pytest.mark.parametrize("change", ["states that lie elsewhere", "a group"])
def test_a_graph_keeps_the_plan_that_another_has_replaced(recorder: GraphRecorder, change: str) -> None:
    """The old graph steps what it stepped, until the optimizer is gone."""
    ours = eager(Training("O5"), range(2))
    ours.feed(2)
    with recorder.capture():
        ours.step()
    held = weakref.ref(ours.optimizer._xamp.state.gradients.one_pass._plans._kept.plan)
    if change == "a group":
        ours.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    else:
        for state in ours.optimizer.state.values():
            state["exp_avg"] = state["exp_avg"].clone()
    eager(ours, range(3, 5))
    gc.collect()
    plan: Any = held()
    assert ours.optimizer._xamp.state.gradients.one_pass._plans._kept.plan is not plan
    before = [row.param.clone() for row in plan.rows]
    ours.feed(5)
    recorder.replay()
    assert not any(torch.equal(row.param, old) for row, old in zip(plan.rows, before, strict=True))
    del plan, ours
    recorder.calls.clear()
    gc.collect()
    assert held() is None


@pytest.mark.parametrize("what", ["step", "backward"])
def test_a_part_of_a_step_in_one_pass_is_refused(recorder: GraphRecorder, what: str) -> None:
    """Nothing changes, and what is cleared goes on."""
    ours, theirs = (eager(Training("O5"), range(2)) for _ in range(2))
    ours.feed(2)
    ours.optimizer.zero_grad()
    if what == "step":
        ours.backward()
        with pytest.raises(StateError, match=r"step\(\): .* made before the capture of this graph"), recorder.capture():
            ours.optimizer.step()
    else:
        with recorder.capture():
            ours.backward()
        with pytest.raises(StateError, match=r"step\(\): .* made in a graph, .* hold their step too"):
            ours.optimizer.step()
        with pytest.raises(StateError, match=r"master_params\(optimizer\): .* made in a graph"):
            xamp.master_params(ours.optimizer)
        with pytest.raises(StateError, match=r"scale_loss: .* made in a graph"):
            ours.backward()
    assert_same(ours.all(), theirs.all())
    assert_same(eager(ours, range(2, 6)).all(), eager(theirs, range(2, 6)).all())


def test_a_graph_holds_torchs_step_where_nobody_asks(recorder: GraphRecorder) -> None:
    ours = eager(Training("O2", fused=True), range(2))
    ours.feed(2)
    with recorder.capture():
        ours.step()
    assert recorder.launches == []
    assert "aten::_fused_adamw_" in recorder.names()


@pytest.mark.parametrize("twice", [False, True])
def test_gradients_are_read_in_the_graph_that_makes_them(twice: bool, recorder: GraphRecorder) -> None:
    """By torch's own clipping, or by a second backward: the step of that graph is the ordinary one."""

    def step(training: Training) -> None:
        training.optimizer.zero_grad()
        training.backward()
        if twice:
            training.backward()
        nn.utils.clip_grad_norm_(xamp.master_params(training.optimizer), 0.1, foreach=False)
        training.optimizer.step()

    ours, theirs = (eager(Training("O2"), range(2)) for _ in range(2))
    ours.feed(2)
    with recorder.capture():
        step(ours)
    for number in range(2, 10):
        theirs.feed(number)
        step(theirs)
        if number > 2:
            ours.feed(number)
            recorder.replay()
    assert_same(ours.all(), theirs.all())


def test_gradients_that_were_cleared_by_hand_are_gone(recorder: GraphRecorder) -> None:
    ours, theirs = (eager(Training("O2"), range(2)) for _ in range(2))
    ours.feed(2)
    for param in ours.model.parameters():
        param.grad = None
    with recorder.capture():
        ours.backward()
        ours.optimizer.step()
    eager(theirs, [2])
    assert ours.all()[2:] == theirs.all()[2:]


def test_a_kernel_that_no_eager_step_has_launched_is_refused(recorder: GraphRecorder) -> None:
    """It cannot be loaded in a capture. One eager step that clips is enough."""
    ours = eager(Training("O2"), range(2))
    ours.feed(2)
    ours.clip = 0.1
    with (
        pytest.raises(StateError, match=r"needs a kernel that no eager step has launched yet \(total\)"),
        recorder.capture(),
    ):
        ours.step()
    eager(ours, [2, 3])
    graph = GraphRecorder()
    recorder.is_capturing = True
    with graph.capture():
        ours.step()
    assert "clip_factor" in graph.launches


def test_a_count_that_was_loaded_as_a_number_counts_on_in_a_graph(
    recorder: GraphRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state of an optimizer that was not capturable."""
    monkeypatch.setattr(lists, "_on_host", True)
    lists._refusal.cache_clear()
    param, other = (nn.Parameter(torch.ones(5)) for _ in range(2))
    plain, optimizer = optimizers.FusedAdam([other]), optimizers.FusedAdam([param], capturable=True)
    other.grad, param.grad = torch.ones(5), torch.ones(5)
    plain.step()
    optimizer.load_state_dict(plain.state_dict())
    optimizer.step()
    with recorder.capture():
        optimizer.step()
    recorder.replay()
    assert optimizer.param_groups[0]["step"].tolist() == [4]
    assert torch.is_tensor(optimizer.param_groups[0]["lr"])
    lists._refusal.cache_clear()


LISTS: list[tuple[str, dict[str, Any]]] = [
    ("FusedAdam", {"capturable": True, "weight_decay": 0.1}),
    ("FusedSGD", {"lr": 2e-3, "momentum": 0.9}),
    ("FusedAdagrad", {"lr": 1e-2}),
    ("FusedMixedPrecisionLamb", {"lr": 1e-2}),
    ("FusedLAMB", {"bias_correction": False}),
    ("FusedNovoGrad", {"bias_correction": False}),
]


@pytest.mark.parametrize(("name", "options"), LISTS)
def test_optimizers_of_apex_step_so_in_a_graph(
    recorder: GraphRecorder, monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any]
) -> None:
    """Gradients lie where they lay; eager steps with others come between."""
    monkeypatch.setattr(lists, "_on_host", True)
    lists._refusal.cache_clear()
    importlib.import_module("xamp.onepass.kernels")
    made = []
    for captures in (False, True):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(size)) for size in (7, 3)]
        static = [torch.zeros_like(p) for p in params]
        optimizer = getattr(optimizers, name)(params, **options)
        for number in range(14):
            eager_step = not captures or number < 3 or 7 <= number < 12
            grads = [torch.randn(p.shape, generator=torch.Generator().manual_seed(number)) for p in params]
            if captures and not eager_step:
                for place, grad in zip(static, grads, strict=True):
                    place.copy_(grad)
            for param, grad in zip(params, grads if eager_step else static, strict=True):
                param.grad = grad
            if eager_step:
                optimizer.step()
            elif number == 3:
                with recorder.capture():
                    optimizer.step()
            else:
                recorder.replay()
        made.append(([p.detach() for p in params], [*optimizer.state_dict()["state"].values()]))
    assert recorder.launches[-1] == "step"
    assert_same(made[1], made[0])
    lists._refusal.cache_clear()


def test_tables_of_graphs_stay_and_there_are_new_ones_after_eager_sends() -> None:
    captures = [False]
    tables = graphs._GraphTables(2, torch.device("cpu"), capturing=lambda: captures[0])
    tables.send([0, 0])
    captures[0] = True
    kept: list[torch.Tensor] = []
    while tables.begin():
        kept.append(tables.send([len(kept), 7]))
        assert tables.send([len(kept) - 1]) is kept[-1]
    captures[0] = False
    for number in range(10):
        tables.send([-number, -1])
    assert [table[:2].tolist() for table in kept] == [[number, 7] for number in range(len(kept))]
    assert len(kept) > 4
    assert tables.begin()
