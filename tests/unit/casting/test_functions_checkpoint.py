"""Registered functions in what activation checkpointing recomputes: in xamp's regions as in forward, elsewhere not."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lanes import Lane
from table_ops import CHECKPOINTING, checkpointing
from torch import nn
from torch.utils.checkpoint import checkpoint

import xamp
from xamp.casting import node_numbers, registered
from xamp.casting.region_mark import mark_of

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LOWER = {"O1": FP16, "O4": BF16}
# Whether the checkpoint, and the one within it, is a reentrant one; None: no checkpoint.
SINGLE: dict[str, tuple[bool, ...]] = {"plain": (), "saved": (False,), "reentrant": (True,)}
NESTED: dict[str, tuple[bool, ...]] = {
    f"{'reentrant' if outer else 'saved'} in {'reentrant' if inner else 'saved'}": (inner, outer)
    for outer in (True, False)
    for inner in (True, False)
}


@pytest.fixture(params=CHECKPOINTING, autouse=True)
def _registrations(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """softmax in the lower dtype, which autocast gives in fp32."""
    monkeypatch.setenv("XAMP_DEVICE", "cpu")
    xamp.register_half_function(F, "softmax")
    checkpointing(request.param, monkeypatch)
    yield
    registered._unregister_all()


class Net(nn.Module):
    """Runs its body in checkpoints and notes the dtype of each softmax, recomputed ones included."""

    def __init__(self, checkpoints: tuple[bool, ...] = ()) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 4)
        self.checkpoints = checkpoints
        self.dtypes: list[torch.dtype] = []
        self.kept: torch.Tensor | None = None

    def body(self, x: torch.Tensor) -> torch.Tensor:
        weights = F.softmax(self.first(x).float(), -1)
        self.dtypes.append(weights.dtype)
        made: torch.Tensor = self.second(torch.exp(weights).to(self.second.weight.dtype))
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        run: Callable[..., Any] = self.body
        for reentrant in self.checkpoints:
            run = _checkpointed(run, reentrant)
        made: torch.Tensor = run(x * 1.0)
        self.kept = made
        return made


def _checkpointed(run: Callable[..., Any], reentrant: bool) -> Callable[..., Any]:
    return lambda x: checkpoint(run, x, use_reentrant=reentrant)


def net(checkpoints: tuple[bool, ...], kind: str = "cpu") -> Net:
    torch.manual_seed(1)
    return Net(checkpoints).to(kind)


def batch(kind: str = "cpu") -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(2)).to(kind).requires_grad_()


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    found = [p.grad for p in model.parameters()] + [x.grad]
    assert all(g is not None and bool(g.isfinite().all()) for g in found)
    return [g for g in found if g is not None]


def assert_equal(mine: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    for a, b in zip(mine, other, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def managed(level: str, checkpoints: tuple[bool, ...], scaled: bool, kind: str) -> tuple[Net, list[torch.Tensor]]:
    model, x = net(checkpoints, kind), batch(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    xamp.initialize(model, optimizer, level=level, init_scale=256.0, verbosity=0)
    loss = model(x).square().mean()
    if scaled:
        with xamp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
    else:
        loss.backward()
    return model, gradients(model, x)


@pytest.mark.parametrize("scaled", [True, False], ids=["scale_loss", "backward"])
@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
@pytest.mark.parametrize("checkpoints", (SINGLE | NESTED).values(), ids=SINGLE | NESTED)
def test_a_checkpointed_model_has_the_gradients_of_the_plain_one(
    level: str, checkpoints: tuple[bool, ...], scaled: bool, lane: Lane
) -> None:
    if level not in lane.can.levels:
        pytest.skip(f"{lane} cannot run {level}")
    kind = lane.device.type
    model, mine = managed(level, checkpoints, scaled, kind)
    plain, expected = managed(level, (), scaled, kind)
    assert_equal(mine, expected)
    assert set(model.dtypes) == set(plain.dtypes) == {LOWER.get(level, FP32)}
    assert len(model.dtypes) > 1 or not checkpoints


@pytest.mark.parametrize("checkpoints", (SINGLE | NESTED).values(), ids=SINGLE | NESTED)
@pytest.mark.parametrize("foreign", [False, True], ids=["xamp.autocast", "torch.autocast"])
def test_a_block_that_knows_no_outputs_counts_too(checkpoints: tuple[bool, ...], foreign: bool) -> None:
    found = []
    for nesting in (checkpoints, ()):
        model, x = net(nesting), batch()
        with torch.autocast("cpu", dtype=BF16) if foreign else xamp.autocast(dtype=BF16):
            model(x)
        assert model.kept is not None
        model.kept.float().square().mean().backward()
        found.append(gradients(model, x))
        assert set(model.dtypes) == {FP32 if foreign else BF16}
    assert_equal(*found)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_foreign_model_in_the_same_backward_is_left_alone(reentrant: bool) -> None:
    """It runs before a managed model, and after one, under a torch.autocast of its own."""
    before, inner, after = net((reentrant,)), net((reentrant,)), net((reentrant,))
    xamp.initialize(inner, level="O4", verbosity=0)
    x = batch()
    with torch.autocast("cpu", dtype=BF16):
        hidden = before(x)
    hidden = inner(hidden)
    with torch.autocast("cpu", dtype=BF16):
        made = after(hidden)
    made.float().square().mean().backward()
    assert (before.dtypes, inner.dtypes, after.dtypes) == ([FP32] * 2, [BF16] * 2, [FP32] * 2)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_foreign_nested_checkpoint_does_not_take_over_the_answer(reentrant: bool) -> None:
    """Its inner backward is a graph task of its own, within one in which a managed model was recomputed before."""
    foreign, inner = net((reentrant, True)), net((True,))
    xamp.initialize(inner, level="O4", verbosity=0)
    with torch.autocast("cpu", dtype=BF16):
        hidden = foreign(batch())
    inner(hidden).square().mean().backward()
    assert set(inner.dtypes) == {BF16}
    assert set(foreign.dtypes) == {FP32}


def test_a_backward_that_failed_leaves_no_answer() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            raise KeyError("fails")

    fails: Callable[..., Any] = Fails.apply
    model = xamp.initialize(net((True,)), level="O4", verbosity=0)
    with pytest.raises(KeyError):
        model(fails(batch())).sum().backward()
    assert set(model.dtypes) == {BF16}
    foreign = net((True, True))
    with torch.autocast("cpu", dtype=BF16):
        made = foreign(batch())
    made.float().sum().backward()
    assert set(foreign.dtypes) == {FP32}


def test_a_loss_that_is_no_output_is_recomputed_alike() -> None:
    model = xamp.initialize(net((False,)), level="O4", verbosity=0)
    x = batch()
    with torch.no_grad():
        model(x)
    model(x)
    assert model.kept is not None
    model.kept.float().sum().backward()
    assert set(model.dtypes) == {BF16}


def test_a_model_within_a_checkpoint_enters_its_region_again() -> None:
    found = []
    for outer in (True, False):
        model, x = net((False,)), batch()
        xamp.initialize(model, level="O4", verbosity=0)
        made: torch.Tensor = checkpoint(model, x * 1.0, use_reentrant=True) if outer else model(x * 1.0)
        made.sum().backward()
        assert set(model.dtypes) == {BF16}
        found.append(gradients(model, x))
    assert_equal(*found)


def test_a_block_without_casts_is_recomputed_without_casts() -> None:
    class Blocked(Net):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            with xamp.disable_casts():
                x = self.first(x)
                self.dtypes.append(x.dtype)
            self.dtypes.append(F.softmax(x, -1).dtype)
            return x

    for reentrant in (True, False):
        model = xamp.initialize(Blocked((reentrant,)), level="O4", verbosity=0)
        model(batch()).sum().backward()
        assert model.dtypes[:3] == [FP32, BF16, FP32]  # torch may stop there


def test_threads_that_train_at_once_do_not_mix() -> None:
    """Numbers of nodes start anew in each thread, so that those of one are in ranges of the other."""
    seen: dict[str, set[torch.dtype]] = {"mine": set(), "foreign": set()}
    barrier = threading.Barrier(2)

    def work(name: str) -> None:
        model = net((True, False))
        if name == "mine":
            xamp.initialize(model, level="O4", verbosity=0)
        barrier.wait(10)
        for _ in range(30):
            if name == "mine":
                made = model(batch())
            else:
                with torch.autocast("cpu", dtype=BF16):
                    made = model(batch())
            made.float().sum().backward()
        seen[name] |= set(model.dtypes)

    threads = [threading.Thread(target=work, args=(name,)) for name in seen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert seen == {"mine": {BF16}, "foreign": {FP32}}


@pytest.mark.parametrize("checkpoints", NESTED.values(), ids=NESTED)
def test_a_thread_of_the_engine_looks_at_all_threads(
    checkpoints: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes on an accelerator are evaluated by a thread that made none of them; here a second thread stands for it."""
    model = xamp.initialize(net(checkpoints), level="O4", verbosity=0)
    losses = [model(batch()).sum() for _ in range(2)]
    before = len(model.dtypes)

    def backward(is_engine: bool) -> None:
        node_numbers._thread.is_engine = is_engine
        losses.pop().backward()

    thread = threading.Thread(target=backward, args=(True,))
    thread.start()
    thread.join(60)
    assert len(model.dtypes) > before
    assert set(model.dtypes) == {BF16}


# ---------------------------------------------------------------- what is kept


def test_ranges_are_kept_only_where_somebody_asked() -> None:
    asks, silent = net(()), nn.Linear(4, 4)
    for model in (asks, silent):
        xamp.initialize(model, level="O4", verbosity=0)
    kept: list[int] = []

    def work() -> None:
        for model in (silent, asks, silent, asks):
            model(batch()).sum()  # a node between the regions
            ranges = node_numbers._thread.ranges
            kept.append(0 if ranges is None else len(ranges._rows))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert kept == [0, 1, 1, 2]


def test_ranges_are_found_merged_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_numbers, "_RANGES", 4)
    ranges, one, other = node_numbers._Ranges(), mark_of("cpu", BF16), mark_of("cpu", FP16)
    ranges.add(2, 4, one)
    ranges.add(4, 6, one)  # follows at once
    ranges.add(6, 7, other)
    ranges.add(8, 9, other)
    ranges.add(8, 12, one)  # around it
    assert [ranges.find(number) for number in range(1, 14)] == [
        *(None, one, one, one, one, other, None),
        *(one, one, one, one, None, None),
    ]
    assert len(ranges._rows) == 3
    for first in range(20, 60, 2):
        ranges.add(first, first + 1, one)
    assert len(ranges._rows) <= 8
    assert ranges.find(58) is one
    assert ranges.find(2) is None


def test_an_answer_keeps_no_graph_alive() -> None:
    model = xamp.initialize(net((True, True)), level="O4", verbosity=0)
    model(batch()).sum().backward()
    answer = node_numbers._thread.answer
    assert answer is not None
    gc.collect()
    assert answer[0]() is None
