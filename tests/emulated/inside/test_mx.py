"""Microscaled fp8 on a chip of the series Ascend 950: its three operators, and who may use them.

Covers: backends.npu.emulation.mx, backends.npu.backend.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import xamp
from xamp.contract import Backend
from xamp.errors import UnsupportedPolicy

npu: Any = torch.get_device_module("npu")
NPU = torch.device("npu", 0)
E4M3, E8M0 = torch.float8_e4m3fn, 293
HAS_MX = npu.get_device_name().startswith("Ascend950")
needs_mx = pytest.mark.skipif(not HAS_MX, reason="the chip has no microscaled fp8")


def quantised(x: torch.Tensor, **options: Any) -> Any:
    return torch.ops.npu.npu_dynamic_mx_quant(x, **{"dst_type": E4M3, **options})


def product(one: Any, other: Any, **options: Any) -> torch.Tensor:
    scales: Any = {"pertoken_scale": one[1], "scale_dtype": E8M0, "pertoken_scale_dtype": E8M0}
    given = {**scales, "group_sizes": [1, 1, 32], "output_dtype": torch.bfloat16, **options}
    found: torch.Tensor = torch.ops.npu.npu_quant_matmul(one[0], other[0].t(), other[1].transpose(0, 1), **given)
    return found


def by_hand(row: list[float]) -> tuple[list[float], list[int]]:
    """The OCP's rule for one row, by Python's numbers: what the values stand for, and the scales."""
    values, scales = [], []
    for start in range(0, len(row), 32):
        block = row[start : start + 32]
        most = max(map(abs, block))
        exponent = -127 if most == 0 else max(math.floor(math.log2(most)) - 8, -127)
        scales.append(exponent + 127)
        for value in block:
            sized = abs(value) / 2.0**exponent
            step = 2.0 ** (max(math.floor(math.log2(sized)) if sized else -6, -6) - 3)
            near = min(round(sized / step) * step, 448.0)  # round() takes the even one of two that are as near
            values.append(math.copysign(near * 2.0**exponent, value))
    return values, scales


@needs_mx
@pytest.mark.parametrize("length", [32, 64, 70, 97])
def test_the_rule_of_the_ocp(length: int) -> None:
    made = torch.Generator().manual_seed(length)
    x = torch.randn(5, length, generator=made) * torch.exp2(torch.randint(-20, 20, (5, length), generator=made).float())
    x = x.bfloat16()
    x[2, :32] = 0
    values, scale = quantised(x.to(NPU))
    assert (values.dtype, scale.dtype, scale.shape) == (E4M3, torch.uint8, (5, -(-length // 64), 2))
    flat = scale.cpu().flatten(1)
    for row in range(5):
        wanted, scales = by_hand(x[row].tolist())
        assert flat[row].tolist() == scales + [0] * (len(flat[row]) - len(scales))
        unit = torch.exp2(flat[row].double() - 127).repeat_interleave(32)[:length]
        assert torch.equal(values[row].cpu().double() * unit, torch.tensor(wanted, dtype=torch.float64))


@needs_mx
def test_what_is_not_finite_is_nan_in_its_block_alone() -> None:
    x = torch.ones(2, 96, dtype=torch.bfloat16)
    x[0, 40], x[1, 3] = math.inf, math.nan
    values, scale = quantised(x.to(NPU))
    assert values.cpu().float().isnan().tolist() == [[32 <= n < 64 for n in range(96)], [n < 32 for n in range(96)]]
    assert scale.cpu().flatten(1).tolist() == [[119, 255, 119, 0], [255, 119, 119, 0]]


@needs_mx
@pytest.mark.parametrize("shape", [(64, 96), (5, 70), (97, 33), (1, 1)])
def test_one_operator_quantises_along_both_dimensions(shape: tuple[int, int]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])).bfloat16().to(NPU)
    made = torch.ops.npu.npu_dynamic_mx_quant_with_dual_axis(x, dst_type=E4M3)
    turned = quantised(x.t().contiguous())
    expected = [*quantised(x), turned[0].t(), turned[1].transpose(0, 1)]
    assert [each.shape for each in made] == [each.shape for each in expected]
    assert all(
        torch.equal(one.cpu().view(torch.uint8), other.cpu().contiguous().view(torch.uint8))
        for one, other in zip(made, expected, strict=True)
    )


@needs_mx
def test_a_layer_in_training_casts_each_matrix_once() -> None:
    """Three casts in place of six, by the operator for both dimensions."""
    asked: list[str] = []

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "mx_quant" in func.overloadpacket.__name__:
                asked.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    counter: Any = Counter  # torch's has no types
    model = xamp.initialize(nn.Linear(64, 96).to(NPU), level="fp8", keep_bf16=(), verbosity=0)
    x = torch.randn(32, 64, device=NPU, requires_grad=True)
    with counter():
        model(x).float().sum().backward()
    assert asked == ["npu_dynamic_mx_quant_with_dual_axis"] * 3
    with counter(), torch.no_grad():
        model(x)
    assert asked[3:] == ["npu_dynamic_mx_quant"] * 2


@needs_mx
@pytest.mark.parametrize("shape", [(64, 96, 32), (5, 70, 3), (1, 32, 1)])
def test_the_product_of_what_was_quantised(shape: tuple[int, int, int]) -> None:
    rows, length, columns = shape
    made = torch.Generator().manual_seed(rows)
    one, other = (torch.randn(n, length, generator=made).bfloat16() for n in (rows, columns))
    found = product(quantised(one.to(NPU)), quantised(other.to(NPU)), output_dtype=torch.float32)
    wide = [torch.tensor([by_hand(row)[0] for row in each.tolist()], dtype=torch.float64) for each in (one, other)]
    torch.testing.assert_close(found.cpu().double(), wide[0] @ wide[1].t(), rtol=1e-6, atol=1e-6)
    assert product(quantised(one.to(NPU)), quantised(other.to(NPU))).dtype is torch.bfloat16


@needs_mx
@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda x: quantised(x.float()), "DT_FLOAT16,DT_BFLOAT16"),
        (lambda x: quantised(x[:0]), "empty"),
        (lambda x: quantised(x, axis=2), "axis is out of"),
        (lambda x: quantised(x, block_size=33), "block_size must be divisible"),
        (lambda x: quantised(x, round_mode="floor"), "round_mode must be rint"),
        (lambda x: quantised(x, dst_type=296), "not served"),
        (lambda x: product(quantised(x), quantised(x), group_sizes=[1, 1, 64]), "group_sizes"),
        (lambda x: product(quantised(x), quantised(x), output_dtype=None), "output_dtype"),
        (lambda x: product(quantised(x), quantised(x[:, :32])), "k dim"),
        (lambda x: product(quantised(x), (quantised(x)[0], quantised(x)[1][:1])), "the scales must be"),
        (lambda x: product(quantised(x), quantised(x), scale_dtype=None), "must be both float32"),
    ],
)
def test_limits(call: Any, said: str) -> None:
    x = torch.ones(4, 64, dtype=torch.bfloat16, device=NPU)
    with pytest.raises((RuntimeError, NotImplementedError), match=said):
        call(x)


@pytest.mark.skipif(HAS_MX, reason="the chip has them")
def test_other_chips_have_neither_operator_nor_recipe(backend: Backend) -> None:
    with pytest.raises(RuntimeError, match="has no such kernel, Ascend 950 has"):
        quantised(torch.ones(4, 64, dtype=torch.float16, device=NPU))
    assert backend.capabilities(NPU).fp8 == ()
    with pytest.raises(UnsupportedPolicy, match=r"Recipes of fp8 there: none|Levels there"):
        xamp.initialize(nn.Linear(64, 64).to(NPU), level="fp8", verbosity=0)


@needs_mx
def test_the_chip_has_mxfp8_and_no_other_recipe(backend: Backend) -> None:
    assert backend.capabilities(NPU).fp8 == ("mxfp8",)
    for recipe in ("tensorwise", "rowwise", "rowwise_gw_hp"):
        with pytest.raises(UnsupportedPolicy, match="Recipes of fp8 there: mxfp8"):
            xamp.initialize(nn.Linear(64, 64).to(NPU), level="fp8", fp8=recipe, verbosity=0)
    model = xamp.initialize(nn.Linear(64, 64).to(NPU), level="fp8", verbosity=0)
    assert xamp.session(model).policy.fp8 == "mxfp8"
