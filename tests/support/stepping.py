"""Helpers for tests of the training step, on the suite's model, whose gradients are known."""

from __future__ import annotations

import copy
from typing import Any

import torch
from lanes import Lane
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

import xamp
from xamp.policy import levels_where
from xamp.testing import exact
from xamp.testing.exact import (
    assert_same,
    closeness,
    inputs,
    iterate,
    outcome,
    picture,
    plain_iterate,
    run_backward,
    step_alike,
    stepped,
)

__all__ = [
    "OPTIMIZERS",
    "SCALED",
    "Dot",
    "HostReads",
    "assert_follows",
    "assert_lowered_follow",
    "assert_same",
    "at",
    "closeness",
    "inputs",
    "iterate",
    "outcome",
    "picture",
    "plain_iterate",
    "run_backward",
    "start",
    "start_beside",
    "step_alike",
    "stepped",
    "twin",
]


class Dot(exact.Dot):
    """``a . x[:4] + b . x[4:]``."""

    @property
    def a(self) -> nn.Parameter:
        return self.first.weight

    @property
    def b(self) -> nn.Parameter:
        return self.second.weight


SCALED = [
    *levels_where(lambda row: row.dynamic),
    *(f"{level}-second-fp32" for level in levels_where(lambda row: row.dynamic and row.master_weights)),
]
"""The levels that scale; in the last ``b`` stays fp32, so that the optimizer steps a master and a plain parameter."""


def at(level: str) -> dict[str, Any]:
    """The arguments of ``initialize`` for one of :data:`SCALED`, or another level."""
    name, _, partly = level.partition("-")
    return {"level": name, "verbosity": 0, **({"keep_fp32": ["*second"]} if partly else {})}


def twin(original: Any) -> Any:
    """A copy to run the reference on; copy a model before ``initialize``."""
    return copy.deepcopy(original)


def assert_follows(optimizer: Optimizer, reference: nn.Module, rtol: float = 0, atol: float = 0) -> None:
    """Check that the tensors that ``optimizer`` steps equal the parameters of ``reference``; as near as a pass is."""
    found, wanted = stepped(optimizer), [p.detach() for p in reference.parameters()]
    least = closeness(optimizer)
    torch.testing.assert_close(found, wanted, rtol=max(rtol, least), atol=max(atol, least))


def assert_lowered_follow(model: nn.Module, optimizer: Optimizer) -> None:
    """Check that each parameter equals what the optimizer steps, rounded to the parameter's dtype."""
    for param, master in zip(model.parameters(), stepped(optimizer), strict=True):
        assert torch.equal(param.detach(), master.to(param.dtype))


class HostReads(TorchDispatchMode):
    """Counts how often the host reads a tensor's numbers, each of which waits for the device.

    Attributes:
        scalars: reads through the dispatcher: ``item()``, ``bool()``, ``float()``.
        lists: calls of ``tolist()`` of tensors on the device.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.scalars = 0
        self.lists = 0
        self._tolist: Any = torch.Tensor.tolist

    def __enter__(self) -> Any:
        def counted(tensor: torch.Tensor) -> Any:
            self.lists += not (tensor.is_cpu and tensor.is_pinned())  # a copy that has arrived in the host's memory
            return self._tolist(tensor)

        torch.Tensor.tolist = counted  # type: ignore[method-assign,assignment]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exc: Any) -> None:
        torch.Tensor.tolist = self._tolist  # type: ignore[method-assign]
        super().__exit__(*exc)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.scalars += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda params: SGD(params, lr=0.125, momentum=0.9),
    "SGD-for-loop": lambda params: SGD(params, lr=0.125, momentum=0.9, foreach=False),
    "Adam": lambda params: Adam(params, lr=0.125),
    "AdamW-foreach": lambda params: AdamW(params, lr=0.125, foreach=True),
    "Adagrad": lambda params: Adagrad(params, lr=0.125),
}


def start(lane: Lane, level: str, **options: Any) -> tuple[Any, Optimizer]:
    """A model under xamp, its scale 64 unless told otherwise, and SGD with momentum over it."""
    model = Dot().to(lane.device)
    optimizer: Optimizer = SGD(model.parameters(), lr=0.125, momentum=0.9)
    model, optimizer = xamp.initialize(model, optimizer, **{"init_scale": 64.0, **at(level), **options})
    return model, optimizer


def start_beside(lane: Lane, level: str, **options: Any) -> tuple[Any, Optimizer, Any, Optimizer]:
    """As :func:`start`, with a reference in plain fp32 and its optimizer; the scale starts at xamp's default."""
    model = Dot().to(lane.device)
    reference = twin(model)
    plain = SGD(reference.parameters(), lr=0.125, momentum=0.9)
    optimizer: Optimizer = SGD(model.parameters(), lr=0.125, momentum=0.9)
    step_alike(plain, optimizer)
    model, optimizer = xamp.initialize(model, optimizer, **at(level), **options)
    return model, optimizer, reference, plain
