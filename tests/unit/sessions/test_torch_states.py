"""torch.distributed.checkpoint.state_dict on managed optimizers, in one process: all forms of its state, all levels.

Covers: xamp.sessions.torch_states.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)

import xamp

FORMS = {
    "nested": StateDictOptions(),
    "flat": StateDictOptions(flatten_optimizer_state_dict=True),
    "whole, on the host": StateDictOptions(full_state_dict=True, cpu_offload=True),
}
OPTIMIZERS: dict[str, Callable[[Iterable[Any]], Any]] = {
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}


def made(level: str, optimizer: str, seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2))
    managed = OPTIMIZERS[optimizer](model.parameters())
    xamp.initialize(model, managed, level, init_scale=1024.0, verbosity=0)
    return model, managed


def train(model: Any, optimizer: Any, steps: range) -> list[torch.Tensor]:
    for step in steps:
        optimizer.zero_grad()
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        with xamp.scale_loss((model(x) - 1.0).square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    return [p.detach().clone() for p in xamp.master_params(optimizer)]


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("steps", [0, 3])
def test_training_goes_on_bit_for_bit(steps: int, form: str, optimizer: str, level: str) -> None:
    """Before the first step torch makes the state by one. What is saved and what goes on step in one form, then too."""
    model, old = made(level, optimizer, seed=0)
    train(model, old, range(steps))
    of_model, of_optimizer = copy.deepcopy(get_state_dict(model, old, options=FORMS[form]))
    of_xamp = xamp.state_dict(old)
    wanted = train(model, old, range(3, 6))

    resumed, new = made(level, optimizer, seed=7)
    set_state_dict(resumed, new, model_state_dict=of_model, optim_state_dict=of_optimizer, options=FORMS[form])
    if steps:
        xamp.load_state_dict(of_xamp, new)
    assert all(map(torch.equal, train(resumed, new, range(3, 6)), wanted))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_flat_names_are_those_of_the_model(level: str) -> None:
    model, optimizer = made(level, "adam", seed=0)
    train(model, optimizer, range(2))
    found: Any = get_optimizer_state_dict(model, optimizer, options=FORMS["flat"])
    names = [name for name, _ in model.named_parameters()]
    for name, master in zip(names, xamp.master_params(optimizer), strict=True):
        assert torch.equal(found[f"state.{name}.exp_avg"], optimizer.state[master]["exp_avg"])


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("form", ["nested", "flat"])
def test_a_state_is_made_where_every_step_was_skipped(form: str, level: str) -> None:
    """torch makes it by a step with gradients of zeros, which are not taken for gradients that somebody cleared."""
    model, optimizer = made(level, "adam", seed=0)
    start = [p.detach().clone() for p in xamp.master_params(optimizer)]
    with xamp.scale_loss(model(torch.ones(8, 4)).sum() * float("inf"), optimizer) as scaled:
        scaled.backward()
    if level != "O5":  # nothing is skipped there
        optimizer.step()
    optimizer.zero_grad()
    found: Any = get_optimizer_state_dict(model, optimizer, options=FORMS[form])
    for name, _ in model.named_parameters():
        moment = found[f"state.{name}.exp_avg"] if form == "flat" else found["state"][name]["exp_avg"]
        assert not moment.any()
    assert all(map(torch.equal, xamp.master_params(optimizer), start))
