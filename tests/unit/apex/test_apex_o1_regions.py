"""Apex's casts are none of xamp's sessions' business: in their regions, whatever those cast, functions are plain.

Covers: xamp.apex._regions, xamp.apex._wrappers, xamp.casting.active.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import compiling
import pytest
import torch
import torch.nn.functional as F
from apex_casts import BF16, FP16, FP32, casts, stop
from torch import nn
from torch.utils.checkpoint import checkpoint

import xamp
from xamp.apex import _functions as functions
from xamp.apex._handle import init

square = torch.linspace(-1.0, 1.0, 16).reshape(4, 4)


@pytest.fixture(autouse=True)
def _no_casts_are_left() -> Iterator[None]:
    yield
    stop()


class Noting(nn.Module):
    """Notes what functions give in its forward: of each list one, as function and as method."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = x.detach().half()
        self.seen = [y.dtype for y in (x.mv(x[0]), torch.cumsum(low, 0), low.cumsum(0), low + x)]
        return self.linear(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_functions_are_plain_in_sessions_of_every_level(level: str) -> None:
    def found() -> list[torch.dtype]:
        model = xamp.initialize(Noting(), level=level, op_policy="native", verbosity=0)
        model(square)
        assert isinstance(model, Noting)
        return model.seen

    plain = found()
    with casts():
        assert torch.cumsum(square.half(), 0).dtype is FP32
        assert found() == plain
        assert torch.cumsum(square.half(), 0).dtype is FP32


REGIONS: dict[str, Callable[[], Any]] = {
    "autocast": lambda: xamp.autocast(dtype=BF16),
    "autocast, switched off": lambda: xamp.autocast(enabled=False),
    "a session's": lambda: xamp.session(xamp.initialize(nn.Linear(4, 4), level="O4", verbosity=0)).autocast(),
    "without casts": xamp.disable_casts,
}


@pytest.mark.parametrize("name", REGIONS)
def test_functions_are_plain_in_regions_of_xamps(name: str) -> None:
    region: Any = REGIONS[name]()
    decorated: Any = functions.half_function(lambda x: x.dtype)
    with casts(BF16), region:
        assert square.half().add_(square).dtype is FP16
        assert square.half().exp_().dtype is FP16
        assert (square.half() + square.bfloat16()).dtype is FP32  # refused under the casts
        assert decorated(square) is FP32
        with pytest.raises((RuntimeError, ValueError)):
            nn.LSTM(4, 4, dtype=torch.float64)(square)


def test_a_plain_model_beside_a_session() -> None:
    model = xamp.initialize(nn.Linear(4, 4), level="O4", verbosity=0)
    with casts():
        assert nn.Linear(4, 4)(model(square)).dtype is FP16
        assert model(nn.Linear(4, 4)(square).float()).dtype is FP32


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_backward_recomputes_of_a_session_is_plain(reentrant: bool) -> None:
    seen: list[torch.dtype] = []

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=reentrant)  # type: ignore[no-any-return]

        def inner(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(x.half().cumsum(0).dtype)
            return self.linear(x)  # type: ignore[no-any-return]

    model = xamp.initialize(Block(), level="O4", op_policy="native", verbosity=0)
    with casts():
        model(square.clone().requires_grad_()).sum().backward()
    assert seen == [FP16, FP16]


def test_what_backward_recomputes_outside_of_sessions_is_cast() -> None:
    linear, seen = nn.Linear(4, 4), []

    def inner(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.half().cumsum(0).dtype)
        return linear(x)  # type: ignore[no-any-return]

    with casts():
        checkpoint(inner, square.clone().requires_grad_(), use_reentrant=False).float().sum().backward()
    assert seen == [FP32, FP32]
    assert linear.weight.grad is not None


@pytest.mark.parametrize("level", ["O2", "O4"])
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_functions_are_plain_in_compiled_sessions(level: str, compiler: str) -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            low = x.bfloat16()
            return low.cumsum(0), torch.cumsum(low, 0), F.normalize(low), low * low.float().half().float()

    model = xamp.initialize(Sums(), level=level, dtype=BF16, op_policy="native", cast_model_outputs=False, verbosity=0)
    plain = [y.dtype for y in model(square)]
    compiling.forget()
    with casts():
        made: Any = torch.compile(model, backend=compiler, fullgraph=True)
        assert [y.dtype for y in made(square)] == plain
        assert torch.cumsum(square.half(), 0).dtype is FP32
    compiling.forget()


def test_a_users_own_autocast_is_cast_in() -> None:
    """As in apex.amp, which knows nothing of it."""
    with torch.autocast("cpu", dtype=BF16):
        init()
        assert F.softmax(square.half(), dim=0).dtype is FP32
        assert torch.mv(square, square[0]).dtype is FP16
