"""What a backend may say of storage formats and optimizers of its device's own, by a stand-in on the CPU.

Covers: xamp.contract, xamp.registry.fused_classes, xamp.scaling.masters.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peculiar_device import PECULIAR
from torch import nn

import xamp
from xamp.errors import StateError, UnsupportedPolicy
from xamp.registry import registry


class JoinedSGD(torch.optim.SGD):
    is_joined = False


@pytest.fixture(autouse=True)
def _peculiar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "REGISTRY", registry.Registry((PECULIAR,), group=None))


def make(cls: Any = torch.optim.SGD, columns: int = 3, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Linear(columns, 4)
    return model, cls(model.parameters(), lr=0.125, **options)


def iterate(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    with xamp.scale_loss(model(torch.ones(1, model.in_features)).float().sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_what_casts_refuses_before_anything_changes(level: str) -> None:
    model, optimizer = make(JoinedSGD)
    with pytest.raises(UnsupportedPolicy, match=rf"initialize\(level='{level}'\): JoinedSGD is cast\."):
        xamp.initialize(model, optimizer, level, verbosity=0)
    assert model.weight.dtype == torch.float32
    assert type(optimizer) is JoinedSGD


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_a_step_is_refused_as_long_as_it_would_be_wrong(level: str) -> None:
    model, optimizer = make(JoinedSGD)
    xamp.initialize(model, optimizer, level, verbosity=0)
    iterate(model, optimizer)
    before = model.weight.detach().clone()
    optimizer.is_joined = True
    with pytest.raises(StateError, match=r"optimizer\.step\(\): JoinedSGD is stale\."):
        iterate(model, optimizer)
    assert torch.equal(model.weight, before)
    optimizer.is_joined = False
    iterate(model, optimizer)
    assert not torch.equal(model.weight, before)


def test_a_grad_scaler_refuses_it_too() -> None:
    model, optimizer = make(JoinedSGD)
    scaler = xamp.GradScaler()
    optimizer.is_joined = True
    scaler.scale(model(torch.ones(1, 3)).sum()).backward()
    with pytest.raises(StateError, match="JoinedSGD is stale"):
        scaler.step(optimizer)


@pytest.mark.parametrize("columns", [2, 3])
def test_no_fused_form_is_chosen_for_what_is_not_plain(columns: int) -> None:
    model, optimizer = make(columns=columns)
    xamp.initialize(model, optimizer, "O1", verbosity=0)
    assert optimizer.param_groups[0]["fused"] is (True if columns == 3 else None)
    model, optimizer = make(columns=columns, fused=True)
    if columns == 2:
        with pytest.raises(UnsupportedPolicy, match="SGD was made with fused=True, whose kernel takes no parameter in"):
            xamp.initialize(model, optimizer, "O1", verbosity=0)
    else:
        xamp.initialize(model, optimizer, "O1", verbosity=0)


@pytest.mark.parametrize("columns", [2, 3])
def test_a_master_takes_over_the_storage_only_where_that_is_plain(columns: int) -> None:
    model, optimizer = make(columns=columns)
    storage = model.weight.data_ptr()
    xamp.initialize(model, optimizer, "O2", verbosity=0)
    assert (next(iter(xamp.master_params(optimizer))).data_ptr() == storage) == (columns == 3)
