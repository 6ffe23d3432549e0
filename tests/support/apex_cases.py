"""Parts of the cases of ``apex_messages``: the table of cases, a small model, one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Case = Callable[[Any], Any]
CASES: dict[str, Case] = {}
FRESH: set[str] = set()  # cases that need a process in which nothing was initialized before


class Absent(Exception):
    """The case needs a part of Apex that is not there."""


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def fresh(function: Case) -> Case:
    FRESH.add(function.__name__)
    return case(function)


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    """A linear layer whose weights are multiples of 1/8."""
    made = nn.Linear(2, 2).to(dtype)
    with torch.no_grad():
        made.weight.copy_(torch.tensor([[0.5, 0.25], [-0.25, 0.125]]))
        made.bias.copy_(torch.tensor([0.5, -0.5]))
    return made


def sgd(*models: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD([entry for each in models for entry in each.parameters()], lr=0.5)


def start(amp: Any, level: str = "O2", **options: Any) -> tuple[Any, Any]:
    net: Any = model()
    options.setdefault("verbosity", 0)
    net, optimizer = amp.initialize(net, sgd(net), opt_level=level, **options)
    return net, optimizer


def backward(amp: Any, net: Any, optimizers: Any, value: float = 1.0, **options: Any) -> None:
    """One backward pass; with ``value=inf`` it overflows."""
    with amp.scale_loss(net(torch.ones(1, 2)).sum() * value, optimizers, **options) as scaled:
        scaled.backward()


def dtype_of(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


HALF = torch.float16


def quiet(amp: Any) -> None:
    """Removes the casts and restores the settings."""
    handle = getattr(amp._amp_state, "handle", None)
    if handle is not None:
        handle._deactivate()
    amp._amp_state.hard_override = False
    amp._amp_state.allow_incoming_model_not_fp32 = False
    amp._amp_state.verbosity = 1
