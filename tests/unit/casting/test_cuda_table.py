"""The cast table of CUDA's autocast inside xamp's regions, on fake tensors where there is no GPU.

``torch.autocast("cuda")`` switches itself off on a build without CUDA. xamp's regions set the state directly, so the
dispatcher's own CUDA table decides here what each operator computes in, as it does on the card. The whole table is
asked in test_op_table.py.

Covers: xamp.casting.forward, xamp.casting.region.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from xamp.casting.forward import enter_policy
from xamp.casting.region import Region

HALF, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
REGIONS = {"O1": HALF, "O4": BF16}
Op = Callable[[torch.Tensor], torch.Tensor]


class Runs(nn.Module):
    """Runs one operator on (4, 4, 4, 4) of the dtype it is given."""

    def __init__(self, op: Op) -> None:
        super().__init__()
        self.op = op
        self.made: torch.dtype | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.op(x)
        self.made = made.dtype
        return made


def ran_in(op: Op, given: torch.dtype, region: Region) -> torch.dtype:
    """The dtype of the result of ``op`` on a fake CUDA tensor of dtype ``given``, in ``region``."""
    module = Runs(op)
    leave = enter_policy(module, region)
    try:
        with FakeTensorMode():
            out = module(torch.ones(4, 4, 4, 4, device="cuda", dtype=given))
    finally:
        leave()
    assert out.device.type == "cuda"
    assert not torch.is_autocast_enabled("cuda"), "the region left autocast on"
    if region.output_dtype is not None and given != torch.float64:
        assert out.dtype == region.output_dtype
    assert module.made is not None
    return module.made


def region(level: str, **changes: Any) -> Region:
    return Region("cuda", REGIONS[level], None, changes.get("output_dtype", FP32))


def matrix(x: torch.Tensor) -> torch.Tensor:
    """Taking a slice of a fake CUDA tensor needs a CUDA build."""
    return torch.ones(4, 4, device=x.device, dtype=x.dtype)


LOWER: dict[str, Op] = {
    "matmul": lambda x: x @ x,
    "linear": lambda x: F.linear(x, matrix(x)),
    "conv2d": lambda x: F.conv2d(x, x),
    "conv_transpose2d": lambda x: F.conv_transpose2d(x, x),
    "einsum": lambda x: torch.einsum("abcd,abce->abde", x, x),
    "scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(x, x, x),
}
SINGLE: dict[str, Op] = {
    "softmax": lambda x: F.softmax(x, dim=-1),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "sum": lambda x: x.sum(),
    "exp": lambda x: x.exp(),
    "pow": lambda x: x.pow(2.0),
    "mse_loss": lambda x: F.mse_loss(x, x),
    "cross_entropy": lambda x: F.cross_entropy(matrix(x), torch.zeros(4, dtype=torch.int64, device=x.device)),
}
AS_GIVEN: dict[str, Op] = {
    "relu": lambda x: x.relu(),
    "add": lambda x: x + x,
    "gelu": lambda x: F.gelu(x),
}
PROMOTING: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cat": lambda a, b: torch.cat([a, b]),
    "addcmul": lambda a, b: torch.addcmul(a, b, b),
    "index_put": lambda a, b: a.index_put((torch.zeros(4, dtype=torch.int64, device=a.device),), b),
}


@pytest.mark.parametrize("level", REGIONS)
@pytest.mark.parametrize("name", LOWER)
def test_runs_in_the_lower_dtype(name: str, level: str) -> None:
    for given in (FP32, HALF, BF16):
        assert ran_in(LOWER[name], given, region(level)) == REGIONS[level]


@pytest.mark.parametrize("level", REGIONS)
@pytest.mark.parametrize("name", SINGLE)
def test_runs_in_fp32(name: str, level: str) -> None:
    for given in (FP32, REGIONS[level]):
        assert ran_in(SINGLE[name], given, region(level)) == FP32


@pytest.mark.parametrize("level", REGIONS)
def test_runs_in_the_dtype_it_is_given(level: str) -> None:
    for name, op in AS_GIVEN.items():
        for given in (FP32, REGIONS[level]):
            assert ran_in(op, given, region(level)) == given, name


@pytest.mark.parametrize("level", REGIONS)
@pytest.mark.parametrize("name", PROMOTING)
def test_mixed_inputs_run_in_the_widest(name: str, level: str) -> None:
    op, lower = PROMOTING[name], REGIONS[level]
    assert ran_in(lambda x: op(x, x.to(lower)), FP32, region(level)) == FP32
    assert ran_in(lambda x: op(x.float(), x), lower, region(level)) == FP32
    assert ran_in(lambda x: op(x, x), lower, region(level)) == lower


@pytest.mark.parametrize("level", REGIONS)
def test_fp64_is_never_cast(level: str) -> None:
    for op in (*LOWER.values(), *SINGLE.values()):
        assert ran_in(op, torch.float64, region(level)) == torch.float64


@pytest.mark.parametrize("level", REGIONS)
def test_binary_cross_entropy_is_refused_as_on_the_card(level: str) -> None:
    with pytest.raises(RuntimeError, match="unsafe to autocast"):
        ran_in(lambda x: F.binary_cross_entropy(x, x), FP32, region(level))
    assert not torch.is_autocast_enabled("cuda")


@pytest.mark.parametrize("output", [HALF, BF16, FP32, None])
def test_results_leave_in_the_regions_output_dtype(output: torch.dtype | None) -> None:
    module = Runs(lambda x: x @ x)
    leave = enter_policy(module, region("O1", output_dtype=output))
    with FakeTensorMode():
        assert module(torch.ones(2, 2, device="cuda")).dtype == (output or HALF)
    leave()


def test_a_region_that_casts_nothing_switches_a_foreign_one_off() -> None:
    """As O0, O2 and kept modules do."""
    module = Runs(lambda x: x @ x)
    leave = enter_policy(module, Region("cuda", None, FP32, FP32))
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    try:
        with FakeTensorMode():
            x = torch.ones(2, 2, device="cuda")
            assert (x @ x).dtype == before
            module(x.half())
            assert module.made == FP32
            assert (x @ x).dtype == before
            assert torch.is_autocast_enabled("cuda")
            assert torch.get_autocast_dtype("cuda") == before
    finally:
        torch.set_autocast_enabled("cuda", False)
        leave()


def test_without_a_region_nothing_is_cast() -> None:
    with FakeTensorMode():
        x = torch.ones(4, 4, 4, 4, device="cuda")
        for op in LOWER.values():
            assert op(x).dtype == FP32
