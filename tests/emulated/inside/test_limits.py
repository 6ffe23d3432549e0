"""What a card refuses though a CPU takes it, and the emulation with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from xamp.backends.npu.chips import Chip
from xamp.backends.npu.emulation import limits
from xamp.backends.npu.emulation.documented import DOCUMENTED

npu: Any = torch.get_device_module("npu")
NPU = torch.device("npu", 0)


def ones(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype, device=NPU)


PRODUCTS: dict[str, Callable[[torch.dtype], torch.Tensor]] = {
    "mm": lambda d: ones(2, 2, dtype=d) @ ones(2, 2, dtype=d),
    "bmm": lambda d: torch.bmm(ones(1, 2, 2, dtype=d), ones(1, 2, 2, dtype=d)),
    "addmm": lambda d: torch.addmm(ones(2, 2, dtype=d), ones(2, 2, dtype=d), ones(2, 2, dtype=d)),
    "linear": lambda d: F.linear(ones(2, 2, dtype=d), ones(2, 2, dtype=d), ones(2, dtype=d)),
    "mv": lambda d: ones(2, 2, dtype=d) @ ones(2, dtype=d),
    "convolution": lambda d: F.conv2d(ones(1, 1, 3, 3, dtype=d), ones(1, 1, 2, 2, dtype=d)),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64], ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_wide_dtypes_are_refused(name: str, dtype: torch.dtype) -> None:
    said = {torch.float64: "DT_DOUBLE", torch.int64: "DT_INT64"}[dtype]
    with pytest.raises(RuntimeError, match=rf"EZ1001.*not implemented for {said}, .*DT_FLOAT.*emulated"):
        PRODUCTS[name](dtype)
    assert PRODUCTS[name](torch.float32).numel()
    assert PRODUCTS[name](torch.float16).numel()


def test_eight_dimensions_are_the_most() -> None:
    assert (ones(*[1] * 8, dtype=torch.float32) + 1).item() == 2.0
    many = torch.empty([1] * 9, device=NPU)
    for refused in (lambda: many + 1, many.clone, lambda: many.fill_(1.0)):
        with pytest.raises(RuntimeError, match=r"cannot be larger than 8 dimensions. \(emulated"):
            refused()


def test_a_card_has_the_memory_of_its_chip(chip: Chip) -> None:
    gib = npu.get_device_properties(0).total_memory / 2**30
    assert gib == {"Ascend910A": 32, "Ascend910B2": 64}[chip.name] == chip.memory
    free, total = npu.mem_get_info()
    assert free <= total == gib * 2**30
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(int(gib + 1) << 30, dtype=torch.uint8, device=NPU)


def test_every_limit_has_a_source_and_every_list_a_dtype() -> None:
    assert all(row.what and row.source for row in limits.LIMITS)
    assert len(DOCUMENTED) > 150
    assert all(DOCUMENTED.values())
    assert DOCUMENTED["mm"] == {torch.float32, torch.float16, torch.bfloat16}
