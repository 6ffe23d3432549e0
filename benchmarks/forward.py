"""A managed forward against ``with torch.autocast(...)`` around a plain one: the cost of entering and leaving."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

import xamp
from benchmarks import bounds
from benchmarks.report import Figure, of_difference
from benchmarks.timing import compare_made
from xamp import policy

LEVELS: dict[str, torch.dtype] = {
    name: getattr(torch, str(row.dtype)) for name, row in policy.LEVELS.items() if row.casts_operators
}


class Inert(torch.nn.Module):
    """Runs no operator, so only the policy costs time."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Norm(torch.nn.Module):
    """One operator that autocast leaves in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Linear(torch.nn.Linear):
    """One operator that autocast lowers; the result is cast to fp32 on both sides, as xamp casts outputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).float()


CALLS, OF_ROUND = 50, 4
"""Calls between two readings of the clock, and how many such turns stand for one of ``--rounds``: the clock of a
processor changes within milliseconds, and a difference of 1 us of 40 is seen only where both sides run at one speed."""

MODELS: dict[str, Callable[[], torch.nn.Module]] = {"inert": Inert, "mul": Norm, "linear": lambda: Linear(4, 4)}


@dataclasses.dataclass
class Output:
    """Two results, as many models return them."""

    first: torch.Tensor
    second: torch.Tensor


class Returning(torch.nn.Linear):
    """One operator that autocast lowers, whose result is returned as ``form`` makes it."""

    def __init__(self, form: Callable[[torch.Tensor], Any]) -> None:
        super().__init__(4, 4)
        self.form = form

    def forward(self, x: torch.Tensor) -> Any:
        return self.form(super().forward(x))


Forms = tuple[Callable[[torch.Tensor], Any], Callable[[Any], Any]]
FORMS: dict[str, Forms] = {
    "tensor": (lambda y: y, lambda out: out.float()),
    "tuple": (lambda y: (y, y), lambda out: (out[0].float(), out[1].float())),
    "dict": (
        lambda y: {"first": y, "second": y},
        lambda out: {"first": out["first"].float(), "second": out["second"].float()},
    ),
    "dataclass": (lambda y: Output(y, y), lambda out: Output(out.first.float(), out.second.float())),
}
"""What a forward returns, and how a script casts that to fp32 by hand."""


def run(device: torch.device, rounds: int) -> list[Figure]:
    figures = [_output(name, device, rounds) for name in FORMS]
    for level, dtype in LEVELS.items():
        for name, make in MODELS.items():
            for grad in (False, True):
                figures.append(_figure(name, make, level, dtype, grad, device, rounds))
    return figures


def _output(name: str, device: torch.device, rounds: int) -> Figure:
    """A managed forward with its results cast against autocast and casts by hand."""
    level, dtype = list(LEVELS.items())[-1]
    form, by_hand = FORMS[name]
    sides = functools.partial(_sides, lambda: Returning(form), level, dtype, device, by_hand)
    pair = compare_made(sides, device, calls=CALLS, rounds=OF_ROUND * rounds)
    return of_difference(f"{level} output {name}", pair, bounds.FORWARD_US)


def _figure(
    name: str,
    make: Callable[[], torch.nn.Module],
    level: str,
    dtype: torch.dtype,
    grad: bool,
    device: torch.device,
    rounds: int,
) -> Figure:
    sides = functools.partial(_sides, make, level, dtype, device)
    with contextlib.nullcontext() if grad else torch.no_grad():
        pair = compare_made(sides, device, calls=CALLS, rounds=OF_ROUND * rounds)
    case = f"{level} {name}, {'grad' if grad else 'no_grad'}"
    return of_difference(case, pair, bounds.FORWARD_US)


def _sides(
    make: Callable[[], torch.nn.Module],
    level: str,
    dtype: torch.dtype,
    device: torch.device,
    by_hand: Callable[[Any], Any] | None = None,
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A managed forward, and a plain one in autocast, with ``by_hand`` of what it returns."""
    plain, managed = make().to(device), make().to(device)
    xamp.initialize(managed, level=level, op_policy="native", verbosity=0)
    x = torch.ones(4, 4, device=device)
    kind = device.type

    def theirs() -> Any:
        with torch.autocast(kind, dtype=dtype):
            return plain(x)

    def theirs_cast() -> Any:
        with torch.autocast(kind, dtype=dtype):
            return by_hand(plain(x))  # type: ignore[misc]

    return lambda: managed(x), theirs if by_hand is None else theirs_cast
