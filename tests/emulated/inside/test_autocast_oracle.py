"""torch_npu's own autocast list, from its binary, against what xamp's table believes of it.

No test of this file may call initialize: that registers xamp's rows beside torch_npu's.

Covers: xamp.casting.ops.table, xamp.op_dtypes.observe.
"""

from __future__ import annotations

import pytest
import torch
from gpu_kernels import GPU_KERNELS

from xamp.backends.npu.chips import Chip
from xamp.casting.ops.parts import HERE
from xamp.op_dtypes.observe import observe

# What CUDA's list has and torch_npu's has not.
ONLY_CUDA = {
    "_upsample_bicubic2d_aa",
    "_upsample_bilinear2d_aa",
    "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d",
    "linalg_vecdot",
    "rms_norm",
    "upsample_bicubic2d",
    "upsample_bilinear2d",
    "upsample_linear1d",
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_nearest3d",
    "upsample_trilinear3d",
    "vdot",
}
LAYERS = {f"{layer}.{kind}" for layer in ("gru", "lstm", "rnn_relu", "rnn_tanh") for kind in ("data", "input")}
REGISTERED = sorted(set(HERE) - ONLY_CUDA - LAYERS)
NO_KERNEL = set(GPU_KERNELS)  # torch_npu has entries for them


# Those that torch_npu has no kernel of its own for follow the rules of their parts: products, or a sum.
MADE_OF = {
    **dict.fromkeys(["gru.data", "rnn_relu.data", "rnn_relu.input", "rnn_tanh.data", "rnn_tanh.input"], "lower"),
    "linalg_vecdot": "fp32",
}
# The CPU, which computes here, has them in fp32 only.
NO_LOWER_KERNEL = {"_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa"}


def test_torch_npu_registers_what_the_table_has_but_these() -> None:
    listed = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastPrivateUse1")
    registered = {name.removeprefix("aten::") for name in listed}
    assert len(registered) == 104
    assert registered <= set(HERE)
    assert set(HERE) - registered == ONLY_CUDA | LAYERS


@pytest.mark.parametrize("overload", REGISTERED)
def test_a_listed_operator_gives_the_dtype_of_the_table(overload: str, chip: Chip) -> None:
    seen = [one for dtype in dtypes(chip) for one in observe(overload, "npu", dtype)]
    assert seen
    for one in seen:
        assert one.agrees or (one.agrees is None and overload in NO_KERNEL), one


@pytest.mark.parametrize("overload", sorted((ONLY_CUDA | LAYERS) - {"vdot"}))
def test_an_operator_that_is_not_listed_does_as_what_it_is_made_of(overload: str, chip: Chip) -> None:
    for dtype in dtypes(chip):
        for one in observe(overload, "npu", dtype):
            if overload in NO_LOWER_KERNEL and one.given == (dtype,):
                continue
            assert one.error is None, one
            wanted = {"lower": dtype, "fp32": torch.float32}.get(MADE_OF.get(overload, ""), one.given[0])
            assert set(one.dtypes) == {wanted}, one


def test_vdot_of_two_dtypes_is_refused_where_it_is_not_listed() -> None:
    mixed = [one for one in observe("vdot", "npu", torch.float16) if len(set(one.given)) == 2]
    assert len(mixed) == 2
    for one in mixed:
        assert one.error is not None
        assert "same dtype" in one.error[1]


def dtypes(chip: Chip) -> tuple[torch.dtype, ...]:
    return (torch.float16, torch.bfloat16) if chip.bf16 else (torch.float16,)
