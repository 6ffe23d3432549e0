"""Ascend's own fused kernels, computed by their formulas: attention and norms, forward and backward.

Covers: backends.npu.emulation.attention, backends.npu.emulation.norms.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from xamp.backends.npu.chips import Chip

NPU = torch.device("npu", 0)
torch_npu: Any = sys.modules["torch_npu"]
BATCH, HEADS, ROWS, COLUMNS, CHANNELS = 2, 4, 5, 7, 8
SCALE = 1 / math.sqrt(CHANNELS)


def seeded(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def in_layout(x: torch.Tensor, layout: str) -> torch.Tensor:
    """``x``, (batch, head, place, channel), as the operator takes it."""
    if layout == "TND":
        return x.transpose(1, 2).flatten(0, 1).contiguous()
    order = {"BNSD": (0, 1, 2, 3), "BSND": (0, 2, 1, 3), "BSH": (0, 2, 1, 3), "SBH": (2, 0, 1, 3)}[layout]
    made = x.permute(order)
    return (made.flatten(2) if layout.endswith("H") else made).contiguous()


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor | None, pse: torch.Tensor | None
) -> torch.Tensor:
    k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))
    scores = q @ k.mT if pse is None else q @ k.mT + pse
    scores = scores * SCALE
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ v


def band(rows: int, columns: int, offset: int) -> torch.Tensor:
    return torch.ones(rows, columns, dtype=torch.bool).triu(offset)


MASKS: dict[str, tuple[int, torch.Tensor | None, torch.Tensor | None]] = {
    "no mask": (0, None, None),
    "a mask": (0, band(ROWS, COLUMNS, 3), band(ROWS, COLUMNS, 3)),
    "all of a mask": (1, band(ROWS, COLUMNS, 2), band(ROWS, COLUMNS, 2)),
    "left up": (2, band(2048, 2048, 1), band(ROWS, COLUMNS, 1)),
    "right down": (3, band(2048, 2048, 1), band(ROWS, COLUMNS, 1 + COLUMNS - ROWS)),
}


@pytest.fixture(autouse=True)
def _has_it(request: pytest.FixtureRequest, chip: Chip) -> None:
    if "attention" in request.node.name and not chip.bf16:
        pytest.skip("the chip has no such kernel")


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH", "SBH", "TND"])
def test_attention_and_its_gradients(layout: str, mask: str) -> None:
    mode, given, hidden = MASKS[mask]
    key_heads = 2 if layout in ("BNSD", "TND") else HEADS
    sizes = (BATCH, HEADS, ROWS, CHANNELS), (BATCH, key_heads, COLUMNS, CHANNELS), (BATCH, key_heads, COLUMNS, CHANNELS)
    plain = [(seeded(*size) * (1 + i / 4)).requires_grad_() for i, size in enumerate(sizes)]
    wanted = reference(plain[0], plain[1], plain[2], hidden, None)
    grad = seeded(*wanted.shape)
    wanted.backward(grad)
    moved = [in_layout(x.detach(), layout).float().to(NPU).requires_grad_() for x in plain]
    options: dict[str, Any] = {"scale": SCALE, "sparse_mode": mode}
    if given is not None:
        options["atten_mask"] = given.to(NPU)
    if layout == "TND":
        options["actual_seq_qlen"] = [ROWS * (i + 1) for i in range(BATCH)]
        options["actual_seq_kvlen"] = [COLUMNS * (i + 1) for i in range(BATCH)]
    made = torch_npu.npu_fusion_attention(*moved, HEADS, layout, **options)
    assert made[1].shape == made[2].shape == ((BATCH, HEADS, ROWS, 8) if layout != "TND" else (BATCH * ROWS, HEADS, 8))
    assert made[1].dtype == torch.float32
    made[0].backward(in_layout(grad, layout).float().to(NPU))
    torch.testing.assert_close(made[0].cpu().double(), in_layout(wanted.detach(), layout), rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(moved, plain, strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(mine.grad.cpu().double(), in_layout(theirs.grad, layout), rtol=1e-4, atol=1e-5)


def test_attention_adds_a_position_encoding_before_it_scales() -> None:
    q, k, v = (seeded(1, 2, ROWS, CHANNELS) * (1 + i) for i in range(3))
    pse = seeded(1, 2, ROWS, ROWS)
    found = torch_npu.npu_fusion_attention(
        *(x.half().to(NPU) for x in (q, k, v)), 2, "BNSD", pse=pse.half().to(NPU), scale=SCALE
    )[0]
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.cpu().double(), reference(q, k, v, None, pse), rtol=2e-2, atol=2e-2)


def test_attentions_dropout_is_the_same_in_the_backward_and_random() -> None:
    q = seeded(1, 1, 64, CHANNELS).float().to(NPU)
    outs = []
    for _ in range(2):
        value = torch.eye(64, device=NPU)[None, None].requires_grad_()
        out = torch_npu.npu_fusion_attention(q, q, value, 1, "BNSD", keep_prob=0.5)[0]
        out.sum().backward()
        assert value.grad is not None
        # With an identity for values the result is the dropped weights; each column's sum is a row of the gradient.
        torch.testing.assert_close(out.detach().sum(2)[0, 0], value.grad[0, 0, :, 0], rtol=1e-4, atol=1e-4)
        outs.append(out.detach())
    assert not torch.equal(outs[0], outs[1])
    assert 0.4 < float((outs[0] == 0).float().mean()) < 0.6


@pytest.mark.parametrize("masked", [False, True])
def test_attention_of_inference_is_the_forward(masked: bool) -> None:
    q, k, v = (seeded(1, HEADS, ROWS, CHANNELS) * (1 + i / 4) for i in range(3))
    hidden = band(ROWS, ROWS, 1) if masked else None
    options: dict[str, Any] = {"num_heads": HEADS, "input_layout": "BSH", "scale_value": SCALE}
    if hidden is not None:
        options["atten_mask"] = hidden.to(NPU)
    made = torch_npu.npu_prompt_flash_attention(*(in_layout(x, "BSH").half().to(NPU) for x in (q, k, v)), **options)
    assert made.dtype == torch.float16
    wanted = in_layout(reference(q, k, v, hidden, None), "BSH")
    torch.testing.assert_close(made.cpu().double(), wanted, rtol=1e-2, atol=1e-2)
    moved = [(16 * x).half().to(NPU) for x in (q, k, v)]
    made = torch_npu.npu_prompt_flash_attention(*moved, num_heads=HEADS, input_layout="BNSD", scale_value=8.0)
    scores = (moved[0] @ moved[1].mT).float() * 8.0
    torch.testing.assert_close(made, scores.softmax(-1).half() @ moved[2], rtol=1e-3, atol=1e-3)
    with pytest.raises(NotImplementedError, match="npu_prompt_flash_attention with padding_mask is not served"):
        torch_npu.npu_prompt_flash_attention(*[torch.ones(1, 4, 8, device=NPU)] * 3, padding_mask=made)


@pytest.mark.parametrize("option", ["prefix", "sink", "padding_mask"])
def test_what_attention_does_not_serve_is_refused(option: str) -> None:
    given: Any = [3] if option == "prefix" else torch.zeros(1, device=NPU)
    with pytest.raises(NotImplementedError, match=f"npu_fusion_attention with {option} is not served"):
        torch_npu.npu_fusion_attention(*[torch.ones(1, 1, 4, 8, device=NPU)] * 3, 1, "BNSD", **{option: given})


def rms(x: torch.Tensor, g: torch.Tensor, shift: float = 0.0) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (g + shift)


Norm = Callable[..., torch.Tensor]
# Ours on the card, the formula in float64; of input, residual, gamma and beta.
NORMS: dict[str, tuple[Norm, Norm]] = {
    "rms": (lambda x, r, g, b: torch_npu.npu_rms_norm(x, g)[0], lambda x, r, g, b: rms(x, g)),
    "add layer": (
        lambda x, r, g, b: torch_npu.npu_add_layer_norm(x, r, g, b)[0],
        lambda x, r, g, b: F.layer_norm(x + r, (6,), g, b, 1e-5),
    ),
    "deep": (
        lambda x, r, g, b: torch_npu.npu_deep_norm(x, r, b, g, 0.3)[2],
        lambda x, r, g, b: F.layer_norm(0.3 * x + r, (6,), g, b, 1e-6),
    ),
    "group swish": (
        lambda x, r, g, b: torch_npu.npu_group_norm_swish(x.mT.contiguous(), 3, g, b, swish_scale=0.5)[0],
        lambda x, r, g, b: (lambda y: y * (0.5 * y).sigmoid())(F.group_norm(x.mT, 3, g, b)),
    ),
}
ALONE: dict[str, tuple[Norm, Norm]] = {
    "gemma": (lambda x, r, g, b: torch_npu.npu_gemma_rms_norm(x, g)[0], lambda x, r, g, b: rms(x, g, 1.0)),
    "add rms": (lambda x, r, g, b: torch_npu.npu_add_rms_norm(x, r, g)[0], lambda x, r, g, b: rms(x + r, g)),
    "eval": (
        lambda x, r, g, b: torch_npu.npu_layer_norm_eval(x, (6,), g, b),
        lambda x, r, g, b: F.layer_norm(x, (6,), g, b, 1e-5),
    ),
    "group silu": (
        lambda x, r, g, b: torch_npu.npu_group_norm_silu(x.mT.contiguous(), g, b, 3)[0],
        lambda x, r, g, b: F.silu(F.group_norm(x.mT, 3, g, b)),
    ),
}


@pytest.mark.parametrize("name", [*NORMS, *ALONE])
def test_a_fused_norm_and_its_gradients(name: str) -> None:
    mine, formula = {**NORMS, **ALONE}[name]
    plain = [seeded(2, 5, 6), seeded(2, 5, 6) / 2, 1 + seeded(6) / 4, seeded(6)]
    moved = [x.float().to(NPU).requires_grad_(name in NORMS) for x in plain]
    plain = [x.requires_grad_() for x in plain]
    wanted, found = formula(*plain), mine(*moved)
    torch.testing.assert_close(found.detach().cpu().double(), wanted.detach(), rtol=1e-5, atol=1e-5)
    lower = mine(*(x.detach().half() for x in moved))
    assert lower.dtype == torch.float16
    torch.testing.assert_close(lower.cpu().double(), wanted.detach(), rtol=2e-2, atol=2e-2)
    if name not in NORMS:
        return
    grad = seeded(*wanted.shape)
    wanted.backward(grad)
    found.backward(grad.float().to(NPU))
    for a, b in zip(moved, plain, strict=True):
        if b.grad is not None:
            assert a.grad is not None
            torch.testing.assert_close(a.grad.cpu().double(), b.grad, rtol=1e-4, atol=1e-5)
