"""Modules made for single clauses, importable so that they pickle; and a check on their outputs."""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from xamp.registry.registry import HOST

__all__ = ["PICKLES", "Distilled", "Dtypes", "Mixed", "Nested", "Result", "ran_in"]


def ran_in(values: torch.Tensor) -> torch.dtype:
    """The narrowest dtype that can hold ``values``, fp32: the dtype that an operator gave before a cast to fp32."""
    host = values.cpu()  # the device may lack one of these dtypes
    return next(d for d in (torch.bfloat16, torch.float16, torch.float32) if torch.equal(host.to(d).float(), host))


class Distilled(nn.Module):
    """Runs its layers twice, first without gradients, and subtracts half of the first result from the second.

    ``mode`` makes the context without gradients.
    """

    def __init__(self, mode: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.mode = mode
        self.inner = nn.Linear(64, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, 1, 8, 8) -> (N, 4)."""
        with self.mode():
            before = self.head(torch.tanh(self.inner(x.flatten(1))))
        return self.head(torch.tanh(self.inner(x.flatten(1)))) - 0.5 * before.clone()  # type: ignore[no-any-return]


class Result(NamedTuple):
    """What :class:`Nested` returns."""

    first: torch.Tensor
    rest: dict[str, Any]


class Nested(nn.Module):
    """Takes and returns containers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 64)

    def forward(self, batch: dict[str, torch.Tensor]) -> Result:
        """``{"x": (N, 4)}`` -> tensors of several dtypes; ``double`` is on the CPU, as not every device has fp64."""
        made = self.inner(batch["x"])
        double = torch.ones(2, dtype=torch.float64, device=HOST)
        return Result(made, {"more": [made * 2, torch.arange(3)], "double": double, "name": "as it was"})

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        """(N, 4) -> the layer's output, (N, 64)."""
        return self.inner(x)  # type: ignore[no-any-return]


def _saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # type: ignore[no-any-return]


PICKLES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "save": _saved,
}


class Mixed(nn.Module):
    """Operators of each rule of the portable policy. Images (N, 1, 8, 8) -> logits (N, 4)."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.inner = nn.Linear(64, width)
        self.norm = nn.BatchNorm1d(width)
        self.last = nn.LayerNorm(width)
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        hidden = self.norm(self.inner(x.flatten(1)))
        gate = torch.softmax(self.inner(x.flatten(1)), -1)
        return self.head(self.last(hidden * gate + F.gelu(hidden)))  # type: ignore[no-any-return]


class Dtypes(nn.Module):
    """(N, 8), floating -> the uncast results of operators of each rule, on the input and on a lower tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See the class."""
        lower = self.layer(x)
        return (
            lower,
            torch.softmax(lower, -1),
            F.layer_norm(lower, (8,)),
            lower.exp(),
            lower.sum(-1),
            torch.addcmul(lower, x, lower),
            torch.mv(x, x[0]),
            F.mse_loss(lower, x),
        )
