"""Refusals of ``initialize`` that no other test meets alone, and what looks like them and is taken.

Covers: xamp.sessions.checks, xamp.distributed.wrappers.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import xamp
from xamp.distributed import ddp as ddps
from xamp.distributed import ranks
from xamp.distributed.wrappers import StepQuorum, Wrappers
from xamp.errors import PolicyError, StateError

CAST = ["O2", "O3", "O5"]


def sgd(model: nn.Module, *more: Any) -> Any:
    return SGD([*model.parameters(), *more], lr=0.125)


def start(model: nn.Module, level: str = "O2") -> Any:
    optimizer = sgd(model)
    xamp.initialize(model, optimizer, level, verbosity=0)
    return optimizer


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_optimizer_of_another_session(level: str) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = start(model, level)
    with pytest.raises(StateError, match=r"this SGD was given to initialize before.*close\(\) first"):
        xamp.initialize(other, optimizer, level, verbosity=0)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_copy_of_a_managed_model(level: str) -> None:
    model = nn.Linear(2, 2)
    start(model, level)
    with pytest.raises(StateError, match="is a copy or a part of a model that initialize has set up"):
        xamp.initialize(copy.deepcopy(model), None, "O1", verbosity=0)


@pytest.mark.parametrize("level", CAST)
def test_a_parameter_of_another_session(level: str) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    other.weight = model.weight
    start(model, level)
    for second in ("O1", level):
        with pytest.raises(StateError, match="'weight' of Linear belongs to another session"):
            xamp.initialize(other, None, second, verbosity=0)


@pytest.mark.parametrize("level", CAST)
def test_a_model_with_a_part_in_another_session(level: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    start(model[0], "O1")
    with pytest.raises(StateError, match=r"a part of this Sequential \(Linear\) was given to initialize before"):
        xamp.initialize(model, None, level, verbosity=0)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_half_parameter_outside_of_the_models(level: str, dtype: torch.dtype) -> None:
    model = nn.Linear(2, 2)
    optimizer = sgd(model, nn.Parameter(torch.ones(2, dtype=dtype)))
    with pytest.raises(PolicyError, match="holds a half-precision parameter that is in no model"):
        xamp.initialize(model, optimizer, level, verbosity=0)


@pytest.mark.parametrize(("saturates", "averages", "shared"), [(False, True, 0), (True, True, 1), (False, False, 1)])
def test_flags_travel_where_gradients_do_not_tell(
    saturates: bool, averages: bool, shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DDP averages gradients, so an inf of one rank is in those of all; a saturated number is not."""
    calls: list[object] = []
    ddp: Any = nn.Identity()
    quorum = StepQuorum((), ["a group"], [weakref.ref(ddp)])
    monkeypatch.setattr(Wrappers, "quorum", lambda self, params: quorum)
    monkeypatch.setattr(ddps, "averages", lambda ddp: averages)
    monkeypatch.setattr(ranks, "share_overflow", lambda flags, group: calls.append(group))
    Wrappers([], None).agree(torch.zeros(1), [], saturates)
    assert len(calls) == shared
