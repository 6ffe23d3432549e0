"""A grid that tests Apex's O1: expressions, their inputs, and the dtypes of their results.

``tests/data/apex/o1_grid.json`` holds the results of the last ``apex.amp``, moved to CPU tensors, for each cell.
``run`` gives the results of any other ``amp`` for the same cells.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

PAIRS = {
    "half,half": (torch.float16, torch.float16),
    "float,float": (torch.float32, torch.float32),
    "half,float": (torch.float16, torch.float32),
}


def filled(*shape: int, step: int = 3, modulus: int = 7, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Multiples of 1/8 from 0.125 to 0.875: exact in every dtype, and valid for acos, log, binary_cross_entropy."""
    count = 1
    for size in shape:
        count *= size
    return (torch.arange(count) * step).remainder(modulus).add(1).to(torch.float64).div(8).view(shape).to(dtype)


def namespace(first: torch.dtype, second: torch.dtype) -> dict[str, Any]:
    """The names that expressions may use. It is made anew for each cell, before casts are on.

    Args:
        first: dtype of ``a v m x s t``.
        second: dtype of ``b u n y``, which have the shapes of ``a v m x``.
    """
    return {
        "torch": torch,
        "F": nn.functional,
        "nn": nn,
        "op": operator,
        "a": filled(4, 4, dtype=first),
        "b": filled(4, 4, step=2, modulus=5, dtype=second),
        "v": filled(4, dtype=first),
        "u": filled(4, step=2, dtype=second),
        "m": filled(2, 4, 4, dtype=first),
        "n": filled(2, 4, 4, step=2, dtype=second),
        "x": filled(2, 4, 6, 6, dtype=first),
        "y": filled(2, 4, 6, 6, step=2, dtype=second),
        "s": filled(2, 4, 6, dtype=first),  # a sequence: batch, channels, length
        "t": filled(1, 4, 3, 3, 3, dtype=first),  # a volume
        "z": torch.tensor(0.5, dtype=second),  # no dimension
        "w": nn.Parameter(filled(4, 4, step=5)),
        "wv": nn.Parameter(filled(4, step=5)),
        "k": nn.Parameter(filled(3, 4, 3, 3)),  # of a 2-d convolution
        "d": filled(4, 4, dtype=torch.float64),
        "h": filled(4, 4, dtype=torch.bfloat16),
        "labels": torch.tensor([0, 2, 1, 3]),
        "signs": torch.tensor([1, -1, 1, -1]),
        "packed": nn.utils.rnn.pack_padded_sequence(filled(3, 2, 4, dtype=first), torch.tensor([3, 2])),
        "points": filled(2, 3, 3, 2, dtype=second),
    }


EXPRESSIONS = {
    "FP16, functional": (
        "F.linear(a, w)",
        "F.linear(a, b)",
        "F.linear(a, w, wv)",
        "F.linear(a, w, u)",
        "F.linear(input=a, weight=w, bias=wv)",
        "nn.Linear(4, 4)(a)",
        "F.conv1d(s, k[:, :, 0])",
        "F.conv2d(x, k)",
        "F.conv2d(x, y[:, :, :3, :3])",
        "F.conv2d(x, k, stride=(2, 2))",
        "nn.Conv1d(4, 3, 3)(s)",
        "nn.Conv2d(4, 3, 3)(x)",
        "nn.Conv3d(4, 2, 3)(t)",
        "nn.ConvTranspose1d(4, 2, 3)(s)",
        "nn.ConvTranspose2d(4, 2, 3)(x)",
        "nn.ConvTranspose3d(4, 2, 2)(t)",
        "F.conv_tbc(m, n[:, :, :3].contiguous(), u[:3])",
    ),
    "FP16, torch": (
        "torch.conv1d(s, k[:, :, 0])",
        "torch.conv2d(x, k)",
        "torch.conv_transpose2d(x, y.transpose(0, 1)[:, :, :3, :3])",
        "torch.prelu(a, wv)",
        "torch.prelu(a, u)",
        "torch.addmm(a, b, a)",
        "torch.addmm(input=a, mat1=b, mat2=w)",
        "torch.addmv(v, a, u)",
        "torch.addr(a, v, u)",
        "torch.matmul(a, b)",
        "torch.matmul(m, w)",
        "torch.mm(a, b)",
        "torch.mm(a, mat2=b)",
        "torch.mm(a, b, out=torch.empty(4, 4))",
        "torch.mv(a, u)",
        "torch.bmm(m, n)",
        "torch.baddbmm(m, n, m)",
        "torch.addbmm(a, m, n)",
    ),
    "FP16, methods": (
        "a @ b",
        "a @ w",
        "op.imatmul(a, b)",
        "b.__rmatmul__(a)",
        "a.matmul(b)",
        "a.mm(b)",
        "a.mv(u)",
        "a.addmm(b, a)",
        "v.addmv(a, u)",
        "a.addr(v, u)",
        "a.prelu(u)",
        "m.bmm(n)",
        "m.baddbmm(n, m)",
        "a.addbmm(m, n)",
    ),
    "FP32, functional": (
        "F.interpolate(x, scale_factor=2.0)",
        "F.grid_sample(x, points, align_corners=False)",
        "F.softplus(a)",
        "F.softmin(a, dim=1)",
        "F.log_softmax(a, dim=1)",
        "F.softmax(a, dim=1)",
        "F.softmax(input=a, dim=1)",
        "F.gelu(a)",
        "F.layer_norm(a, (4,), u)",
        "nn.LayerNorm(4)(a)",
        "F.group_norm(x, 2, u)",
        "nn.GroupNorm(2, 4)(x)",
        "F.local_response_norm(x, 2)",
        "F.normalize(a)",
        "F.cosine_similarity(a, b)",
        "F.poisson_nll_loss(a, b)",
        "F.cosine_embedding_loss(a, b, signs)",
        "F.cross_entropy(a, labels)",
        "F.hinge_embedding_loss(a, b)",
        "F.kl_div(a, b, reduction='batchmean')",
        "F.l1_loss(a, b)",
        "F.mse_loss(a, b)",
        "nn.MSELoss()(a, b)",
        "F.margin_ranking_loss(v, u, signs)",
        "F.multilabel_margin_loss(v, labels)",
        "F.multilabel_soft_margin_loss(a, b)",
        "F.multi_margin_loss(a, labels)",
        "F.nll_loss(a, labels)",
        "F.binary_cross_entropy_with_logits(a, b)",
        "F.smooth_l1_loss(a, b)",
        "F.soft_margin_loss(v, signs)",
        "F.triplet_margin_loss(a, b, a)",
        "F.ctc_loss(m, torch.tensor([[1, 2]] * 4), torch.tensor([2] * 4), torch.tensor([1] * 4))",
    ),
    "FP32, torch": (
        "torch.acos(a)",
        "torch.asin(a)",
        "torch.cosh(a)",
        "torch.erfinv(a)",
        "torch.exp(a)",
        "torch.exp(input=a)",
        "torch.exp(a, out=torch.empty(4, 4, dtype=torch.float16))",
        "torch.expm1(a)",
        "torch.log(a)",
        "torch.log10(a)",
        "torch.log2(a)",
        "torch.reciprocal(a)",
        "torch.rsqrt(a)",
        "torch.sinh(a)",
        "torch.tan(a)",
        "torch.pow(a, 2)",
        "torch.pow(a, b)",
        "torch.pow(2.0, a)",
        "torch.cumprod(a, 0)",
        "torch.cumsum(a, dim=0)",
        "torch.dist(a, b)",
        "torch.norm(a)",
        "torch.prod(a)",
        "torch.std(a, 0)",
        "torch.sum(a)",
        "torch.sum(a, dim=0, keepdim=True)",
        "torch.sum(labels)",
        "torch.var(a)",
        "torch.renorm(a, 2, 0, 1.0)",
    ),
    "FP32, methods": (
        "a.exp()",
        "a.log()",
        "a.sum()",
        "a.sum(0, keepdim=True)",
        "a.prod()",
        "a.std(0)",
        "a.var()",
        "a.norm()",
        "a.pow(2)",
        "a.pow(b)",
        "a.cumsum(0)",
        "a.dist(b)",
        "a.rsqrt()",
        "a ** 2",
        "a ** b",
        "2 ** a",
        "op.ipow(a, 2)",
        "a.cpu()",
        "labels.cpu()",
    ),
    "promote, torch": (
        "torch.addcdiv(a, b, b)",
        "torch.addcmul(a, b, a)",
        "torch.addcmul(a, b, a, value=0.5)",
        "torch.atan2(a, b)",
        "torch.cross(a[:, :3], b[:, :3], dim=1)",
        "torch.bilinear(a, b, n, None)",
        "torch.dot(v, u)",
        "torch.add(a, b)",
        "torch.add(a, b, alpha=2)",
        "torch.add(input=a, other=b)",
        "torch.add(a, 1.5)",
        "torch.div(a, b)",
        "torch.mul(a, b)",
        "torch.mul(a, z)",
        "torch.eq(a, b)",
        "torch.equal(a, b)",
        "torch.gt(a, b)",
        "torch.le(a, b)",
        "torch.ne(a, b)",
    ),
    "promote, methods": (
        "a + b",
        "a - b",
        "a * b",
        "a / b",
        "a * z",
        "a + w",
        "a + 1",
        "1 - a",
        "1 / a",
        "a == b",
        "a < b",
        "a >= 0.5",
        "op.iadd(a, b)",
        "op.isub(a, b)",
        "op.imul(a, z)",
        "op.itruediv(a, b)",
        "op.iadd(a, 1)",
        "a.add(b)",
        "a.mul(b)",
        "a.div(z)",
        "a.addcmul(b, a)",
        "a.atan2(b)",
        "v.dot(u)",
        "a.equal(b)",
    ),
    "sequence": (
        "torch.cat([a, b])",
        "torch.cat((a, b), dim=1)",
        "torch.cat(tensors=[a, b])",
        "torch.stack([a, b])",
        "torch.stack((a, b, w), 1)",
        "torch.cat([a, labels.view(1, 4)])",
        "torch.vstack([a, b])",
    ),
    "in place": (
        "a.exp_()",
        "a.log_()",
        "a.reciprocal_()",
        "a.pow_(2)",
        "a.pow_(b)",
        "a.cumsum_(0)",
        "a.renorm_(2, 0, 1.0)",
        "torch.exp_(a)",
        "torch.rsqrt_(a)",
        "a.add_(b)",
        "a.add_(b, alpha=2)",
        "a.mul_(b)",
        "a.div_(z)",
        "a.addmm_(b, a)",
        "a.addcmul_(b, a)",
        "a.atan2_(b)",
        "a.eq_(b)",
        "a.sub_(b)",
        "a.sqrt_()",
    ),
    "banned": (
        "F.binary_cross_entropy(a, b)",
        "nn.BCELoss()(a, b)",
    ),
    "unlisted": (
        "torch.relu(a)",
        "F.relu(a)",
        "a.sigmoid()",
        "torch.tanh(a)",
        "a.sqrt()",
        "a.mean()",
        "a.max()",
        "a.softmax(0)",
        "torch.softmax(a, 0)",
        "torch.log_softmax(a, 0)",
        "a.log_softmax(0)",
        "torch.logsumexp(a, 0)",
        "torch.sub(a, b)",
        "a.sub(b)",
        "torch.true_divide(a, b)",
        "torch.maximum(a, b)",
        "torch.where(a > b, a, b)",
        "F.dropout(a, 0.5)",
        "F.embedding(labels, a)",
        "F.max_pool2d(x, 2)",
        "F.batch_norm(x, None, None, training=True)",
        "nn.BatchNorm2d(4)(x)",
        "nn.InstanceNorm2d(4, affine=True)(x)",
        "F.huber_loss(a, b)",
        "F.scaled_dot_product_attention(m, n, n)",
        "F.gaussian_nll_loss(a, b, w.detach())",
        "torch.einsum('ij,jk->ik', a, b)",
        "torch.einsum('ij,jk->ik', [a, b])",
        "torch.einsum('ij,ij->i', a, b)",
        "torch.tensordot(a, b, 1)",
        "torch.inner(a, b)",
        "torch.linalg.multi_dot([a, b, a])",
        "torch.linalg.norm(a)",
        "torch.cdist(a, b)",
        "torch.outer(v, u)",
        "torch.isclose(a, b)",
        "a.to(torch.float16)",
        "a.view(2, 8)",
    ),
    "aliases": (
        "F.prelu(a, wv)",
        "F.prelu(a, u)",
        "nn.PReLU()(a)",
        "F.bilinear(a, b, n)",
        "nn.Bilinear(4, 4, 3)(a, b)",
        "torch.cosine_similarity(a, b)",
    ),
    "cells": (
        "nn.RNNCell(4, 3)(a)",
        "nn.RNNCell(4, 3, nonlinearity='relu')(a, b[:, :3])",
        "nn.GRUCell(4, 3)(a)",
        "nn.GRUCell(4, 3)(a, b[:, :3])",
        "nn.LSTMCell(4, 3)(a)",
        "nn.LSTMCell(4, 3)(a, (b[:, :3], b[:, :3]))",
    ),
    "RNN": (
        "nn.RNN(4, 3)(m)",
        "nn.RNN(4, 3, nonlinearity='relu')(m)",
        "nn.GRU(4, 3)(m)",
        "nn.GRU(4, 3, batch_first=True)(m, n[:1, :2, :3].contiguous())",
        "nn.LSTM(4, 3)(m)",
        "nn.LSTM(4, 3, num_layers=2, bidirectional=True)(m)",
        "nn.LSTM(4, 3)(m, (n[:1, :, :3].contiguous(), n[:1, :, :3].contiguous()))",
        "nn.LSTM(4, 3, proj_size=2)(m)",
        "nn.LSTM(4, 3, bias=False)(a)",
        "nn.LSTM(4, 3)(packed)",
        "nn.GRU(4, 3)(packed)",
    ),
    "attention": (
        "nn.MultiheadAttention(4, 2)(m, m, m)",
        "nn.MultiheadAttention(4, 2)(m, n, n)",
        "nn.MultiheadAttention(4, 2)(m, m, m, need_weights=False)",
        "nn.MultiheadAttention(4, 2, bias=False, add_zero_attn=True)(m, m, m)",
        "nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)(m)",
        "nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, activation='gelu', norm_first=True)(m)",
        "nn.TransformerDecoderLayer(4, 2, 8, dropout=0.0)(m, n)",
    ),
    "nested": (
        "nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))(a)",
        "F.mse_loss(F.linear(a, w), b)",
        "F.softmax(a @ b, dim=-1) @ b",
        "(a @ w).sum() + b.mean()",
        "torch.cat([a @ b, F.gelu(a)])",
    ),
    "other dtypes": (
        "d.mm(d)",
        "d @ d",
        "torch.exp(d)",
        "d.sum()",
        "F.softmax(d, dim=0)",
        "nn.functional.linear(d, d)",
        "a + d",
        "torch.mul(a, d)",
        "torch.cat([a, d])",
        "h.mm(h)",
        "F.linear(h, h)",
        "h.sum()",
        "F.softmax(h, dim=0)",
        "a + h",
        "a.add_(d)",
        "d.exp_()",
    ),
}


def kind(result: Any) -> str:
    """The dtypes of a result: ``float16``, ``(float16, (float32, float32))``; ``bool`` if it is no tensor."""
    if isinstance(result, torch.Tensor):
        return str(result.dtype).removeprefix("torch.")
    if isinstance(result, nn.utils.rnn.PackedSequence):
        return f"packed {kind(result.data)}"
    if isinstance(result, (tuple, list)):
        return f"({', '.join(kind(entry) for entry in result)})"
    return type(result).__name__


def cell(expression: str, names: dict[str, Any]) -> str:
    """The dtypes of an expression's result, or ``raises SomeError``."""
    try:
        return kind(eval(expression, names))
    except Exception as error:
        return f"raises {type(error).__name__}"


def cells() -> Iterator[tuple[str, str, str]]:
    """Each group, expression and pair."""
    for group, expressions in EXPRESSIONS.items():
        for expression in expressions:
            for pair in PAIRS:
                yield group, expression, pair


def run(amp: Any) -> dict[str, dict[str, str]]:
    """Evaluate the whole grid.

    Args:
        amp: a module with Apex's interface: ``init`` and the handle it returns.

    Returns:
        For each expression and each pair of ``PAIRS`` the result of ``cell``. Casts are off again at the end.
    """
    found: dict[str, dict[str, str]] = {}
    for _, expression, pair in cells():
        torch.manual_seed(0)
        names = namespace(*PAIRS[pair])
        handle = amp.init()
        try:
            found.setdefault(expression, {})[pair] = cell(expression, names)
        finally:
            handle._deactivate()
    return found
