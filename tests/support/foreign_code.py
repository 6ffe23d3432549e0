"""Computations of code that does not use xamp, before and after the portable policy is installed in the process.

Run this as a script: it prints how many results it compared, and raises if a bit or a dtype differs.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.checkpoint import checkpoint

Compute = Callable[[torch.Tensor], Any]


def _layer(make: Callable[[], nn.Module], call: Callable[..., Any] | None = None) -> Compute:
    def compute(x: torch.Tensor) -> Any:
        torch.manual_seed(3)
        layer = make().eval()  # dropout would draw random numbers
        made = layer(x) if call is None else call(layer, x)
        return [made, *torch.autograd.grad(_total(made), list(layer.parameters()), retain_graph=True)]

    return compute


def _total(made: Any) -> torch.Tensor:
    return sum(((t.float() * 0.5).sum() for t in _tensors(made) if t.requires_grad), torch.zeros(()))


def _tensors(made: Any) -> list[torch.Tensor]:
    if isinstance(made, torch.Tensor):
        return [made]
    return [t for part in made for t in _tensors(part)] if isinstance(made, (list, tuple)) else []


def _image(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(2, 3, 4, 8)


def _packed(x: torch.Tensor) -> Any:
    return pack_sequence([x[0], x[1, :5], x[2, :2]])


def _checkpointed(x: torch.Tensor, reentrant: bool) -> Any:
    return checkpoint(lambda y: torch.softmax(y @ y.mT, -1).exp().sum(-1), x, use_reentrant=reentrant)


_IDS = torch.tensor([0, 3, 1])

# Each takes a tensor (3, 8, 8); a computation that needs another shape makes it from this one.
COMPUTATIONS: dict[str, Compute] = {
    "einsum product": lambda x: torch.einsum("bij,bjk->bik", x, x),
    "einsum outer": lambda x: torch.einsum("i,j->ij", x[0, 0], x[0, 1]),
    "einsum three": lambda x: torch.einsum("ij,jk,kl->il", x[0], x[1], x[2]),
    "einsum trace": lambda x: torch.einsum("bii->b", x),
    "einsum ellipsis": lambda x: torch.einsum("...ij,...j->...i", x, x[..., 0]),
    "lstm": _layer(lambda: nn.LSTM(8, 8, 2, bidirectional=True)),
    "gru": _layer(lambda: nn.GRU(8, 8)),
    "rnn tanh": _layer(lambda: nn.RNN(8, 8)),
    "rnn relu": _layer(lambda: nn.RNN(8, 8, nonlinearity="relu")),
    "packed lstm": _layer(lambda: nn.LSTM(8, 8, 2), lambda layer, x: layer(_packed(x))),
    "packed gru": _layer(lambda: nn.GRU(8, 8), lambda layer, x: layer(_packed(x))),
    "packed rnn": _layer(lambda: nn.RNN(8, 8), lambda layer, x: layer(_packed(x))),
    "lstm cell": _layer(lambda: nn.LSTMCell(8, 8), lambda layer, x: layer(x[0])),
    "gru cell": _layer(lambda: nn.GRUCell(8, 8), lambda layer, x: layer(x[0])),
    "rnn cell": _layer(lambda: nn.RNNCell(8, 8), lambda layer, x: layer(x[0])),
    "attention": _layer(lambda: nn.MultiheadAttention(8, 2), lambda layer, x: layer(x, x, x)),
    "encoder layer": _layer(lambda: nn.TransformerEncoderLayer(8, 2, 16)),
    "decoder layer": _layer(lambda: nn.TransformerDecoderLayer(8, 2, 16), lambda layer, x: layer(x, x)),
    "sdpa": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "sdpa with mask": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], x[0]),
    "cdist": lambda x: torch.cdist(x, x + 1),
    "pdist": lambda x: F.pdist(x[0]),
    "interpolate bilinear": lambda x: F.interpolate(_image(x), scale_factor=2, mode="bilinear"),
    "interpolate nearest": lambda x: F.interpolate(_image(x), scale_factor=2),
    "interpolate linear": lambda x: F.interpolate(x, scale_factor=2, mode="linear"),
    "softmax": lambda x: torch.softmax(x, -1),
    "log_softmax": lambda x: F.log_softmax(x.to(torch.bfloat16), -1),
    "layer_norm": _layer(lambda: nn.LayerNorm(8)),
    "group_norm": _layer(lambda: nn.GroupNorm(2, 8)),
    "rms_norm": _layer(lambda: nn.RMSNorm(8)),
    "batch_norm": _layer(lambda: nn.BatchNorm1d(8)),
    "cross_entropy": lambda x: F.cross_entropy(x[0, :3], _IDS),
    "nll 2d": lambda x: F.nll_loss(x, torch.zeros(3, 8, dtype=torch.int64)),
    "mse": lambda x: F.mse_loss(x, x.flip(0)),
    "huber": lambda x: F.huber_loss(x, x.flip(0)),
    "kl_div": lambda x: F.kl_div(x, x.flip(0).exp(), reduction="batchmean"),
    "cosine_embedding": lambda x: F.cosine_embedding_loss(x[0], x[1], torch.ones(8)),
    "triplet": lambda x: F.triplet_margin_loss(x[0], x[1], x[2]),
    "ctc": lambda x: F.ctc_loss(
        x.log_softmax(-1).float(), torch.ones(8, 2, dtype=torch.int64), torch.full((8,), 3), torch.full((8,), 2)
    ),
    "bce": lambda x: F.binary_cross_entropy(x.sigmoid(), x.flip(0).sigmoid().detach()),
    "bce with logits": lambda x: F.binary_cross_entropy_with_logits(x, x.flip(0).sigmoid().detach()),
    "conv1d": _layer(lambda: nn.Conv1d(8, 4, 3)),
    "conv2d": _layer(lambda: nn.Conv2d(3, 4, 3), lambda layer, x: layer(_image(x))),
    "conv transposed": _layer(lambda: nn.ConvTranspose2d(3, 4, 3), lambda layer, x: layer(_image(x))),
    "norm": lambda x: (x.norm(), torch.norm(x.to(torch.bfloat16), 2, 1), torch.linalg.norm(x[0])),
    "vector_norm": lambda x: torch.linalg.vector_norm(x.to(torch.bfloat16), dim=-1),
    "nuclear": lambda x: torch.linalg.matrix_norm(x.float(), "nuc"),
    "cumsum": lambda x: x.to(torch.bfloat16).cumsum(0),
    "sums": lambda x: (x.to(torch.bfloat16).sum(), x.to(torch.float16).sum(-1), x.prod(-1)),
    "powers": lambda x: (x.to(torch.bfloat16) ** 2, 2**x, x.abs() ** x.flip(0)),
    "exp and log": lambda x: (x.exp(), x.to(torch.bfloat16).exp(), x.abs().log(), x.abs().rsqrt()),
    "mixed": lambda x: torch.addcmul(x, x.to(torch.bfloat16), x),
    "products": lambda x: (x[0].mv(x[0, 0]), torch.dot(x[0, 0], x[0, 1]), torch.addr(x[0], x[0, 0], x[0, 1])),
    "tensordot": lambda x: torch.tensordot(x, x, dims=([1, 2], [1, 2])),
    "bilinear": _layer(lambda: nn.Bilinear(8, 8, 4), lambda layer, x: layer(x, x)),
    "scatter": lambda x: torch.scatter_add(x[0], 0, torch.zeros(8, 8, dtype=torch.int64), x[1]),
    "index": lambda x: torch.index_put(x[0], (_IDS,), x[1, :3]),
    "grid_sample": lambda x: F.grid_sample(_image(x), x[:2, :, :2].reshape(2, 4, 4, 1).expand(2, 4, 4, 2)),
    "grid_sample lower": lambda x: F.grid_sample(
        _image(x).bfloat16(), x[:2, :, :2].reshape(2, 4, 4, 1).expand(2, 4, 4, 2).bfloat16()
    ),
    "embedding bag": lambda x: F.embedding_bag(_IDS, x[0], torch.tensor([0])),
    "multi_dot": lambda x: torch.linalg.multi_dot([x[0], x[1], x[2]]),
    "checkpoint": lambda x: _checkpointed(x, False),
    "checkpoint reentrant": lambda x: _checkpointed(x, True),
    "vmap": lambda x: torch.vmap(lambda row: torch.softmax(row @ row, -1))(x),
}


def compute(dtype: torch.dtype | None, names: list[str] | None = None) -> dict[str, Any]:
    """The results and gradients of all computations; for those that a CPU refuses, the error's text."""
    made: dict[str, Any] = {}
    for name in names or COMPUTATIONS:
        x = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(4)).requires_grad_()
        try:
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                results = _tensors(COMPUTATIONS[name](x))
            _total(results).backward()
            assert x.grad is not None
            made[name] = [t.detach() for t in (*results, x.grad)]
        except RuntimeError as error:
            made[name] = str(error)
    return made


_BY_ANY_THREAD = {
    "lstm",
    "gru",
    "rnn tanh",
    "rnn relu",
    "packed lstm",
    "packed gru",
    "packed rnn",
    "encoder layer",
    "decoder layer",
    "attention",
}
"""Computations whose gradients differ in the last bits if another thread runs anything, also without xamp."""


def differing(
    mine: dict[str, Any], before: dict[str, Any], loose: frozenset[str] | set[str] = frozenset()
) -> list[str]:
    return [name for name in mine if not _alike(mine[name], before[name], name in loose)]


def _alike(mine: Any, before: Any, loosely: bool) -> bool:
    if isinstance(mine, str) or isinstance(before, str):
        return bool(mine == before)
    same = _close if loosely else torch.equal
    return len(mine) == len(before) and all(
        a.dtype == b.dtype and same(a.nan_to_num(7.0), b.nan_to_num(7.0)) and torch.equal(a.isnan(), b.isnan())
        for a, b in zip(mine, before, strict=True)
    )


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=0.02, atol=0.02)


DTYPES = (torch.bfloat16, torch.float16, None)


def main(rounds: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    before = {dtype: compute(dtype) for dtype in DTYPES}
    again = {dtype: compute(dtype) for dtype in DTYPES}
    for dtype in DTYPES:
        assert not differing(again[dtype], before[dtype])  # the computations repeat without xamp
    ran = sum(not isinstance(made, str) for made in before[torch.bfloat16].values())

    import xamp

    model = xamp.initialize(nn.Linear(8, 8), level="O4", op_policy="portable", backend="cpu", verbosity=0)
    region = xamp.session(model).autocast()
    for dtype in DTYPES:
        wrong = differing(compute(dtype), before[dtype])
        assert not wrong, f"{dtype}: {wrong}"
    with region:
        changed = differing(compute(torch.bfloat16), before[torch.bfloat16])
    assert len(changed) > 20, changed  # in a region the same computations do differ
    for dtype in DTYPES:
        assert not differing(compute(dtype), before[dtype])
    mixed = _beside(region, before, rounds)
    print(ran, len(changed), mixed)


def _beside(region: Any, before: dict[Any, dict[str, Any]], rounds: int) -> int:
    """Run the computations in one thread while another enters and leaves a region; a barrier starts each round."""
    barrier, wrong, compared = threading.Barrier(2), [], 0
    x = torch.randn(4, 4, dtype=torch.bfloat16)
    names = list(COMPUTATIONS)

    def managed() -> None:
        for _ in range(rounds):
            barrier.wait(60)
            for _ in range(20):
                with region:
                    made = torch.softmax(x, -1), torch.exp(x), torch.mv(x, x[0])
                if [t.dtype for t in made] != [torch.float32, torch.float32, torch.bfloat16]:
                    wrong.append("region")

    thread = threading.Thread(target=managed)
    thread.start()
    for turn in range(rounds):
        some = [names[(turn * 5 + offset) % len(names)] for offset in range(5)]
        dtype = DTYPES[turn % len(DTYPES)]
        barrier.wait(60)
        found = compute(dtype, some)
        wrong += differing(found, before[dtype], _BY_ANY_THREAD)
        compared += len(found)
    thread.join(60)
    assert not wrong, wrong
    return compared


if __name__ == "__main__":
    main(rounds=200)
