"""The portable op policy in what activation checkpointing recomputes: in backward as in forward."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from table_ops import (
    BF16,
    CHECKPOINTING,
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
from torch.utils.checkpoint import checkpoint

import xamp

CHECKPOINTS: dict[str, tuple[bool, ...]] = {
    "saved": (False,),
    "reentrant": (True,),
    **{
        f"{'reentrant' if outer else 'saved'} in {'reentrant' if inner else 'saved'}": (inner, outer)
        for outer in (True, False)
        for inner in (True, False)
    },
}
each_checkpoint = pytest.mark.parametrize("checkpoints", CHECKPOINTS.values(), ids=CHECKPOINTS)


@pytest.fixture(params=CHECKPOINTING, autouse=True)
def _checkpointing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointing(request.param, monkeypatch)


def trained(
    level: str, checkpoints: tuple[bool, ...], scaled: bool, op_policy: str = "portable"
) -> tuple[Many, list[torch.Tensor]]:
    model, x = many(checkpoints), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    xamp.initialize(model, optimizer, level=level, op_policy=op_policy, backend="cpu", init_scale=4.0, verbosity=0)
    loss = model(x).square().mean() / 64
    if scaled:
        with xamp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
    else:
        loss.backward()
    return model, gradients(model, x)


@each_checkpoint
@pytest.mark.parametrize("scaled", [True, False], ids=["scale_loss", "backward"])
@pytest.mark.parametrize("level", LOWER)
def test_gradients_are_those_of_the_plain_model(level: str, scaled: bool, checkpoints: tuple[bool, ...]) -> None:
    model, mine = trained(level, checkpoints, scaled)
    plain, wanted = trained(level, (), scaled)
    assert_equal(mine, wanted)
    assert noted(model) == noted(plain) == promised(level)
    assert all(len(found) > 1 for name, found in model.dtypes.items() if name != "last")  # none needs its result


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
    start(native, op_policy="native")
    start(portable)
    for model in (foreign, native, portable):
        model.zero_grad()
        model.dtypes.clear()
    x, y, z = batch(), batch(), batch()
    total = in_autocast(foreign, x).float().sum() + native(y).sum() + portable(z).sum()
    total.backward()
    assert_equal(gradients(foreign, x), before)
    assert noted(portable) == promised()
    assert noted(foreign) == noted(native)
    assert noted(native)["softmax"] == {BF16}
    assert noted(native)["exp"] == {BF16}
    assert_equal(gradients(native, y), trained_native(checkpoints))


def trained_native(checkpoints: tuple[bool, ...]) -> list[torch.Tensor]:
    model, x = start(many(checkpoints), op_policy="native"), batch()
    model(x).sum().backward()
    return gradients(model, x)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_native_model_within_a_portable_one(reentrant: bool) -> None:
    native, portable = many(), many()
    inner = start(native, op_policy="native", cast_model_outputs=False)

    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.own = inner, portable

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = checkpoint(lambda y: self.own(self.inner(y).float()), x * 1.0, use_reentrant=reentrant)
            return made  # type: ignore[no-any-return]

    start(Outer())(batch()).sum().backward()
    assert noted(portable) == promised()
    assert noted(native)["softmax"] == {BF16}
    assert len(native.dtypes["softmax"]) == 2


def test_backward_inside_foreign_autocast() -> None:
    portable, x = start(many((False,))), batch()
    loss = portable(x).sum()
    with torch.autocast("cpu", dtype=BF16):
        loss.backward()
    assert noted(portable) == promised()


@pytest.mark.parametrize("reentrant", [True, False])
def test_threads_that_train_at_once_do_not_mix(reentrant: bool) -> None:
    models = {"portable": many((reentrant,)), "native": many((reentrant,)), "foreign": many((reentrant,))}
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


def test_recomputed_values_are_those_of_forward() -> None:
    """A saved checkpoint compares shapes and dtypes itself; here the values are compared."""
    seen: list[torch.Tensor] = []

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.LSTM(8, 8)

        def body(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = F.softmax(self.layer(x)[0], -1)
            seen.append(made.detach())
            return made.square()  # without a later use, recomputation would end before it

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = checkpoint(self.body, x * 1.0, use_reentrant=False)
            return made

    start(Net(), "O1")(batch()).square().sum().backward()
    assert_equal(seen[:1], seen[1:])
    assert seen[0].dtype == FP32
