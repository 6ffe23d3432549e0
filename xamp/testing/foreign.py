"""Computations of code that does not use xamp, under ``torch.autocast``, to compare before and after xamp is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from xamp.testing.lane import Lane

__all__ = ["AT_LEAST", "equal", "main", "results"]

AT_LEAST = 30
"""How many computations must run on a device for the comparison to be meaningful; each counts once for each dtype."""

Compute = Callable[[torch.Tensor], Any]


def _layer(make: Callable[[], nn.Module], call: Callable[..., Any] | None = None) -> Compute:
    """A computation that gives a layer's results and the gradients of its parameters."""

    def compute(x: torch.Tensor) -> Any:
        torch.manual_seed(3)
        layer = make().eval().to(x.device)  # dropout would draw random numbers
        made = layer(x) if call is None else call(layer, x)
        return [made, *torch.autograd.grad(_total(made), list(layer.parameters()), retain_graph=True)]

    return compute


def _tensors(made: Any) -> list[torch.Tensor]:
    if isinstance(made, torch.Tensor):
        return [made]
    return [tensor for part in made for tensor in _tensors(part)]


def _total(made: Any) -> torch.Tensor:
    sums = [(tensor.float() * 0.5).sum() for tensor in _tensors(made) if tensor.requires_grad]
    return torch.stack(sums).sum()


def _image(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(2, 3, 4, 8)


def _block(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x @ x.mT, -1).exp().sum(-1)


COMPUTATIONS: dict[str, Compute] = {
    "einsum": lambda x: torch.einsum("bij,bjk->bik", x, x),
    "einsum of three": lambda x: torch.einsum("ij,jk,kl->il", x[0], x[1], x[2]),
    "lstm": _layer(lambda: nn.LSTM(8, 8, 2, bidirectional=True)),
    "gru": _layer(lambda: nn.GRU(8, 8)),
    "rnn": _layer(lambda: nn.RNN(8, 8)),
    "lstm cell": _layer(lambda: nn.LSTMCell(8, 8), lambda layer, x: layer(x[0])),
    "gru cell": _layer(lambda: nn.GRUCell(8, 8), lambda layer, x: layer(x[0])),
    "rnn cell": _layer(lambda: nn.RNNCell(8, 8), lambda layer, x: layer(x[0])),
    "multi-head attention": _layer(lambda: nn.MultiheadAttention(8, 2), lambda layer, x: layer(x, x, x)[0]),
    "encoder layer": _layer(lambda: nn.TransformerEncoderLayer(8, 2, 16)),
    "scaled dot product attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "cdist": lambda x: torch.cdist(x, x + 1),
    "interpolate": lambda x: F.interpolate(_image(x), scale_factor=2, mode="bilinear"),
    "softmax": lambda x: torch.softmax(x, -1),
    "softmax of products": lambda x: torch.softmax(x @ x, -1),
    "log_softmax of products": lambda x: F.log_softmax(x @ x, -1),
    "layer norm": _layer(lambda: nn.LayerNorm(8)),
    "group norm": _layer(lambda: nn.GroupNorm(2, 8)),
    "rms norm of products": lambda x: F.rms_norm(x @ x, (8,)),
    "cross entropy": lambda x: F.cross_entropy(x[0] @ x[1], torch.arange(8, device=x.device)),
    "mse": lambda x: F.mse_loss(x, x.flip(0)),
    "smooth l1 of products": lambda x: F.smooth_l1_loss(x @ x, x.flip(0)),
    "cosine similarity": lambda x: F.cosine_similarity(x @ x, x, -1),
    "binary cross entropy": lambda x: F.binary_cross_entropy_with_logits(x @ x, x.detach().sigmoid()),
    "conv1d": _layer(lambda: nn.Conv1d(8, 4, 3)),
    "conv2d": _layer(lambda: nn.Conv2d(3, 4, 3), lambda layer, x: layer(_image(x))),
    "transposed conv": _layer(lambda: nn.ConvTranspose2d(3, 4, 3), lambda layer, x: layer(_image(x))),
    "norms": lambda x: (x.norm(), torch.norm(x @ x, 2, 1)),
    "sums of products": lambda x: ((x @ x).sum(), (x @ x).prod(-1), (x @ x).cumsum(0)),
    "exp and log": lambda x: ((x @ x).exp(), (x @ x).abs().add(1).log(), x.abs().add(1).rsqrt()),
    "powers": lambda x: ((x @ x) ** 2, x.abs().add(0.1) ** 1.5),
    "addcmul": lambda x: torch.addcmul(x, x @ x, x),
    "concatenation": lambda x: torch.cat([x, x @ x]),
    "products": lambda x: (x[0].mv(x[0, 0]), torch.addr(x[0], x[0, 0], x[0, 1]), torch.dot(x[0, 0], x[0, 1])),
    "bilinear": _layer(lambda: nn.Bilinear(8, 8, 4), lambda layer, x: layer(x, x)),
    "checkpoint": lambda x: checkpoint(_block, x, use_reentrant=False),
    "reentrant checkpoint": lambda x: checkpoint(_block, x, use_reentrant=True),
}
"""By name; each takes a tensor (3, 8, 8)."""


def results(device: torch.device, dtypes: Sequence[str]) -> dict[str, Any]:
    """Run each computation under ``torch.autocast``; return its results and gradients, on the CPU.

    For a computation that the device refuses, the value is the name of the error's class.
    """
    made: dict[str, Any] = {}
    for dtype in dtypes:
        for name, compute in COMPUTATIONS.items():
            x = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(4)).to(device).requires_grad_()
            try:
                with torch.autocast(device.type, dtype=getattr(torch, dtype)):
                    found = _tensors(compute(x))
                _total(found).backward()
                assert x.grad is not None
                made[f"{name}, {dtype}"] = [tensor.detach().cpu() for tensor in (*found, x.grad)]
            except (RuntimeError, NotImplementedError) as error:
                made[f"{name}, {dtype}"] = type(error).__name__
    return made


def equal(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
    """Whether dtypes and numbers are the same, to the bit."""
    dtypes = [each.dtype for each in found] == [each.dtype for each in wanted]
    return dtypes and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def main(lane: Lane, file: str) -> None:
    """Compute and save, in a process in which xamp has registered nothing."""
    torch.set_num_threads(1)  # as clauses do
    torch.save(results(lane.device, lane.can.dtypes), file)
