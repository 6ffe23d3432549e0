"""What activation checkpointing recomputes is cast as in forward: by the table, by registered functions, or not at all.

Covers: xamp.casting.recompute, xamp.casting.node_numbers, xamp.casting.registered, xamp.casting.active.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lanes import Lane
from table_ops import (
    BF16,
    CHECKPOINTING,
    FP16,
    FP32,
    LOWER,
    Many,
    assert_equal,
    batch,
    checkpointing,
    gradients,
    many,
    noted,
    promised,
    start,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import xamp
from xamp.casting import node_numbers, registered
from xamp.casting.region_mark import mark_of

# Whether the checkpoint, and the one within it, is a reentrant one; none: no checkpoint.
NESTED: dict[str, tuple[bool, ...]] = {
    f"{'reentrant' if outer else 'saved'} in {'reentrant' if inner else 'saved'}": (inner, outer)
    for outer in (True, False)
    for inner in (True, False)
}
CHECKPOINTS: dict[str, tuple[bool, ...]] = {"plain": (), "saved": (False,), "reentrant": (True,), **NESTED}
each_checkpoint = pytest.mark.parametrize("checkpoints", CHECKPOINTS.values(), ids=CHECKPOINTS)
each_kind = pytest.mark.parametrize("reentrant", [True, False])


@pytest.fixture(params=CHECKPOINTING, autouse=True)
def _checkpointing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    checkpointing(request.param, monkeypatch)
    yield
    registered._unregister_all()


@pytest.fixture
def _softmax() -> None:
    """In the lower dtype, which autocast and the table give in fp32."""
    xamp.register_half_function(F, "softmax")


by_registration = pytest.mark.usefixtures("_softmax")


def with_softmax(level: str) -> dict[str, set[torch.dtype]]:
    """What is promised where softmax is registered; what meets its result has no fp32 to be promoted to."""
    return promised(level) | {key: {LOWER[level]} for key in ("softmax", "addcmul")}


def softmaxes(model: Many) -> list[torch.dtype]:
    return model.dtypes["softmax"]


def trained(
    level: str, checkpoints: tuple[bool, ...], scaled: bool, kind: str = "cpu"
) -> tuple[Many, list[torch.Tensor]]:
    model, x = many(checkpoints).to(kind), batch().detach().to(kind).requires_grad_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    xamp.initialize(model, optimizer, level=level, init_scale=4.0, verbosity=0)
    loss = model(x).square().mean() / 64
    if scaled:
        with xamp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
    else:
        loss.backward()
    return model, gradients(model, x)


@pytest.mark.parametrize("registers", [True, False], ids=["registered", "table"])
@pytest.mark.parametrize("scaled", [True, False], ids=["scale_loss", "backward"])
@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
@each_checkpoint
def test_a_checkpointed_model_has_the_gradients_of_the_plain_one(
    checkpoints: tuple[bool, ...], level: str, scaled: bool, registers: bool, lane: Lane
) -> None:
    if level not in lane.can.levels:
        pytest.skip(f"{lane} cannot run {level}")
    if registers:
        xamp.register_half_function(F, "softmax")
    kind = lane.device.type
    model, mine = trained(level, checkpoints, scaled, kind)
    plain, wanted = trained(level, (), scaled, kind)
    assert_equal(mine, wanted)
    assert noted(model) == noted(plain)
    if kind == "cpu" and level in LOWER:
        assert noted(model) == (with_softmax if registers else promised)(level)
    elif registers:
        assert set(softmaxes(model)) == {LOWER.get(level, FP32)}
    if checkpoints:
        assert all(len(found) > 1 for name, found in model.dtypes.items() if name != "last")  # none needs its result


@by_registration
@each_checkpoint
@pytest.mark.parametrize("foreign", [False, True], ids=["xamp.autocast", "torch.autocast"])
def test_a_block_that_knows_no_outputs_counts_too(checkpoints: tuple[bool, ...], foreign: bool) -> None:
    found = []
    for nesting in (checkpoints, ()):
        model, x = many(nesting), batch()
        with torch.autocast("cpu", dtype=BF16) if foreign else xamp.autocast(dtype=BF16):
            made = model(x)
        made.float().square().mean().backward()
        found.append(gradients(model, x))
        assert set(softmaxes(model)) == {BF16}
        assert set(model.dtypes["exp"]) == {BF16 if foreign else FP32}
    assert_equal(*found)


def in_autocast(model: Many, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=BF16):
        return model(x)  # type: ignore[no-any-return]


@each_checkpoint
def test_a_native_session_and_foreign_code_train_beside_it(checkpoints: tuple[bool, ...]) -> None:
    """In one backward, in turn: each recomputes as it ran."""
    foreign, native, portable = many(checkpoints), many(checkpoints), many(checkpoints)
    x = batch()
    in_autocast(foreign, x).float().sum().backward()
    before = gradients(foreign, x)
    alone, y = start(many(checkpoints), op_policy="native"), batch()
    alone(y).sum().backward()
    start(native, op_policy="native")
    start(portable)
    for model in (foreign, native, portable):
        model.zero_grad()
        model.dtypes.clear()
    x, z, w = batch(), batch(), batch()
    total = in_autocast(foreign, x).float().sum() + native(z).sum() + portable(w).sum()
    total.backward()
    assert_equal(gradients(foreign, x), before)
    assert_equal(gradients(native, z), gradients(alone, y))
    assert noted(portable) == promised()
    assert noted(foreign) == noted(native)
    assert noted(native)["softmax"] == noted(native)["exp"] == {BF16}


@by_registration
@each_kind
def test_foreign_models_before_it_and_after_it_in_one_backward(reentrant: bool) -> None:
    """The first has a checkpoint in a checkpoint, whose backward is a graph task of its own."""
    before, inner, after = many((reentrant, True)), many((reentrant,)), many((reentrant,))
    start(inner)
    made = in_autocast(after, inner(in_autocast(before, batch())))
    made.float().square().mean().backward()
    for foreign in (before, after):
        assert set(foreign.dtypes["exp"]) == set(foreign.dtypes["layer_norm"]) == {BF16}
    assert noted(inner) == with_softmax("O4")


@each_kind
def test_a_native_model_within_a_portable_one(reentrant: bool) -> None:
    native, portable = many(), many()
    inner = start(native, op_policy="native", cast_model_outputs=False)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.own = inner, portable

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = checkpoint(lambda y: self.own(self.inner(y).float()), x * 1.0, use_reentrant=reentrant)
            return made  # type: ignore[no-any-return]

    start(Outer())(batch()).sum().backward()
    assert noted(portable) == promised()
    assert softmaxes(native) == [BF16, BF16]


def test_backward_inside_foreign_autocast() -> None:
    portable, x = start(many((False,))), batch()
    loss = portable(x).sum()
    with torch.autocast("cpu", dtype=BF16):
        loss.backward()
    assert noted(portable) == promised()


def test_a_backward_that_failed_leaves_no_answer() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            raise KeyError("fails")

    fails: Callable[..., Any] = Fails.apply
    model = start(many((True,)))
    with pytest.raises(KeyError):
        model(fails(batch())).sum().backward()
    assert noted(model) == promised()
    foreign = many((True, True))
    in_autocast(foreign, batch()).float().sum().backward()
    assert set(foreign.dtypes["exp"]) == {BF16}


def test_a_loss_that_is_no_output_is_recomputed_alike() -> None:
    class Keeps(Many):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            self.kept = super().body(x)
            return self.kept

    torch.manual_seed(1)
    model, x = start(Keeps((False,))), batch()
    with torch.no_grad():
        model(x)
    model(x)
    model.kept.float().sum().backward()
    assert noted(model) == promised()


def test_a_model_within_a_checkpoint_enters_its_region_again() -> None:
    found = []
    for outer in (True, False):
        model, x = start(many((False,))), batch()
        made: torch.Tensor = checkpoint(model, x * 1.0, use_reentrant=True) if outer else model(x * 1.0)
        made.sum().backward()
        assert noted(model) == promised()
        found.append(gradients(model, x))
    assert_equal(*found)


@by_registration
@each_kind
def test_a_block_without_casts_is_recomputed_without_casts(reentrant: bool) -> None:
    class Blocked(Many):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            with xamp.disable_casts():
                x = self.note(seen=self.first(x))
            self.note(seen=F.softmax(x, -1))
            return x

    model = start(Blocked((reentrant,)))
    model(batch()).sum().backward()
    assert model.dtypes["seen"][:3] == [FP32, BF16, FP32]  # torch may stop there


@each_kind
def test_threads_that_train_at_once_do_not_mix(reentrant: bool) -> None:
    """Numbers of nodes start anew in each thread, so that those of one are in ranges of the others."""
    checkpoints = (True, reentrant)
    models = {"portable": many(checkpoints), "native": many(checkpoints), "foreign": many(checkpoints)}
    start(models["portable"])
    start(models["native"], op_policy="native")
    barrier = threading.Barrier(len(models))

    def work(name: str) -> None:
        for _ in range(15):
            barrier.wait(60)
            x = batch()
            made = in_autocast(models[name], x) if name == "foreign" else models[name](x)
            made.float().sum().backward()

    threads = [threading.Thread(target=work, args=(name,)) for name in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert noted(models["portable"]) == promised()
    assert noted(models["native"]) == noted(models["foreign"])
    assert noted(models["foreign"])["softmax"] == {BF16}


@pytest.mark.parametrize("checkpoints", NESTED.values(), ids=NESTED)
def test_a_thread_of_the_engine_looks_at_all_threads(checkpoints: tuple[bool, ...]) -> None:
    """Nodes on an accelerator are evaluated by a thread that made none of them; here a second thread stands for it."""
    model = start(many(checkpoints))
    losses = [model(batch()).sum() for _ in range(2)]
    before = len(softmaxes(model))

    def backward() -> None:
        node_numbers._thread.is_engine = True
        losses.pop().backward()

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join(60)
    assert len(softmaxes(model)) > before
    assert noted(model) == promised()


# ---------------------------------------------------------------- what is kept


@by_registration
def test_ranges_are_kept_only_where_somebody_asked() -> None:
    asks, silent = start(many()), start(nn.Linear(8, 8))
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
    model = start(many((True, True)))
    model(batch()).sum().backward()
    answer = node_numbers._thread.answer
    assert answer is not None
    gc.collect()
    assert answer[0]() is None
