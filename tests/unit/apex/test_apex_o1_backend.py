"""``xamp.initialize(backend="apex")``: Apex's lists in the regions of a session, and nothing anywhere else.

Covers: xamp.apex._rules, xamp.apex._regions, xamp.apex._patches.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from typing import Any

import compiling
import pytest
import torch
import torch.nn.functional as F
from apex_casts import BF16, FP16, FP32, attributes, casts
from torch import nn
from torch.utils.checkpoint import checkpoint

import xamp
from xamp.apex import _patches
from xamp.errors import UnsupportedPolicy

square = torch.linspace(-1.0, 1.0, 16).reshape(4, 4)


@pytest.fixture(autouse=True)
def _nothing_stays_installed() -> Iterator[None]:
    gc.collect()
    assert not _patches.is_installed()
    yield
    gc.collect()
    assert not _patches.is_installed()


class Sums(nn.Module):
    """What tells Apex's lists from a device's and from the portable table: methods, sums, ``.cpu()``, promotion."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.linear(x)
        return y, y.softmax(0), F.softmax(y, dim=0), y.sum(), y.cpu(), y + x, torch.einsum("ij,jk->ik", x, x), x.mm(x)


def start(level: str = "O1", **options: Any) -> nn.Module:
    model: nn.Module = xamp.initialize(
        Sums(), level=level, backend="apex", cast_model_outputs=False, verbosity=0, **options
    )
    return model


def given(lower: torch.dtype) -> list[torch.dtype]:
    return [lower, lower, FP32, FP32, FP32, FP32, FP32, lower]


@pytest.mark.parametrize(("level", "lower"), [("O1", FP16), ("O4", BF16)])
def test_dtypes_are_those_of_apex(level: str, lower: torch.dtype) -> None:
    model = start(level)
    assert [y.dtype for y in model(square)] == given(lower)
    with casts(lower):
        assert [y.dtype for y in Sums()(square)] == given(lower)
    assert xamp.session(model).backend.name == "apex"
    xamp.session(model).close()


def test_functions_are_inert_outside() -> None:
    before = attributes()
    model = start()
    assert torch.mm(square, square).dtype is FP32
    assert (square.half() * square.bfloat16()).dtype is FP32
    assert square.half().exp_().dtype is FP16
    assert nn.Linear(4, 4)(square).dtype is FP32
    xamp.session(model).close()
    after = attributes()
    assert all(after[key] is value for key, value in before.items() if key in after)
    assert [y.dtype for y in model(square)] == [FP32] * 8


def test_functions_are_put_back_when_the_model_goes() -> None:
    model = start()
    assert _patches.is_installed()
    del model
    gc.collect()
    assert not _patches.is_installed()


def test_sessions_and_handles_have_nothing_to_do_with_each_other() -> None:
    model = start("O4")
    with casts(FP16):
        assert torch.mm(square, square).dtype is FP16
        assert [y.dtype for y in model(square)] == given(BF16)
        beside = xamp.initialize(nn.Linear(4, 4), level="O4", verbosity=0)
        assert beside(square.half().float()).dtype is FP32
    assert torch.mm(square, square).dtype is FP32
    assert [y.dtype for y in model(square)] == given(BF16)


def test_copies_cast_and_outlive_the_session() -> None:
    model = start()
    made = copy.deepcopy(model)
    xamp.session(model).close()
    del model
    gc.collect()
    assert [y.dtype for y in made(square)] == given(FP16)


def test_other_levels_cast_parameters_and_replace_nothing() -> None:
    model = start("O2")
    assert not _patches.is_installed()
    assert model(square)[0].dtype is FP16


def test_training_steps_and_the_cache_is_not_stale() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    xamp.initialize(model, optimizer, level="O1", backend="apex", loss_scale=128.0, verbosity=0)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(square).pow(2).sum()
        with xamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_backward_recomputes_is_cast(reentrant: bool) -> None:
    seen: list[torch.dtype] = []

    class Block(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=reentrant)  # type: ignore[no-any-return]

        def inner(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(x.half().cumsum(0).dtype)
            return super().forward(x)

    model = xamp.initialize(Block(4, 4), level="O1", backend="apex", verbosity=0)
    model(square.clone().requires_grad_()).sum().backward()
    assert seen == [FP32, FP32]


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize(("level", "lower"), [("O1", FP16), ("O4", BF16)])
def test_compiled(level: str, lower: torch.dtype, compiler: str) -> None:
    compiling.forget()
    model = start(level)
    made = torch.compile(model, backend=compiler, fullgraph=True)
    assert [y.dtype for y in made(square)] == given(lower)
    inside = torch.compile(lambda x: x.mm(x), backend=compiler)
    with xamp.session(model).autocast():
        assert inside(square).dtype is lower
    assert inside(square).dtype is FP32
    xamp.session(model).close()
    compiling.forget()


def test_another_op_policy_is_refused() -> None:
    with pytest.raises(UnsupportedPolicy, match="backend 'apex' has apex"):
        start(op_policy="native")
    with pytest.raises(
        UnsupportedPolicy, match=r"op_policy='portable'\): backend 'apex' has apex.*leave backend='apex' out"
    ):
        start(op_policy="portable")
    with pytest.raises(UnsupportedPolicy, match="backend 'cpu' has portable, native"):
        xamp.initialize(nn.Linear(4, 4), level="O1", backend="cpu", op_policy="apex", verbosity=0)


def test_it_is_in_no_list() -> None:
    assert "apex" not in {row.name for row in xamp.available_backends()}
    assert xamp.session(xamp.initialize(nn.Linear(4, 4), level="O0", verbosity=0)).backend.name != "apex"
