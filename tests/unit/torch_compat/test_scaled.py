"""Casts to fp8 and products, against every number of a format written out, and sums in fp64.

Covers: xamp.torch_compat.scaled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from xamp.torch_compat import scaled
from xamp.torch_compat.torch_private import fp8

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = {E4M3: (3, 7, 448.0), E5M2: (2, 15, 57344.0)}  # bits of the mantissa, bias, largest number
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def tried() -> Iterator[None]:
    scaled.tried(CPU)
    yield
    scaled.tried(CPU)


def nearest(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers of the format nearest to ``values``, ties to even, by its step at each size; in fp64."""
    mantissa, bias, most = FORMATS[dtype]
    wide = values.double()
    exponent = torch.floor(torch.log2(wide.abs().clamp(min=2.0 ** (1 - bias))))
    step = torch.exp2(exponent - mantissa)
    return (torch.round(wide / step) * step).clamp(-most, most)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Values of very different sizes in each row and column."""
    made = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.randint(-12, 12, shape, generator=made).float())
    return torch.randn(*shape, generator=made) * sizes


@pytest.mark.parametrize("dtype", FORMATS, ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_one_scale_for_all_takes_the_largest_value_to_the_largest_number(
    dtype: torch.dtype, given: torch.dtype
) -> None:
    matrix = numbers(24, 40).to(given)
    made = scaled.quantise(matrix, dtype, "tensor", 1)
    scale = torch.tensor(FORMATS[dtype][2] / matrix.double().abs().max().item()).float()
    assert torch.equal(made.scale, scale)
    assert torch.equal(made.values.double(), nearest(matrix.float() * scale, dtype))
    assert made.values.float().abs().max() == FORMATS[dtype][2]


@pytest.mark.parametrize("axis", [0, 1])
def test_a_scale_for_each_row_is_a_power_of_two(axis: int) -> None:
    matrix = numbers(24, 40)
    made = scaled.quantise(matrix, E4M3, "row", axis)
    exact = 448.0 / matrix.double().abs().amax(axis, keepdim=True)
    scale = torch.exp2(torch.floor(torch.log2(exact)))
    assert made.scale.shape == ((1, 40) if axis == 0 else (24, 1))
    assert torch.equal(made.scale.double(), scale)
    assert torch.equal(made.values.double(), nearest(matrix.double() * scale, E4M3))


def test_one_scale_may_be_a_power_of_two() -> None:
    matrix = numbers(24, 40)
    made = scaled.quantise(matrix, E4M3, "tensor_power", 1)
    assert made.scale.item() == 2.0 ** math.floor(math.log2(448.0 / matrix.abs().max().item()))


@pytest.mark.parametrize("dtype", FORMATS, ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("length", [32, 80, 7])
def test_blocks_are_those_of_the_ocp(axis: int, length: int, dtype: torch.dtype) -> None:
    """Its rule: the power of two of the largest value by that of the format's largest number, rounded down."""
    rows = numbers(5, length)
    made = scaled.quantise(rows if axis == 1 else rows.t(), dtype, "block", axis)
    values, scales = (made.values, made.scale) if axis == 1 else (made.values.t(), made.scale.t())
    top = {E4M3: 8, E5M2: 15}[dtype]
    assert scales.dtype == torch.uint8
    scales = scales.contiguous().view(torch.float8_e8m0fnu)
    assert scales.shape == (5, -(-length // 32))
    for row in range(5):
        for block in range(scales.shape[1]):
            part = rows[row, 32 * block : 32 * block + 32].double()
            exponent = math.floor(math.log2(part.abs().max().item())) - top
            assert scales[row, block].float().item() == 2.0**exponent
            wanted = torch.zeros(32, dtype=torch.float64)
            wanted[: len(part)] = nearest(part * 2.0**-exponent, dtype)
            assert torch.equal(values[row, 32 * block : 32 * block + 32].double(), wanted)


def test_the_smallest_and_the_largest_scale_of_a_block() -> None:
    rows = torch.tensor([[2.0**-130] * 32, [torch.finfo(torch.float32).max] * 32, [0.0] * 32])
    made = scaled.quantise(rows, E4M3, "block", 1)
    assert made.scale.flatten().tolist() == [0, 254 - 8, 0]
    assert torch.equal(made.values[1].float(), torch.full((32,), 448.0))
    assert torch.equal(made.values[2].float(), torch.zeros(32))
    assert torch.equal(made.wide()[0], rows[0])


@pytest.mark.parametrize("scaling", ["tensor", "tensor_power", "row"])
def test_zeros_stay_zeros(scaling: str) -> None:
    made = scaled.quantise(torch.zeros(16, 16), E4M3, scaling, 1)
    assert made.scale.isfinite().all()
    assert torch.equal(made.wide(), torch.zeros(16, 16))


@pytest.mark.parametrize("scaling", ["tensor", "row", "block"])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_makes_nan(scaling: str, value: float) -> None:
    matrix = numbers(16, 64)
    matrix[3, 40] = value
    wide = scaled.quantise(matrix, E4M3, scaling, 1).wide()
    spoilt = {"tensor": wide, "row": wide[3], "block": wide[3, 32:]}[scaling]
    assert spoilt.isnan().all()
    assert wide.isnan().sum() == spoilt.numel()


def test_no_value_is_cast_to_more_than_the_largest_number() -> None:
    """A scale is rounded, so the largest product may be a little larger than what it should be."""
    largest = torch.tensor([[3.0000002]])
    for value in (largest, largest * 1.37, largest / 1.9):
        assert scaled.quantise(value, E5M2, "tensor", 1).values.float().item() == 57344.0


def test_a_turned_matrix_is_the_transposed_one() -> None:
    matrix = numbers(24, 64)
    for scaling in ("tensor", "row", "block"):
        made = scaled.quantise(matrix, E4M3, scaling, 1)
        assert torch.equal(made.turned().wide(), made.wide().t())
        assert made.turned().axis == 0


PAIRS = [("tensor", "tensor"), ("row", "row"), ("row", "tensor_power"), ("block", "block")]


@pytest.mark.parametrize("runs", [True, False], ids=["torch's product", "in fp32"])
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("scalings", PAIRS, ids="-".join)
def test_products_are_those_of_the_quantised_values(
    scalings: tuple[str, str], fast: bool, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fast and scalings == ("row", "tensor_power"):
        return  # no recipe multiplies so
    monkeypatch.setattr(scaled, "_runs", {key: found and runs for key, found in scaled._runs.items()})
    left = scaled.quantise(numbers(24, 64), E4M3, scalings[0], 1)
    right = scaled.quantise(numbers(64, 48, seed=1), E4M3, scalings[1], 0)
    made = scaled.multiply(left, right, torch.bfloat16, fast)
    exact = left.wide().double() @ right.wide().double()
    sizes = left.wide().double().abs() @ right.wide().double().abs()
    assert made.dtype == torch.bfloat16
    assert ((made.double() - exact).abs() <= 2.0**-7 * exact.abs() + 64 * 2.0**-24 * sizes).all()


def test_torchs_product_is_called_where_it_was_found_right(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []

    def counting(*args: torch.Tensor, **options: Any) -> Any:
        calls.append(tuple(options["scale_a"].shape))
        return original(*args, **options)

    original: Any = fp8.scaled_mm
    if not scaled.runs("cpu", "row"):
        pytest.skip("this torch multiplies no fp8 on a CPU")
    monkeypatch.setattr(fp8, "scaled_mm", counting)
    for scaling in ("tensor", "row"):
        pair = (
            scaled.quantise(numbers(16, 32), E4M3, scaling, 1),
            scaled.quantise(numbers(32, 16), E4M3, scaling, 0),
        )
        for fast in (True, False):
            scaled.multiply(*pair, torch.bfloat16, fast)
    assert calls == [(), (), (16, 1), ()]  # exact sums: the other kernel, and the scales afterwards


def test_a_wrong_product_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    original = fp8.scaled_mm
    monkeypatch.setattr(fp8, "scaled_mm", lambda *args, **options: original(*args, **options) + 1)
    assert not any(scaled.tried(CPU).values())
    assert not scaled.runs("cpu", "tensor")


def test_a_product_that_torch_refuses_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, scale_a: torch.Tensor, **__: object) -> torch.Tensor:
        if scale_a.dim():
            raise RuntimeError("not by row")
        made: torch.Tensor = original(*_, scale_a=scale_a, **__)
        return made

    original: Any = fp8.scaled_mm
    there = scaled.tried(CPU)
    monkeypatch.setattr(fp8, "scaled_mm", refuse)
    assert scaled.tried(CPU) == {**there, "row": False}


def test_a_device_that_was_not_tried_multiplies_in_fp32() -> None:
    assert not scaled.runs("meta", "tensor")


def test_the_order_of_the_scales_of_blocks() -> None:
    """Of the manual: in each tile of 128 rows by 4 blocks, 16 * (row % 32) + 4 * (row // 32) + block."""
    rows, blocks = 200, 7
    numbers = (torch.arange(rows * blocks) % 251).to(torch.uint8).reshape(rows, blocks)
    made = scaled.tiled(numbers)
    wanted = torch.zeros(256 * 8, dtype=torch.uint8)
    for row in range(rows):
        for block in range(blocks):
            tile = 2 * (row // 128) + block // 4
            wanted[512 * tile + 16 * (row % 32) + 4 * (row % 128 // 32) + block % 4] = numbers[row, block]
    assert torch.equal(made, wanted)


@pytest.mark.parametrize(("length", "asked"), [(24, 32), (32, 32), (40, 48)])
def test_lengths_that_a_device_cannot_sum_over_are_filled_with_zeros(
    length: int, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, ...]] = []

    def strict(left: torch.Tensor, right: torch.Tensor, **options: Any) -> torch.Tensor:
        seen.append((left.shape[1], right.shape[0]))
        assert left.stride() == (left.shape[1], 1)
        assert right.stride() == (1, right.shape[0])
        sums: torch.Tensor = left.float() @ right.float() * options["scale_a"] * options["scale_b"]
        return sums.to(options["out_dtype"])

    monkeypatch.setattr(fp8, "scaled_mm", strict)
    monkeypatch.setattr(scaled, "_runs", {("cpu", "tensor"): True})
    left, right = (scaled.quantise(numbers(*shape), E4M3, "tensor", 1) for shape in ((16, length), (48, length)))
    made = scaled.multiply(left, right.turned(), torch.bfloat16, False)
    assert seen == [(asked, asked)]
    assert torch.allclose(made.float(), left.wide() @ right.wide().t(), rtol=2.0**-7)


def test_blocks_are_multiplied_by_torch_where_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def fake(left: torch.Tensor, right: torch.Tensor, **options: Any) -> torch.Tensor:
        seen.append((left.shape, right.shape, options["scale_a"], options["scale_b"]))
        return torch.zeros(left.shape[0], right.shape[1], dtype=options["out_dtype"])

    monkeypatch.setattr(fp8, "scaled_mm", fake)
    monkeypatch.setattr(scaled, "_runs", {("cpu", "block"): True})
    left, right = (scaled.quantise(numbers(*shape), E4M3, "block", 1) for shape in ((16, 40), (48, 40)))
    scaled.multiply(left, right.turned(), torch.bfloat16, False)
    ((first, second, one, other),) = seen
    assert (first, second) == ((16, 64), (64, 48))
    for scale, operand in ((one, left), (other, right)):
        assert scale.dtype == torch.float8_e8m0fnu
        assert torch.equal(scale.view(torch.uint8), scaled.tiled(operand.scale))


def test_what_is_strict_multiplies_nothing_in_fp32() -> None:
    left, right = (scaled.quantise(numbers(*shape), E4M3, "block", 1) for shape in ((16, 32), (48, 32)))
    with scaled.only_torchs(), pytest.raises(NotImplementedError, match="no product in fp8 there with scales by block"):
        scaled.multiply(left, right.turned(), torch.bfloat16, False)
    assert scaled.multiply(left, right.turned(), torch.bfloat16, False).shape == (16, 48)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fnuz, torch.float8_e5m2fnuz])
def test_formats_without_a_negative_zero_have_their_own_largest_number(dtype: torch.dtype) -> None:
    matrix = numbers(16, 32)
    made = scaled.quantise(matrix, dtype, "tensor", 1)
    most = {torch.float8_e4m3fnuz: 240.0, torch.float8_e5m2fnuz: 57344.0}[dtype]
    assert made.values.float().abs().max() == most
    assert (made.wide() - matrix).abs().max() <= matrix.abs().max() / 8


@pytest.mark.parametrize("scaling", ["tensor", "row", "block"])
def test_a_processor_with_amx_multiplies_in_fp32(scaling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There torch's product is a reference kernel of oneDNN, which takes a thousand times as long."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("torch's product was called")

    monkeypatch.setattr(fp8, "has_amx", lambda: True)
    assert not any(scaled.tried(CPU).values())
    monkeypatch.setattr(fp8, "scaled_mm", refuse)
    left = scaled.quantise(numbers(16, 64), E4M3, scaling, 1)
    right = scaled.quantise(numbers(64, 48), E4M3, scaling, 0)
    made, exact = scaled.multiply(left, right, torch.bfloat16, True), left.wide().double() @ right.wide().double()
    assert made.dtype is torch.bfloat16
    assert ((made.double() - exact).abs() <= 2.0**-8 * exact.abs() + 1e-5).all()
