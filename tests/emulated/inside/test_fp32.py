"""The digits of float32 products on a card: those of float16 or HF32 where a setting says so, and how to have all.

Covers: backends.npu.emulation.products, xamp.casting.exact_fp32.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import xamp
from xamp.backends.npu.chips import Chip

CARDS_OWN_FP32 = True
npu: Any = torch.get_device_module("npu")
NPU = torch.device("npu", 0)
KINDS = sys.modules["torch_npu"].npu.npu_config._CubeMathType

x, y = torch.randn(2, 3, 24, 24, generator=torch.Generator().manual_seed(0)).unbind()
image = torch.randn(2, 4, 9, 9, generator=torch.Generator().manual_seed(1))
kernel = torch.randn(5, 4, 3, 3, generator=torch.Generator().manual_seed(2))
MATRIX: dict[str, Callable[..., torch.Tensor]] = {
    "mm": lambda a, b: a[0] @ b[0],
    "bmm": torch.bmm,
    "addmm": lambda a, b: torch.addmm(torch.ones_like(a[0]) / 3, a[0], b[0]),
    "baddbmm": lambda a, b: torch.baddbmm(torch.ones_like(a) / 3, a, b),
    "mv": lambda a, b: a[0] @ b[0, 0],
    "linear": lambda a, b: F.linear(a, b[0], b[1, 0]),
    "einsum": lambda a, b: torch.einsum("bij,bjk->bik", a, b),
    "out": lambda a, b: torch.mm(a[0], b[0], out=torch.empty_like(a[0])),
}
CONVOLVED: dict[str, Callable[..., torch.Tensor]] = {
    "conv2d": lambda a, k: F.conv2d(a, k, padding=1),
    "conv_transpose2d": lambda a, k: F.conv_transpose2d(a, k.transpose(0, 1).contiguous()[:, :4].contiguous()),
    "conv1d": lambda a, k: F.conv1d(a[:, :, 0], k[:, :, 0]),
}


def set_defaults() -> None:
    npu.conv.allow_hf32, npu.matmul.allow_hf32 = True, False
    old = npu.get_soc_version() < 220
    npu.set_option({"ACL_PRECISION_MODE": "allow_fp32_to_fp16" if old else "must_keep_origin_dtype"})
    sys.modules["torch_npu"]._C._npu_setOption({"CUBE_MATH_TYPE": ""})


@pytest.fixture(autouse=True)
def _as_a_card_starts() -> Iterator[None]:
    set_defaults()
    yield
    set_defaults()


def in_float16(t: torch.Tensor) -> torch.Tensor:
    return t.half().float()


def in_hf32(t: torch.Tensor) -> torch.Tensor:
    """The multiple of 2**(exponent - 11) next to each number."""
    mantissa, exponent = torch.frexp(t.double())
    return torch.ldexp((mantissa * 4096).round() / 4096, exponent).float()


def as_it_is(t: torch.Tensor) -> torch.Tensor:
    return t


Rounding = Callable[[torch.Tensor], torch.Tensor]


def check(
    operations: dict[str, Callable[..., torch.Tensor]], operands: tuple[torch.Tensor, torch.Tensor], rounded: Rounding
) -> None:
    for name, operation in operations.items():
        found = operation(*(each.to(NPU) for each in operands)).cpu()
        exact = operation(*(each.double() for each in operands))
        bias = {"addmm", "baddbmm", "linear"}
        if name in bias:  # what is added is no operand of the product
            added = operation(operands[0] * 0, operands[1]) if name != "linear" else operands[1][1, 0]
            products: dict[str, Callable[..., torch.Tensor]] = {
                "addmm": MATRIX["mm"],
                "baddbmm": torch.bmm,
                "linear": lambda a, b: a @ b[0].T,
            }
            without = products[name]
            wanted = added.double() + without(*(rounded(each).double() for each in operands))
        else:
            wanted = operation(*(rounded(each).double() for each in operands))
        torch.testing.assert_close(
            found.double(), wanted, rtol=1e-5, atol=1e-5, msg=functools.partial("{}: {}".format, name)
        )
        if rounded is not as_it_is:
            assert float((found.double() - exact).abs().max()) > 3e-4, name


def test_a_product_has_the_digits_that_the_chip_gives_it(chip: Chip) -> None:
    check(MATRIX, (x, y), in_float16 if chip.mixed_fp32 else as_it_is)
    check(CONVOLVED, (image, kernel), in_float16 if chip.mixed_fp32 else in_hf32)


def test_exact_fp32_brings_the_digits_back_and_close_takes_them_away() -> None:
    before = (x[0].to(NPU) @ y[0].to(NPU)).cpu()
    with xamp.exact_fp32():
        check(MATRIX, (x, y), as_it_is)
        check(CONVOLVED, (image, kernel), as_it_is)
    assert torch.equal((x[0].to(NPU) @ y[0].to(NPU)).cpu(), before)


@pytest.mark.parametrize("kind", ["KEEP_DTYPE", "ALLOW_FP32_DOWN_PRECISION", "USE_FP16", "USE_HF32"])
def test_the_setting_of_products_is_obeyed(kind: str, chip: Chip) -> None:
    npu.matmul.cube_math_type = KINDS[kind]
    fewest = in_float16 if chip.mixed_fp32 else in_hf32
    digits: dict[str, Rounding] = {"KEEP_DTYPE": as_it_is, "USE_FP16": in_float16, "ALLOW_FP32_DOWN_PRECISION": fewest}
    check(MATRIX, (x, y), digits.get(kind, as_it_is if chip.mixed_fp32 else in_hf32))


def test_the_options_of_later_chips_are_obeyed(chip: Chip) -> None:
    if chip.mixed_fp32:
        pytest.skip("the chip has no HF32")
    npu.matmul.allow_hf32, npu.conv.allow_hf32 = True, False
    check(MATRIX, (x, y), in_hf32)
    check(CONVOLVED, (image, kernel), as_it_is)
    npu.matmul.allow_hf32 = False
    npu.set_option({"ACL_PRECISION_MODE": "allow_fp32_to_fp16"})
    check(MATRIX, (x, y), in_float16)
    check(CONVOLVED, (image, kernel), in_float16)


def test_gradients_are_products_too(chip: Chip) -> None:
    layer = nn.Linear(24, 8).to(NPU)
    layer(x[0].to(NPU)).square().sum().backward()
    rounded = in_float16 if chip.mixed_fp32 else as_it_is
    weight, bias = (p.detach().cpu() for p in layer.parameters())
    out = rounded(x[0]).double() @ rounded(weight).double().T + bias
    wanted = rounded(2 * out.float()).double().T @ rounded(x[0]).double()
    assert layer.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad.cpu().double(), wanted, rtol=1e-3, atol=1e-3)
    exact = 2 * (x[0].double() @ weight.double().T + bias).T @ x[0].double()
    assert (float((layer.weight.grad.cpu().double() - exact).abs().max()) > 5e-3) == chip.mixed_fp32


def test_the_flag_tells_of_float32_overflows_too(chip: Chip) -> None:
    if not chip.saturates:
        pytest.skip("there an overflow is inf")
    utils = npu.utils
    large = torch.full((2, 2), 3e38, device=NPU)
    overflows: tuple[Callable[[], object], ...] = (
        lambda: large + large,
        lambda: large.clone().mul_(10),
        lambda: torch.full((2, 2), 1e5, device=NPU) @ torch.ones(2, 2, device=NPU),  # an operand beyond float16
        lambda: torch.full((2,), 1e300, dtype=torch.float64, device=NPU).float(),
    )
    for overflow in overflows:
        utils.clear_npu_overflow_flag()
        overflow()
        assert utils.get_npu_overflow_flag()
    utils.clear_npu_overflow_flag()
    mask = torch.full((2, 2), -torch.inf, device=NPU).triu(1)
    (mask + 1.0).softmax(-1)
    large.mul_(0.5)
    assert not utils.get_npu_overflow_flag(), "an inf that was there is none"
