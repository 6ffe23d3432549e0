"""Tier optimizers, third part: sparse gradients."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer, SparseAdam

import xamp
from xamp.testing.exact import LR, Dot, assert_same, inputs, outcome, picture, run_backward, stepped
from xamp.testing.lane import Lane
from xamp.testing.tier import Tier, at_levels, scaled

__all__ = ["SparseGradients"]

SPARSE: dict[str, Any] = {
    "SGD": lambda words: [SGD(words.parameters(), lr=LR)],
    "SparseAdam": lambda words: [SparseAdam(words.table.parameters(), lr=LR), SGD(words.head.parameters(), lr=LR)],
}


class _Words(nn.Module):
    """An embedding with sparse gradients, and a :class:`Dot` with dense ones."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4, sparse=True)
        self.head = Dot()

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """(n,), (7,) -> ()."""
        loss: torch.Tensor = (self.table(ids) * x[:4]).sum() + self.head(x)
        return loss


class SparseGradients(Tier):
    """Sparse gradients train as in plain torch; an overflow changes nothing."""

    tier = "optimizers"

    @at_levels(lambda row: not row.steps_lower)
    @pytest.mark.parametrize("name", SPARSE)
    def test_sparse_gradients(self, lane: Lane, level: str, name: str) -> None:
        """Sparse gradients with a repeated index, accumulated over two batches, train as in fp32."""
        model, plain_model, optimizers, plain_optimizers = _start_words(lane, level, name)
        ids = [torch.tensor(each, device=lane.device) for each in ([1, 3, 3], [0, 7], [5], [1, 1], [2, 3], [3])]
        batches = list(zip(ids, inputs(6, lane), strict=True))
        for two in (batches[:2], batches[2:4], batches[4:]):
            _words_iterate(model, optimizers, two, scaled=True)
            _words_iterate(plain_model, plain_optimizers, two, scaled=False)
        for optimizer, plain in zip(optimizers, plain_optimizers, strict=True):
            torch.testing.assert_close(stepped(optimizer), stepped(plain), rtol=2e-6, atol=2e-6)

    @scaled
    @pytest.mark.parametrize("name", SPARSE)
    @pytest.mark.parametrize("spoilt", ["table", "head"])
    def test_sparse_overflow(self, lane: Lane, level: str, name: str, spoilt: str) -> None:
        """An overflow in sparse gradients, or in dense ones beside them, changes nothing."""
        model, _, optimizers, _ = _start_words(lane, level, name)
        ids, (first, second) = torch.tensor([1, 3, 3], device=lane.device), inputs(2, lane)
        _words_iterate(model, optimizers, [(ids, first)], scaled=True)
        still = picture(model, *optimizers)
        for optimizer in optimizers:
            optimizer.zero_grad()
        with xamp.scale_loss(model(ids, second), optimizers) as loss:
            loss.backward()
            lane.overflow_(model.table.weight.grad._values() if spoilt == "table" else model.head.first.weight.grad)
        hit = optimizers[0] if spoilt == "table" else optimizers[-1]
        hit.step()
        assert outcome(hit) == "SKIPPED"
        assert_same(picture(model, *optimizers), still)
        assert xamp.loss_scale(hit) == 32.0


def _start_words(lane: Lane, level: str, name: str) -> tuple[Any, Any, list[Optimizer], list[Optimizer]]:
    """A model with an embedding, its twin, and the optimizers of each."""
    lane.need(level)
    model = _Words().to(lane.device)
    plain_model = copy.deepcopy(model)
    optimizers, plain_optimizers = SPARSE[name](model), SPARSE[name](plain_model)
    xamp.initialize(model, optimizers, level=level, init_scale=64.0, verbosity=0)
    return model, plain_model, optimizers, plain_optimizers


def _words_iterate(
    model: Any, optimizers: Sequence[Optimizer], batches: Sequence[tuple[torch.Tensor, torch.Tensor]], scaled: bool
) -> None:
    """Run one iteration over several batches of indices and inputs; ``scaled``: under xamp."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    for ids, x in batches:
        loss = model(ids, x)
        run_backward(loss, list(optimizers)) if scaled else loss.backward()
    for optimizer in optimizers:
        optimizer.step()
