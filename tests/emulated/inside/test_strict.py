"""``xamp emulate --strict``: what no source shows a card to take is refused, and errors of indices are told late.

Covers: backends.npu.emulation.limits, backends.npu.emulation.late.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import xamp
from xamp.backends.npu.emulation import limits

npu: Any = torch.get_device_module("npu")
NPU = torch.device("npu", 0)


def test_it_is_strict() -> None:
    assert limits.STRICT


def of(dtype: torch.dtype) -> torch.Tensor:
    return torch.ones(4, dtype=dtype, device=NPU)


@pytest.mark.filterwarnings("ignore:Device do not support double")
def test_a_cast_to_float64_gives_float32_and_a_copy_of_float64_stays() -> None:
    x = of(torch.float32)
    assert x.double().dtype == x.to(torch.float64).dtype == torch.float32
    assert torch.ones(3, dtype=torch.float64).to(NPU).dtype == torch.float64
    assert x.double().cpu().dtype == torch.float32


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        (lambda: F.silu(of(torch.float64)), "silu.*DT_DOUBLE"),
        (lambda: F.mse_loss(of(torch.float64), of(torch.float64)), "mse_loss.*DT_DOUBLE"),
        (lambda: of(torch.int16).cumsum(0), "cumsum.*DT_INT16"),
    ],
)
def test_a_dtype_that_nothing_shows_is_refused(refused: Callable[[], object], said: str) -> None:
    with pytest.raises(RuntimeError, match=rf"{said}.*dtype support list"):
        refused()


def test_right_answers_can_be_counted() -> None:
    """``sum`` of bool and of int64, as accuracy functions and torch's gradient of ``prod`` have it."""
    same = torch.tensor([1, 2, 3], device=NPU) == torch.tensor([1, 5, 3], device=NPU)
    assert same.sum().item() == same.long().sum().item() == same.int().sum().item() == 2
    x = torch.tensor([[2.0, 0.0], [3.0, 4.0]], device=NPU, requires_grad=True)
    x.prod(1).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[0.0, 2.0], [4.0, 3.0]]
    assert torch.tensor([4, 9], dtype=torch.int32, device=NPU).max().item() == 9


WRONG: dict[str, Callable[[], object]] = {
    "embedding": lambda: nn.Embedding(3, 2).to(NPU)(torch.tensor([1, 7], device=NPU)),
    "index": lambda: of(torch.float32)[torch.tensor([9], device=NPU)],
    "gather": lambda: of(torch.float32).gather(0, torch.tensor([9], device=NPU)),
    "cross_entropy": lambda: F.cross_entropy(torch.ones(2, 3, device=NPU), torch.tensor([0, 5], device=NPU)),
    "scatter_": lambda: of(torch.float32).scatter_(0, torch.tensor([9], device=NPU), 1.0),
    "index_put": lambda: of(torch.float32).index_put_((torch.tensor([9], device=NPU),), torch.zeros((), device=NPU)),
}
WAITS: dict[str, Callable[[], object]] = {
    "item": lambda: of(torch.float32)[0].item(),
    "a copy": lambda: of(torch.float32).cpu(),
    "synchronize": npu.synchronize,
    "a stream": lambda: npu.current_stream().synchronize(),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("wait", WAITS)
def test_an_index_out_of_range_is_told_where_the_host_waits(wait: str, name: str) -> None:
    WRONG[name]()
    with pytest.raises(RuntimeError, match="507035"):
        WAITS[wait]()
    WAITS[wait]()
    npu.synchronize()


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_a_training_takes_nothing_that_is_refused(level: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)).to(NPU)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    xamp.initialize(model, optimizer, level, verbosity=0)
    first = last = 0.0
    x, y = torch.randn(6, 1, 5, 5, device=NPU), torch.arange(6, device=NPU) % 3
    for step in range(8):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).float(), y)
        with xamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        xamp.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
        last = loss.item()
        first = first if step else last
    assert last < first
