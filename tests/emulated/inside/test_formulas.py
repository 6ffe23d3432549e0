"""Ascend's small operators that scripts call by name, forward and backward, against torch's on the CPU in float64.

Covers: backends.npu.emulation.formulas.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

NPU = torch.device("npu", 0)
torch_npu: Any = sys.modules["torch_npu"]


def seeded(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def turned(x: torch.Tensor, mode: str) -> torch.Tensor:
    if mode == "half":
        return torch.cat([-x[..., x.size(-1) // 2 :], x[..., : x.size(-1) // 2]], -1)
    made = torch.empty_like(x)
    made[..., ::2], made[..., 1::2] = -x[..., 1::2], x[..., ::2]
    return made


def swiglu(x: torch.Tensor) -> torch.Tensor:
    return functional.silu(x[:, :3]) * x[:, 3:]


LABELS = seeded(4, 6).softmax(-1)
Case = tuple[Callable[..., Any], Callable[..., Any], tuple[torch.Tensor, ...]]
CASES: dict[str, Case] = {
    "loss of labels": (
        lambda x: torch_npu.npu_softmax_cross_entropy_with_logits(x, LABELS.to(NPU, x.dtype)),
        lambda x: functional.cross_entropy(x, LABELS, reduction="none"),
        (seeded(4, 6),),
    ),
    "silu": (lambda x: torch_npu.npu_silu(x), functional.silu, (seeded(5, 3),)),
    "mish": (lambda x: torch_npu.npu_mish(x), functional.mish, (seeded(5, 3),)),
    "fast gelu": (lambda x: torch_npu.fast_gelu(x), lambda x: x * (1.702 * x).sigmoid(), (seeded(5, 3),)),
    "swiglu": (lambda x: torch_npu.npu_swiglu(x, dim=-1), swiglu, (seeded(4, 6),)),
    "linear": (
        lambda x, w, b: torch_npu.npu_linear(x, w, b),
        functional.linear,
        (seeded(4, 6), seeded(3, 6), seeded(3)),
    ),
    "batched product": (
        lambda x, y: torch_npu.npu_bmmV2(x, y, []),
        torch.matmul,
        (seeded(2, 3, 4), seeded(2, 4, 5)),
    ),
    "transpose, then shape": (
        lambda x: torch_npu.npu_confusion_transpose(x, (0, 2, 1, 3), (2, 3, 20), True),
        lambda x: x.permute(0, 2, 1, 3).reshape(2, 3, 20),
        (seeded(2, 4, 3, 5),),
    ),
    "shape, then transpose": (
        lambda x: torch_npu.npu_confusion_transpose(x, (0, 2, 1, 3), (2, 4, 3, 5), False),
        lambda x: x.reshape(2, 4, 3, 5).permute(0, 2, 1, 3),
        (seeded(2, 4, 15),),
    ),
    **{
        f"rotary, {mode}": (
            lambda x, cos, sin, mode=mode: torch_npu.npu_rotary_mul(x, cos, sin, mode),
            lambda x, cos, sin, mode=mode: x * cos + turned(x, mode) * sin,
            (seeded(2, 3, 4, 8), seeded(1, 3, 1, 8), seeded(1, 3, 1, 8) + 0.5),
        )
        for mode in ("half", "interleave")
    },
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_as_its_formula(name: str, dtype: torch.dtype) -> None:
    ours, theirs, given = CASES[name]
    of_fp16 = dtype is torch.float16 or name in ("linear", "batched product")  # of an older chip too
    near = 1e-2 if of_fp16 else 1e-5
    plain = [each.clone().requires_grad_() for each in given]
    moved = [each.to(NPU, dtype).requires_grad_() for each in given]
    wanted, made = theirs(*plain), ours(*moved)
    assert (made.dtype, made.shape) == (dtype, wanted.shape)
    grad = seeded(*wanted.shape)
    wanted.backward(grad)
    made.backward(grad.to(NPU, dtype))
    torch.testing.assert_close(made.cpu().double(), wanted.detach(), rtol=near, atol=near)
    for mine, right in zip(moved, plain, strict=True):
        assert mine.grad is not None
        assert right.grad is not None
        torch.testing.assert_close(mine.grad.cpu().double(), right.grad, rtol=near, atol=near)


def test_labels_become_rows() -> None:
    made = torch_npu.npu_one_hot(torch.tensor([2, 0], dtype=torch.int32, device=NPU), -1, 4, 0.9, 0.1)
    assert made.cpu().tolist() == torch.tensor([[0.1, 0.1, 0.9, 0.1], [0.9, 0.1, 0.1, 0.1]]).tolist()


def test_a_transpose_is_contiguous() -> None:
    made = torch_npu.npu_transpose(seeded(2, 3).float().to(NPU), (1, 0))
    assert made.is_contiguous()
    assert torch.equal(made.cpu(), seeded(2, 3).float().t())


def test_a_dtype_is_cast_by_its_number_and_the_gradient_back() -> None:
    x = torch.tensor([1.5, 65504.0], device=NPU, requires_grad=True)
    made = torch_npu.npu_dtype_cast(x, torch.float16)
    assert made.dtype == torch.float16
    assert made.tolist() == [1.5, 65504.0]
    made.backward(torch.tensor([0.5, 2.0], dtype=torch.float16, device=NPU))
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    assert x.grad.tolist() == [0.5, 2.0]
    assert torch_npu.npu_dtype_cast(x.detach(), torch.int32).dtype == torch.int32
    with pytest.raises(NotImplementedError, match="own dtype 290"):
        torch_npu.npu_dtype_cast(x.detach(), 290)
    with pytest.raises(NotImplementedError, match="own dtype 290"):
        torch_npu.npu_dtype_cast(x.detach(), torch.float16, input_dtype=290)
