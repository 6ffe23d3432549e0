"""A managed forward against ``with torch.autocast(...)`` around a plain one: the cost of entering and leaving."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

import xamp
from benchmarks import bounds
from benchmarks.report import Figure
from benchmarks.timing import compare
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


MODELS: dict[str, Callable[[], torch.nn.Module]] = {"inert": Inert, "mul": Norm, "linear": lambda: Linear(4, 4)}


def run(device: torch.device, rounds: int) -> list[Figure]:
    figures = []
    for level, dtype in LEVELS.items():
        for name, make in MODELS.items():
            for grad in (False, True):
                figures.append(_figure(name, make, level, dtype, grad, device, rounds))
    return figures


def _figure(
    name: str,
    make: Callable[[], torch.nn.Module],
    level: str,
    dtype: torch.dtype,
    grad: bool,
    device: torch.device,
    rounds: int,
) -> Figure:
    plain, managed = make().to(device), make().to(device)
    xamp.initialize(managed, level=level, op_policy="native", verbosity=0)
    x = torch.ones(4, 4, device=device)
    kind = device.type

    def theirs() -> torch.Tensor:
        with torch.autocast(kind, dtype=dtype):
            return plain(x)  # type: ignore[no-any-return]

    with contextlib.nullcontext() if grad else torch.no_grad():
        pair = compare(lambda: managed(x), theirs, device, calls=200, rounds=rounds)
    case = f"{level} {name}, {'grad' if grad else 'no_grad'}"
    return Figure(case, pair.difference, "us", bounds.FORWARD_US, f"{pair}  ratio {pair.ratio:.2f}")
