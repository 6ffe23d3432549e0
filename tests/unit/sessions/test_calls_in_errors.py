"""An error names the call that the user made, also where that call makes another public one.

Covers: xamp.sessions, xamp.averages, xamp.errors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import xamp
from xamp.errors import XampError
from xamp.integrations.loggers import log_metrics

Call = Callable[[], Any]


def managed() -> tuple[Any, torch.optim.Optimizer]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    xamp.initialize(model, optimizer, "O2", verbosity=0)
    return model, optimizer


def assert_named(call: Call, start: str) -> None:
    with pytest.raises(XampError) as error:
        call()
    assert str(error.value).startswith(start)


WRONG: Any = 0.5
WORD: Any = "a"
ALIEN = nn.Linear(2, 2)
ALIEN_OPTIMIZER = torch.optim.SGD(ALIEN.parameters(), lr=0.1)

WITHOUT_SESSION: dict[str, Call] = {
    "session(Linear): not given to": lambda: xamp.session(ALIEN),
    "loss_scale(obj=Linear): not given to": lambda: xamp.loss_scale(ALIEN),
    "state_dict(obj=SGD): not given to": lambda: xamp.state_dict(ALIEN_OPTIMIZER),
    "load_state_dict(obj=Linear): not given to": lambda: xamp.load_state_dict({}, ALIEN),
    "log_metrics(Linear): not given to": lambda: log_metrics(print, ALIEN),
    "ema(applied_only=True): not given to": lambda: xamp.ema(ALIEN, 0.9, applied_only=True).update(),
    "ema(applied_only=SGD): not given to": lambda: xamp.ema(ALIEN, 0.9, applied_only=ALIEN_OPTIMIZER).update(),
}
NUMBERS: dict[str, Call] = {
    "GradScaler(growth_interval=0.5): must be": lambda: xamp.GradScaler(growth_interval=WRONG),
    "GradScaler.update(new_scale='a'): must be": lambda: scaler().update("a"),
    "GradScaler.update(new_scale=-1.0): must be": lambda: scaler().update(-1.0),
    "clip_grad_norm_(max_norm='a'): must be": lambda: xamp.clip_grad_norm_(ALIEN_OPTIMIZER, WORD),
    "clip_grad_value_(clip_value='a'): must be": lambda: xamp.clip_grad_value_(ALIEN_OPTIMIZER, WORD),
}
LEVELS: dict[str, Call] = {
    "initialize(level='O9'): no such level": lambda: xamp.initialize(ALIEN, ALIEN_OPTIMIZER, "O9"),
    "fsdp_policy(level='O9'): no such level": lambda: xamp.fsdp_policy("O9"),
    "profile(level='O9'): no such level": lambda: xamp.debug.profile(
        ALIEN, torch.ones(1, 2), level="O9", loss=lambda output: output.sum()
    ),
}


def scaler() -> Any:
    found = xamp.GradScaler()
    found.scale(torch.ones(()))  # makes the scale
    return found


@pytest.mark.parametrize("start", [*WITHOUT_SESSION, *NUMBERS, *LEVELS])
def test_a_call_with_a_wrong_argument(start: str) -> None:
    assert_named({**WITHOUT_SESSION, **NUMBERS, **LEVELS}[start], start)


READERS: dict[str, Callable[[Any], Any]] = {
    "master_params(optimizer): ": lambda optimizer: list(xamp.master_params(optimizer)),
    "clip_grad_norm_(optimizer): ": lambda optimizer: xamp.clip_grad_norm_(optimizer, 1.0),
    "clip_grad_value_(optimizer): ": lambda optimizer: xamp.clip_grad_value_([optimizer], 1.0),
    "amp.master_params(optimizer): ": lambda optimizer: list(xamp.apex.amp.master_params(optimizer)),
    "optimizer.step(): ": lambda optimizer: optimizer.step(),
}


@pytest.mark.parametrize("start", READERS)
def test_a_call_that_comes_too_early(start: str) -> None:
    model, optimizer = managed()
    with xamp.scale_loss(model(torch.ones(1, 3)).sum(), optimizer, delay_unscale=True) as scaled:
        scaled.backward()
    read = functools.partial(READERS[start], optimizer)
    assert_named(read, f"{start}the gradients are still scaled")
    optimizer.zero_grad()
    with xamp.scale_loss(model(torch.ones(1, 3)).sum(), optimizer) as scaled:
        scaled.backward()
        assert_named(read, f"{start}inside `with xamp.scale_loss")
    model.bias.grad.add_(1.0)  # the smallest parameter's tell who has written
    assert_named(read, f"{start}there are gradients that did not come through scale_loss")


@pytest.mark.parametrize("start", ["loss_scale", "state_dict", "load_state_dict"])
def test_one_of_several_sessions_must_be_named(start: str) -> None:
    kept = managed(), managed()
    call: Any = getattr(xamp, start)
    assert_named((lambda: call({})) if start == "load_state_dict" else call, f"{start}(): ")
    assert kept
