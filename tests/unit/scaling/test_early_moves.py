"""Gradients move to the masters during the backward, where micro-batches accumulate: less memory, the same bits."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import compiling
import pytest
import torch
from injection import Fault
from lanes import Lane, needs_dtype
from saturating_chip import SATURATING
from stepping import outcome
from torch import nn
from torch.utils.checkpoint import checkpoint

import xamp
from xamp.errors import StateError
from xamp.registry import registry
from xamp.scaling import moves
from xamp.scaling.engine import ScaledLoss
from xamp.testing.measure import Storages

LAYERS, WIDTH = 8, 8
MICRO = 3
with_masters = pytest.mark.parametrize("level", ["O2", "O5"])


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models move early too, and in chunks of two layers."""
    monkeypatch.setattr(moves, "_LEAST", 0)
    monkeypatch.setattr(moves, "_SMALL_CHUNK", 2 * WIDTH * WIDTH)


@contextlib.contextmanager
def without_moves() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(moves, "_LEAST", 2**60)
        yield


class Moved:
    """What has moved early: the parameters in order. ``interrupts``: the next move is interrupted half-way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.params: list[nn.Parameter] = []
        self.interrupts = False
        move, at_end = moves.transfer_chunk, moves.transfer

        def noted(chunk: Any, *args: Any, **options: Any) -> None:
            if self.interrupts:
                self.interrupts = False
                chunk[0][0].grad = None
                raise KeyboardInterrupt
            move(chunk, *args, **options)
            self.params += [p for p, _ in chunk]

        def unnoted(*args: Any, **options: Any) -> bool:
            before = list(self.params)
            moved = at_end(*args, **options)
            self.params[:] = before
            return moved

        monkeypatch.setattr(moves, "transfer_chunk", noted)
        monkeypatch.setattr(moves, "transfer", unnoted)

    def take(self) -> int:
        """How many parameters have moved early since the last call."""
        count = len(self.params)
        self.params.clear()
        return count


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> Moved:
    return Moved(monkeypatch)


def net(device: Any = "cpu") -> nn.Sequential:
    torch.manual_seed(0)
    layers = [each for _ in range(LAYERS) for each in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers).to(device)


def made(level: str, model: nn.Module | None = None, **options: Any) -> tuple[Any, Any]:
    model = net() if model is None else model
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    options = {"loss_scale" if "loss_scale" in options else "init_scale": 256.0, **options}
    xamp.initialize(model, optimizer, level, verbosity=0, **options)
    return model, optimizer


def batch(number: int, device: Any = "cpu") -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number)).to(device)


def loss_of(model: Any, number: int = 0) -> torch.Tensor:
    x = batch(number, next(model.parameters()).device)
    loss: torch.Tensor = model(x).float().square().mean()
    return loss


def backward(model: Any, optimizer: Any, number: int = 0, **options: Any) -> None:
    with xamp.scale_loss(loss_of(model, number), optimizer, **options) as scaled:
        scaled.backward()


def hooks(model: nn.Module) -> int:
    return sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())


def grads(optimizer: Any) -> list[Any]:
    return [None if p.grad is None else p.grad.clone() for p in xamp.master_params(optimizer)]


def same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether all bits are equal: a step that nobody checks may make nan, which equals no number."""
    both = zip(a, b, strict=True)
    return all(x is y if x is None or y is None else torch.equal(bits(x), bits(y)) for x, y in both)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def after_two(level: str, between: Callable[[Any, Any], None] = lambda *_: None) -> tuple[Any, Any]:
    """A model and its optimizer after one backward, and after what ``between`` does then."""
    model, optimizer = made(level)
    backward(model, optimizer, 0)
    between(model, optimizer)
    return model, optimizer


# --- memory


@with_masters
def test_two_micro_batches_stay_below_19_bytes(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole of a step: with Adam 2 + 4 + 8 bytes are always there, 4 while gradients are."""
    monkeypatch.undo()
    width = 128
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(24)))
    size = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    xamp.initialize(model, optimizer, level, fused="auto", op_policy="native", verbosity=0)
    x, peaks = torch.randn(1, width), []
    with Storages("cpu") as storages:
        storages.note([*model.parameters(), *xamp.master_params(optimizer), x])
        for _ in range(3):
            optimizer.zero_grad()
            storages.lap()
            for _ in range(2):
                loss = model(x).float().square().mean()
                with xamp.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
                del loss, scaled
            optimizer.step()
            peaks.append(storages.lap() / size)
    assert peaks[-1] <= 19.0, peaks


def test_small_models_keep_their_gradients_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    moved = Moved(monkeypatch)
    model, optimizer = after_two("O2")
    before = len(moved.params)
    with xamp.scale_loss(loss_of(model), optimizer) as scaled:
        assert hooks(model) == 0
        scaled.backward()
        assert len(moved.params) == before
        assert all(p.grad is not None for p in model.parameters())


# --- the same numbers


def train(level: str, spoilt: Any, clips: bool, lane: Lane | None = None, **options: Any) -> list[Any]:
    """Ten steps of three micro-batches; of the step ``spoilt`` one micro-batch overflows."""
    model, optimizer = made(level, net("cpu" if lane is None else lane.device), **options)
    decided: list[Any] = []
    for step in range(10):
        optimizer.zero_grad()
        for micro in range(MICRO):
            loss = loss_of(model, MICRO * step + micro)
            if (step, micro) == spoilt:
                loss = loss * torch.finfo(torch.float32).max
            with xamp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        if clips:
            decided.append(xamp.clip_grad_norm_(optimizer, 0.01).nan_to_num())
        optimizer.step()
        decided.append(torch.tensor(xamp.loss_scale(optimizer)))
        decided.append(torch.tensor(outcome(optimizer) == "SKIPPED"))
    return [*decided, *(p.detach().clone() for p in (*model.parameters(), *xamp.master_params(optimizer)))]


@pytest.mark.device
@pytest.mark.parametrize(
    ("level", "options"),
    [
        ("O2", {"growth_interval": 2}),
        ("O2", {"init_scale": 1000.0, "growth_interval": 2}),
        ("O2", {"loss_scale": 1000.0}),
        ("O2", {"loss_scale": 1000.0, "on_static_overflow": "step"}),
        ("O2", {"keep_fp32": ["2", "4"], "growth_interval": 2}),
        ("O5", {}),
        ("O5", {"loss_scale": 1000.0}),
    ],
    ids=["dynamic", "dynamic-1000", "static", "static-unchecked", "partly fp32", "bf16", "bf16-static"],
)
@pytest.mark.parametrize("spoilt", [None, (4, 0), (4, 1), (4, 2)], ids=["clean", "first", "second", "third"])
@pytest.mark.parametrize("clips", [False, True], ids=["", "clipped"])
def test_weights_scales_and_outcomes_are_the_same_bit_for_bit(
    lane: Lane, level: str, options: dict[str, Any], spoilt: Any, clips: bool, moved: Moved
) -> None:
    needs_dtype(lane, torch.float16 if level == "O2" else torch.bfloat16)
    found = train(level, spoilt, clips, lane, **options)
    assert (moved.take() > 0) == (lane.can.overflow == "inf")
    with without_moves():
        expected = train(level, spoilt, clips, lane, **options)
    assert moved.take() == 0
    assert same(found, expected)
    if spoilt is not None and "loss_scale" not in options and level == "O2" and lane.can.overflow == "inf":
        assert any(bool(each) for each in found[1 + clips :: 2 + clips][:10])


def test_an_overflow_that_only_an_early_chunk_saw_skips_the_step(moved: Moved) -> None:
    """The last layer's gradient moves first; those of the other layers are finite."""
    model, optimizer = after_two("O2")
    was = [p.detach().clone() for p in xamp.master_params(optimizer)]
    handle = model[-2].weight.register_hook(lambda grad: torch.full_like(grad, torch.inf))
    before = len(moved.params)
    with xamp.scale_loss(loss_of(model, 1), optimizer) as scaled:
        scaled.backward()
        assert any(p is model[-2].weight for p in moved.params[before:])
        assert model[-2].weight.grad is None
    handle.remove()
    optimizer.step()
    assert outcome(optimizer) == "SKIPPED"
    assert xamp.loss_scale(optimizer) == 128.0
    assert same(was, [p.detach() for p in xamp.master_params(optimizer)])
    optimizer.zero_grad()
    for number in range(2):
        backward(model, optimizer, number)  # the flag of that block is gone
    optimizer.step()
    assert outcome(optimizer) == "APPLIED"


def test_an_early_overflow_that_is_to_be_ignored_is_ignored() -> None:
    model, optimizer = after_two("O2")
    handle = model[-2].weight.register_hook(lambda grad: torch.full_like(grad, torch.inf))
    backward(model, optimizer, 1, delay_overflow_check=True)
    handle.remove()
    assert xamp.loss_scale(optimizer) == 256.0
    backward(model, optimizer, 2)
    optimizer.step()
    assert xamp.loss_scale(optimizer) == 256.0
    assert outcome(optimizer) == "APPLIED"


# --- what stays as it was


@with_masters
def test_nothing_moves_early_unless_gradients_accumulate(level: str, moved: Moved) -> None:
    model, optimizer = made(level)
    for _ in range(2):
        before = len(moved.params)
        with xamp.scale_loss(loss_of(model), optimizer) as scaled:
            assert hooks(model) == 0
            scaled.backward()
            assert len(moved.params) == before
        optimizer.step()
        optimizer.zero_grad()


def test_left_over_gradients_do_not_move() -> None:
    """Gradients that nobody cleared after a step: their check comes when the block is left."""
    model, optimizer = after_two("O2")
    optimizer.step()
    with xamp.scale_loss(loss_of(model), optimizer) as scaled:
        assert hooks(model) == 0
        scaled.backward()


@with_masters
@pytest.mark.parametrize("pending", [False, True], ids=["delayed", "after a delayed one"])
def test_gradients_that_stay_scaled_stay_where_they_are(level: str, pending: bool, moved: Moved) -> None:
    model, optimizer = after_two(level)
    if pending:
        backward(model, optimizer, 1, delay_unscale=True)
    before = len(moved.params)
    with xamp.scale_loss(loss_of(model, 2), optimizer, delay_unscale=not pending) as scaled:
        assert hooks(model) == 0
        scaled.backward()
    assert len(moved.params) == before
    assert all(p.grad is not None for p in model.parameters()) != pending


def test_gradients_stay_on_a_chip_that_tells_an_overflow_by_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "REGISTRY", registry.Registry((SATURATING,), group=None))
    model, optimizer = after_two("O2")
    with xamp.scale_loss(loss_of(model), optimizer) as scaled:
        assert hooks(model) == 0
        scaled.backward()


def test_gradients_stay_where_they_may_be_shared(tmp_path: Path) -> None:
    model, optimizer = after_two("O2")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with xamp.scale_loss(loss_of(model), optimizer) as scaled:
            assert hooks(model) == 0
            scaled.backward()
    finally:
        torch.distributed.destroy_process_group()


def test_gradients_stay_where_the_engine_keeps_them() -> None:
    """Apex's engine: a script finds the model's gradients there, scaled."""
    from xamp.apex import amp

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    for number in range(2):
        with amp.scale_loss(loss_of(model, number), optimizer) as scaled:
            assert hooks(model) == 0
            scaled.backward()
            assert all(p.grad is not None for p in model.parameters())


def test_gradients_stay_on_another_device_than_the_scale() -> None:
    model, optimizer = after_two("O2")
    gradients = xamp.session(optimizer).engine.states[0].gradients
    elsewhere: Any = types.SimpleNamespace(scale=torch.ones((), device="meta"))
    gradients.move_early(elsewhere)
    assert hooks(model) == 0


def test_parameters_on_two_devices_stay() -> None:
    whole = (nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4)))
    assert moves.is_worth_it([whole])
    assert not moves.is_worth_it([whole, (nn.Parameter(torch.ones(4, device="meta")), whole[1])])


@pytest.mark.parametrize(("count", "size", "worth"), [(24, 2**14, True), (300, 1000, False), (300, 20_000, True)])
def test_many_tiny_parameters_stay(count: int, size: int, worth: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the size that the fixture of this file takes away
    param = nn.Parameter(torch.ones(size))
    assert moves.is_worth_it([(param, param)] * count) is worth


# --- exceptions


class BodyError(Exception):
    """Raised in the body of a ``scale_loss``."""


def step_anew(model: Any, optimizer: Any) -> list[Any]:
    optimizer.zero_grad()
    for number in range(2):
        backward(model, optimizer, number)
    optimizer.step()
    return [p.detach().clone() for p in (*model.parameters(), *xamp.master_params(optimizer))]


@with_masters
@pytest.mark.parametrize("when", ["inside", "after"])
def test_an_exception_after_a_move_drops_all_gradients(level: str, when: str, moved: Moved) -> None:
    model, optimizer = after_two(level)

    def refuse(_: torch.Tensor) -> None:
        raise BodyError

    handle = model[0].weight.register_hook(refuse) if when == "inside" else None
    before = len(moved.params)
    with pytest.raises(BodyError), xamp.scale_loss(loss_of(model, 1), optimizer) as scaled:  # noqa: PT012
        scaled.backward()
        raise BodyError
    assert len(moved.params) > before
    if handle is not None:
        handle.remove()
    assert hooks(model) == 0
    assert all(p.grad is None for p in (*model.parameters(), *xamp.master_params(optimizer)))
    assert same(step_anew(model, optimizer), step_anew(*made(level)))


@with_masters
def test_an_exception_before_a_move_keeps_the_gradients(level: str) -> None:
    model, optimizer = after_two(level)
    was = grads(optimizer)
    with pytest.raises(BodyError), xamp.scale_loss(loss_of(model, 1), optimizer):
        raise BodyError
    assert hooks(model) == 0
    assert same(was, grads(optimizer))


@with_masters
def test_an_interrupt_in_a_move_drops_all_gradients(level: str, moved: Moved) -> None:
    model, optimizer = after_two(level)
    moved.interrupts = True
    with pytest.raises(KeyboardInterrupt):
        backward(model, optimizer, 1)
    assert hooks(model) == 0
    assert all(p.grad is None for p in (*model.parameters(), *xamp.master_params(optimizer)))
    assert same(step_anew(model, optimizer), step_anew(*made(level)))


def test_an_interrupted_move_that_the_body_hides_is_an_error(moved: Moved) -> None:
    model, optimizer = after_two("O2")
    moved.interrupts = True
    with (
        pytest.raises(StateError, match="while gradients moved into the masters"),
        xamp.scale_loss(loss_of(model, 1), optimizer) as scaled,
        contextlib.suppress(KeyboardInterrupt),
    ):
        scaled.backward()
    assert hooks(model) == 0
    assert all(p.grad is None for p in (*model.parameters(), *xamp.master_params(optimizer)))
    assert same(step_anew(model, optimizer), step_anew(*made("O2")))


@pytest.mark.parametrize("kind", ["line", "operator", "memory"])
def test_a_fault_at_any_point_of_the_second_backward_leaves_no_half_gradient(kind: str) -> None:
    """Gradients are those of the first, or of both, or gone."""

    def after_one_more(fault: Fault) -> tuple[Any, Any, Fault]:
        model, optimizer = after_two("O2")
        loss = loss_of(model, 1)
        with fault, xamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        return model, optimizer, fault

    first, anew = grads(after_two("O2")[1]), step_anew(*made("O2"))
    _, optimizer, fault = after_one_more(Fault(kind))
    both, none = grads(optimizer), [None] * len(first)
    for n in range(0, fault.points, 1 if fault.points < 100 else 7):
        model, optimizer, _ = after_one_more(Fault(kind, n))
        found = grads(optimizer)
        assert any(same(found, each) for each in (first, both, none)), n
        assert hooks(model) == 0
        assert same(step_anew(model, optimizer), anew) or same(found, both)


def test_a_block_whose_exit_never_began_is_cleaned_up(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = after_two("O2")

    def exit_with_self(self: ScaledLoss, *_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ScaledLoss, "__exit__", exit_with_self)
        with pytest.raises(KeyboardInterrupt):
            backward(model, optimizer, 1)
    assert same(step_anew(model, optimizer), step_anew(*made("O2")))
    assert hooks(model) == 0


# --- gradients that somebody else is to see


def test_a_hook_of_the_user_sees_its_gradient(moved: Moved) -> None:
    """One that was there before, and one that comes in the block."""
    model, optimizer = after_two("O2")
    seen = []
    early = model[-2].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    before = len(moved.params)
    with xamp.scale_loss(loss_of(model, 1), optimizer) as scaled:
        late = model[-4].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        scaled.backward()
        assert len(moved.params) > before
        assert torch.equal(seen[0], model[-2].weight.grad)  # they stay there until the end
        assert torch.equal(seen[1], model[-4].weight.grad)
    assert hooks(model) == 2
    early.remove()
    late.remove()
    assert hooks(model) == 0


def test_a_hook_on_the_node_of_a_parameter_sees_its_gradient(moved: Moved) -> None:
    """Libraries that reduce gradients themselves once hung their hooks there."""
    model, optimizer = after_two("O2")
    seen = []
    nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in model.parameters()]
    for node, param in zip(nodes, model.parameters(), strict=True):
        node.register_hook(lambda *_, param=param: seen.append(param.grad))
    before = len(moved.params)
    backward(model, optimizer, 1)
    assert len(moved.params) > before
    assert len(seen) == len(nodes)
    assert all(grad is not None for grad in seen)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_gradients_with_a_graph_stay() -> None:
    def run() -> tuple[Any, Any]:
        model, optimizer = after_two("O2")
        with xamp.scale_loss(loss_of(model, 1), optimizer) as scaled:
            scaled.backward(create_graph=True)
            found = [p.grad for p in model.parameters()]
        return found, optimizer

    found, optimizer = run()
    assert all(g is not None and g.requires_grad for g in found)
    with without_moves():
        _, other = run()
    assert same([g.detach() for g in grads(optimizer)], [g.detach() for g in grads(other)])


class Embedded(nn.Module):
    """Its last operator is an embedding, whose gradient comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = net()
        self.first = nn.Embedding(64, WIDTH, sparse=True)
        self.last = nn.Embedding(64, WIDTH, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(self.first(x)) * self.last(x)
        return found


def test_sparse_gradients_stay(moved: Moved) -> None:
    def run(stays: bool) -> Any:
        model = Embedded()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        xamp.initialize(model, optimizer, "O2", verbosity=0, init_scale=256.0)
        for number in range(2):
            with xamp.scale_loss(model(torch.tensor([number, 3])).float().square().mean(), optimizer) as scaled:
                scaled.backward()
                assert model.last.weight.grad is not None
                assert (model.layers[2].weight.grad is not None) == (stays or number == 0)
        return [g.to_dense() for g in grads(optimizer)]

    found = run(stays=False)
    with without_moves():
        assert same(found, run(stays=True))


# --- models and loops of other shapes


class Shared(nn.Module):
    """Each layer runs twice; ``how`` it is checkpointed."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layers = net()
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            if self.how == "plain":
                x = self.layers(x)
            else:
                x = x.requires_grad_() if x.is_leaf else x
                for start in range(0, len(self.layers), 4):
                    part = self.layers[start : start + 4]
                    x = checkpoint(part, x, use_reentrant=self.how == "reentrant")
        return x


@with_masters
@pytest.mark.parametrize("how", ["plain", "not reentrant", "reentrant"])
def test_shared_and_checkpointed_parameters(level: str, how: str, moved: Moved) -> None:
    def run() -> list[Any]:
        model, optimizer = made(level, Shared(how))
        for number in range(3):
            backward(model, optimizer, number)
        return grads(optimizer)

    found = run()
    assert moved.take() > 0
    with without_moves():
        expected = run()
    if how == "reentrant":  # each use is a backward of its own; two of them add up in fp32 here, in 16 bits there
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3 if level == "O5" else 2e-4)
    else:
        assert same(found, expected)


def test_two_backwards_in_one_block(moved: Moved) -> None:
    def run() -> list[Any]:
        model, optimizer = after_two("O2")
        with xamp.scale_loss(loss_of(model, 1), optimizer) as scaled:
            scaled.backward(retain_graph=True)
            scaled.backward()
        return grads(optimizer)

    found = run()
    assert moved.take() > 0
    with without_moves():
        expected = run()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=1e-6)


@with_masters
@pytest.mark.parametrize("whose", ["optimizer", "model"])
@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_inside_of_the_block(level: str, whose: str, to_none: bool) -> None:
    model, optimizer = after_two(level)
    with xamp.scale_loss(loss_of(model, 1), optimizer) as scaled:
        scaled.backward()
        (optimizer if whose == "optimizer" else model).zero_grad(set_to_none=to_none)
        loss_of(model, 2).mul(256.0 if level == "O2" else 1.0).backward()
    twin, other = made(level)
    backward(twin, other, 2)
    for a, b in zip(grads(optimizer), grads(other), strict=True):
        torch.testing.assert_close(a, b)
    optimizer.step()
    assert outcome(optimizer) == "APPLIED"


@pytest.mark.parametrize("whose", ["optimizer", "model"])
def test_zero_grad_inside_of_the_block_forgets_an_early_overflow(whose: str) -> None:
    model, optimizer = after_two("O2")
    handle = model[-2].weight.register_hook(lambda grad: torch.full_like(grad, torch.inf))
    with xamp.scale_loss(loss_of(model, 1), optimizer) as scaled:
        scaled.backward(retain_graph=True)
        handle.remove()
        (optimizer if whose == "optimizer" else model).zero_grad()
        scaled.backward()
    optimizer.step()
    assert outcome(optimizer) == "APPLIED"
    assert xamp.loss_scale(optimizer) == 256.0


def test_a_step_after_gradients_that_were_cleared_in_the_block_is_none() -> None:
    model, optimizer = after_two("O2")
    was = [p.detach().clone() for p in xamp.master_params(optimizer)]
    with xamp.scale_loss(loss_of(model, 1), optimizer) as scaled:
        scaled.backward()
        optimizer.zero_grad()
    optimizer.step()
    assert xamp.session(optimizer).stats.applied == 0
    assert same(was, [p.detach() for p in xamp.master_params(optimizer)])


def test_gradients_that_the_body_takes_from_the_model_are_an_error() -> None:
    """A part of them has moved: the rest alone would be lost."""
    model, optimizer = after_two("O2")
    with (  # noqa: PT012
        pytest.raises(StateError, match="took gradients from the model after a part of them had moved"),
        xamp.scale_loss(loss_of(model, 1), optimizer) as scaled,
    ):
        scaled.backward()
        for param in model.parameters():
            param.grad = None
    assert hooks(model) == 0
    assert all(p.grad is None for p in (*model.parameters(), *xamp.master_params(optimizer)))
    assert same(step_anew(model, optimizer), step_anew(*made("O2")))


def test_after_an_interrupted_move_that_the_body_hides_zero_grad_begins_anew(moved: Moved) -> None:
    model, optimizer = after_two("O2")
    moved.interrupts = True
    with xamp.scale_loss(loss_of(model, 1), optimizer) as scaled:
        with pytest.raises(KeyboardInterrupt):
            scaled.backward(retain_graph=True)
        optimizer.zero_grad()
        scaled.backward()
    twin, other = made("O2")
    backward(twin, other, 1)
    assert same(grads(optimizer), grads(other))


def test_gradients_that_moved_count_though_no_others_came_at_the_end() -> None:
    """``zero_grad`` in the block, then a backward of which everything moves early."""
    model, optimizer = after_two("O2")
    was = [p.detach().clone() for p in xamp.master_params(optimizer)]
    with xamp.scale_loss(loss_of(model, 1), optimizer) as scaled:
        optimizer.zero_grad()
        scaled.backward(retain_graph=True)
        early = xamp.session(optimizer).engine.states[0].gradients._early
        assert early is not None
        early._move()
        assert all(p.grad is None for p in model.parameters())
    optimizer.step()
    assert not same(was, [p.detach() for p in xamp.master_params(optimizer)])


@with_masters
@pytest.mark.parametrize("losses", [1, 2])
def test_two_optimizers_and_two_losses(level: str, losses: int, moved: Moved) -> None:
    def run() -> list[Any]:
        models = [net(), net()]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        xamp.initialize(models, optimizers, level, verbosity=0, init_scale=256.0, num_losses=losses)
        for number in range(4):
            loss = loss_of(models[0], number) + loss_of(models[1], number + 1)
            if number == 3:
                loss = loss * 1e38
            with xamp.scale_loss(loss, optimizers, loss_id=number % losses) as scaled:
                scaled.backward()
            backward(models[1], optimizers[1], number + 2, loss_id=number % losses)
            if number != 2:
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        assert hooks(models[0]) == hooks(models[1]) == 0
        scales = [torch.tensor(xamp.loss_scale(models[0], index)) for index in range(losses)]
        return [*scales, *(p.detach().clone() for model in models for p in model.parameters())]

    found = run()
    assert moved.take() > 0
    with without_moves():
        assert same(found, run())


def test_another_thread_ends_the_moves(moved: Moved) -> None:
    """Two threads would take gradients away from under each other."""
    model, optimizer = after_two("O2")
    before = len(moved.params)
    with xamp.scale_loss(loss_of(model, 1), optimizer) as scaled:
        thread = threading.Thread(target=lambda: scaled.backward(retain_graph=True))
        thread.start()
        thread.join()
        scaled.backward()
    assert len(moved.params) == before


def test_threads_whose_backwards_run_at_once_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    xamp.initialize(model, optimizer, "O5", verbosity=0)
    x = torch.randn(4, 256)
    for _ in range(5):
        optimizer.zero_grad()
        with xamp.scale_loss(model(x).float().mean(), optimizer) as scaled:
            scaled.backward()
        one = [g.clone() for g in grads(optimizer)]
        losses = [model(x).float().mean() for _ in range(4)]
        with xamp.scale_loss(losses[0], optimizer):  # the scale of O5 is 1
            threads = [threading.Thread(target=loss.backward) for loss in losses]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        for all_of_them, single in zip(grads(optimizer), one, strict=True):
            torch.testing.assert_close(all_of_them, 5 * single, rtol=0.02, atol=1e-6)


def test_another_stream_moves_nothing(moved: Moved, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = after_two("O2")
    current = object()
    monkeypatch.setattr(torch.cpu, "current_stream", lambda _: current)
    before = len(moved.params)
    with xamp.scale_loss(loss_of(model, 1), optimizer) as scaled:
        monkeypatch.setattr(torch.cpu, "current_stream", lambda _: object())
        scaled.backward()
        assert len(moved.params) == before
    monkeypatch.undo()


def test_parameters_much_smaller_than_others_are_left_to_the_end() -> None:
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 64 * WIDTH, bias=False))
    model, optimizer = made("O2", layers)
    backward(model, optimizer)
    with xamp.scale_loss(loss_of(model, 1), optimizer) as scaled:
        assert [bool(p._post_accumulate_grad_hooks) for p in model.parameters()] == [False, False, True]
        scaled.backward()
    assert hooks(model) == 0


def test_frozen_parameters_are_left_alone() -> None:
    model, optimizer = after_two("O2")
    model[0].weight.requires_grad_(False)
    backward(model, optimizer, 1)
    assert hooks(model) == 0
    assert all(p.grad is not None for p in xamp.master_params(optimizer))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_under_compiled_autograd_gradients_move_at_the_end(moved: Moved) -> None:
    def run(compiled: bool) -> list[Any]:
        model, optimizer = after_two("O2")
        before = len(moved.params)
        with xamp.scale_loss(loss_of(model, 1), optimizer) as scaled:
            with (
                torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager"))
                if compiled
                else contextlib.nullcontext()
            ):
                scaled.backward()
            assert len(moved.params) == before
        assert hooks(model) == 0
        return grads(optimizer)

    compiling.forget()
    with without_moves():
        expected = run(compiled=False)
    assert same(run(compiled=True), expected)


# --- nothing is left behind


@with_masters
def test_nothing_is_left_on_the_parameters(level: str) -> None:
    model, optimizer = after_two(level)
    with xamp.scale_loss(loss_of(model, 1), optimizer) as scaled:
        assert hooks(model) == 2 * LAYERS
        scaled.backward()
    assert [p._post_accumulate_grad_hooks for p in model.parameters()] == [None] * 2 * LAYERS
    assert xamp.session(optimizer).engine.states[0].gradients._early is None
    twin = pickle.loads(pickle.dumps(model))
    assert same([*twin.state_dict().values()], [*model.state_dict().values()])
    copy.deepcopy(model)


def test_the_hooks_keep_nothing_alive() -> None:
    model, optimizer = after_two("O2")
    params = list(model.parameters())
    engine = xamp.session(optimizer).engine
    known: list[weakref.ReferenceType[Any]] = [*map(weakref.ref, (optimizer, engine, engine.states[0].gradients))]
    block = xamp.scale_loss(loss_of(model, 1), optimizer)
    block.__enter__()
    assert hooks(model) == 2 * LAYERS
    del block, optimizer, engine, model
    gc.collect()
    assert [ref() for ref in known] == [None, None, None]
    sum(p.sum() for p in params).backward()  # the hooks do nothing
    assert all(p.grad is not None for p in params)
