"""Whole steps in fp8: captured, and by the memory that they take.

Covers: xamp.casting.fp8_linear, xamp.casting.fp8_regions.
"""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from graph_recorder import GraphRecorder
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import xamp
from xamp.registry import registry
from xamp.values.recipes import RECIPES

WIDTH, ROWS, LAYERS = 256, 512, 4


class Training:
    def __init__(self, recipe: str | None, width: int = 64, rows: int = 32) -> None:
        torch.manual_seed(0)
        layers = [part for _ in range(LAYERS) for part in (nn.Linear(width, width, bias=False), nn.Tanh())]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        fp8: Any = {} if recipe is None else {"fp8": recipe, "keep_bf16": ()}
        xamp.initialize(self.model, self.optimizer, level="O4", cast_model_outputs=False, verbosity=0, **fp8)
        self.x = torch.zeros(rows, width)

    def feed(self, number: int) -> None:
        self.x.copy_(torch.randn(self.x.shape, generator=torch.Generator().manual_seed(number)))

    def backward(self) -> None:
        loss = self.model(self.x).float().square().mean()
        with xamp.scale_loss(loss, self.optimizer) as scaled:
            scaled.backward()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.backward()
        self.optimizer.step()

    def weights(self) -> list[torch.Tensor]:
        return [p.detach() for p in self.model.parameters()]


@pytest.mark.parametrize("recipe", RECIPES)
def test_replays_of_a_captured_step_are_eager_steps(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales come from the values of the replay, not from those of the capture."""
    recorder = GraphRecorder()
    backend = type(registry.resolve("auto", "cpu"))
    monkeypatch.setattr(backend, "capture_check", lambda self, device: lambda: recorder.is_capturing)
    eager, replayed = Training(recipe), Training(recipe)
    for number in range(20):
        for each in (eager, replayed):
            each.feed(number)
            each.x.mul_(2.0 ** (number % 5))
        eager.step()
        if number == 1:
            with recorder.capture():
                replayed.step()
        elif 1 < number < 18:
            recorder.replay()
        else:
            replayed.step()
        assert all(map(torch.equal, eager.weights(), replayed.weights())), number


class Bytes(TorchDispatchMode):
    """Counts the bytes of storages that operators make, and the most that were alive at a time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(each, torch.Tensor):
                self._count(each.untyped_storage())
        return made

    def _count(self, storage: Any) -> None:
        place, size = storage._cdata, storage.nbytes()
        if place in self.known:
            return
        self.known.add(place)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._forget, place, size)

    def _forget(self, place: int, size: int) -> None:
        self.known.discard(place)
        self.now -= size


def most(recipe: str | None) -> int:
    training = Training(recipe, WIDTH, ROWS)
    training.feed(0)
    training.step()
    training.optimizer.zero_grad()
    with Bytes() as found:
        training.backward()
    at_most: int = found.most
    return at_most


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_takes_o4s_memory_and_the_fp8_copies_that_the_backward_needs(recipe: str) -> None:
    """Of each layer those of weight and input; of the one at work the other layouts, and the gradient's in both."""
    weight, rows = WIDTH * WIDTH, ROWS * WIDTH
    assert most(recipe) <= most(None) + LAYERS * (weight + rows) + weight + 3 * rows
