"""Sparse gradients.

Covers: xamp.scaling.unscale, xamp.scaling.gradients.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lanes import Lane
from stepping import (
    SCALED,
    Dot,
    assert_follows,
    assert_same,
    at,
    inputs,
    outcome,
    picture,
    run_backward,
    stepped,
    twin,
)
from torch import nn
from torch.optim import SGD, Optimizer, SparseAdam

import xamp

each_level = pytest.mark.parametrize("level", SCALED)
each_fused = pytest.mark.parametrize("fused", [False, "auto"])


def initialize(model: Any, optimizer: Any, level: str, **options: Any) -> Any:
    return xamp.initialize(model, optimizer, **{"init_scale": 64.0, **at(level), **options})


class Words(nn.Module):
    """An embedding with sparse gradients, and a dense parameter."""

    def __init__(self, functional: bool = False) -> None:
        super().__init__()
        self.functional = functional
        self.table = nn.Embedding(8, 4, sparse=not functional)
        self.head = Dot()

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        table = self.table.weight
        rows = nn.functional.embedding(ids, table, sparse=True) if self.functional else self.table(ids)
        loss: torch.Tensor = (rows * x[:4]).sum() + self.head(x)
        return loss


def words_step(
    model: Any, optimizers: list[Optimizer], ids: list[torch.Tensor], xs: list[torch.Tensor], scaled: bool
) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    for i, x in zip(ids, xs, strict=True):
        loss = model(i, x)
        run_backward(loss, optimizers) if scaled else loss.backward()
    for optimizer in optimizers:
        optimizer.step()


SPARSE: dict[str, Any] = {
    "SGD": lambda m: [SGD(m.parameters(), lr=0.125)],
    "SparseAdam": lambda m: [SparseAdam(m.table.parameters(), lr=0.125), SGD(m.head.parameters(), lr=0.125)],
}


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
@pytest.mark.parametrize("make", SPARSE.values(), ids=SPARSE.keys())
@pytest.mark.parametrize("functional", [False, True], ids=["nn.Embedding", "F.embedding"])
@pytest.mark.parametrize("options", [{"init_scale": 64.0}, {"loss_scale": 1000.0}], ids=["64", "1000"])
def test_sparse_gradients_train_as_in_fp32(
    lane: Lane, level: str, make: Any, functional: bool, options: dict[str, Any]
) -> None:
    """With ids that come twice in a batch, accumulated over two batches."""
    model: Any = Words(functional).to(lane.device)
    reference = twin(model)
    plain = make(reference)
    options = {} if level in ("O0", "O4", "O5") else options
    model, optimizers = initialize(model, make(model), level, **options)
    ids = [torch.tensor(i, device=lane.device) for i in ([1, 3, 3], [0, 7], [5], [1, 1], [2, 3], [3])]
    xs = inputs(6, lane)
    for step in range(3):
        part = slice(2 * step, 2 * step + 2)
        words_step(model, optimizers, ids[part], xs[part], scaled=True)
        words_step(reference, plain, ids[part], xs[part], scaled=False)
    rough = 4e-3 if level == "O2" and "loss_scale" in options else 2e-6
    for optimizer, other in zip(optimizers, plain, strict=True):
        torch.testing.assert_close(stepped(optimizer), stepped(other), rtol=rough, atol=rough)


@each_level
@pytest.mark.parametrize("make", SPARSE.values(), ids=SPARSE.keys())
@pytest.mark.parametrize("functional", [False, True], ids=["nn.Embedding", "F.embedding"])
@pytest.mark.parametrize("spoilt", ["table", "head"])
def test_an_overflow_among_sparse_gradients_moves_nothing(
    lane: Lane, level: str, make: Any, functional: bool, spoilt: str
) -> None:
    model: Any = Words(functional).to(lane.device)
    model, optimizers = initialize(model, make(model), level)
    ids, xs = torch.tensor([1, 3, 3], device=lane.device), inputs(2, lane)
    words_step(model, optimizers, [ids], xs[:1], scaled=True)
    still = picture(model, *optimizers)
    for optimizer in optimizers:
        optimizer.zero_grad()
    with xamp.scale_loss(model(ids, xs[1]), optimizers) as scaled:
        scaled.backward()
        lane.overflow_(model.table.weight.grad._values() if spoilt == "table" else model.head.a.grad)
    hit = optimizers[0] if spoilt == "table" else optimizers[-1]
    hit.step()
    assert_same(picture(model, *optimizers), still)
    assert outcome(hit) == "SKIPPED"
    assert xamp.loss_scale(hit) == 32.0


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_many_half_gradients_of_one_word_are_summed_without_overflowing(lane: Lane, level: str) -> None:
    """64 rows of 1024 times the scale fit in fp16 each; their sum does not, but it does in fp32."""
    model: Any = nn.Embedding(4, 2, sparse=True).to(lane.device)
    reference = twin(model)
    plain = SGD(reference.parameters(), lr=0.125)
    model, optimizer = initialize(model, SGD(model.parameters(), lr=0.125), level, init_scale=1024.0)
    ids = torch.ones(128, dtype=torch.long, device=lane.device)
    run_backward(model(ids).sum(), optimizer)
    optimizer.step()
    reference(ids).sum().backward()
    plain.step()
    assert outcome(optimizer) == "APPLIED"
    assert_follows(optimizer, reference)


def test_half_gradients_of_one_word_that_overflow_only_when_they_are_summed_skip_the_step(lane: Lane) -> None:
    """Without masters the optimizer sums them in half precision. torch.amp sums them before it looks, too."""
    model: Any = nn.Embedding(4, 2, sparse=True).to(lane.device)
    told: dict[str, Any] = {"master_weights": False, "loss_scale": "dynamic", "init_scale": 1024.0}
    model, optimizer = initialize(model, SGD(model.parameters(), lr=0.125), "O2", **told)
    still = picture(model)
    run_backward(model(torch.ones(128, dtype=torch.long, device=lane.device)).sum(), optimizer)
    optimizer.step()
    assert outcome(optimizer) == "SKIPPED"
    assert xamp.loss_scale(optimizer) == 512.0
    assert_same(picture(model), still)
