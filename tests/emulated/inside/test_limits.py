"""What a card refuses though a CPU takes it, and the emulation with it.

Covers: backends.npu.emulation.limits, backends.npu.emulation.documented.
"""

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
    calls: tuple[Callable[[], object], ...] = (lambda: many + 1, many.clone, lambda: many.fill_(1.0))
    for refused in calls:
        with pytest.raises(RuntimeError, match=r"cannot be larger than 8 dimensions. \(emulated"):
            refused()


def test_a_card_has_the_memory_of_its_chip(chip: Chip) -> None:
    gib = npu.get_device_properties(0).total_memory / 2**30
    assert gib == {"Ascend910A": 32, "Ascend910B2": 64}[chip.name] == chip.memory
    free, total = npu.mem_get_info()
    assert free <= total == gib * 2**30
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(int(gib + 1) << 30, dtype=torch.uint8, device=NPU)


def test_a_cast_between_usual_formats_changes_the_record_only() -> None:
    x = ones(2, 2, dtype=torch.float32)
    for wanted in (0, 1, 2):
        made = torch.ops.npu.npu_format_cast(x, wanted)
        assert torch.ops.npu.get_npu_format(made) == wanted
        assert made.data_ptr() == x.data_ptr()
        assert torch.equal(made.cpu(), torch.ones(2, 2))


def test_a_storage_that_was_made_smaller_can_be_read() -> None:
    x = torch.arange(16.0).to(NPU)
    x.untyped_storage().resize_(16)
    assert x.clone()[:4].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert x.untyped_storage().nbytes() == 16


def test_every_limit_has_a_source_and_every_list_a_dtype() -> None:
    assert all(row.what and row.source for row in limits.LIMITS)
    assert len(DOCUMENTED) > 150
    assert all(DOCUMENTED.values())
    assert DOCUMENTED["mm"] == {torch.float32, torch.float16, torch.bfloat16}
