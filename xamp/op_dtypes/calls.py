"""The arguments of the sample calls: small shapes; values that lie in the operator's domain and never change."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from xamp.torch_compat.torch_private.fake import unset_fake_temporarily

__all__ = ["CALLS", "Make", "Maker"]

_GOLDEN = (math.sqrt(5) - 1) / 2
_MEAN = 1  # the number of a loss's ``reduction="mean"``


class Maker:
    """Makes the tensors of one call.

    Args:
        device: The device of the tensors.
        given: The dtypes of the floating tensors, in turn. After the last one the first one follows again.
        grad: Whether the tensors require gradients where the operator is differentiable.
        values: Whether the tensors need values. Fake ones have none, and to compute them took two thirds of a survey.
    """

    def __init__(
        self, device: torch.device | str, given: Sequence[torch.dtype], grad: bool, values: bool = True
    ) -> None:
        self._device = device
        self._grad = grad
        self._values = values
        self._given = itertools.cycle(given)
        self._made = itertools.count(1)

    def __call__(self, *shape: int, low: float = -1.0, high: float = 1.0, grad: bool = True) -> torch.Tensor:
        """Make a floating tensor of values in [low, high), which all differ in fp32.

        Args:
            *shape: Its shape.
            low: Lower bound.
            high: Upper bound.
            grad: Whether the operator is differentiable in it.
        """
        if not self._values:
            empty = torch.empty(shape, dtype=next(self._given), device=self._device)
            return empty.requires_grad_(grad and self._grad)
        places = torch.arange(math.prod(shape), device=self._device, dtype=torch.float32) + 7 * next(self._made)
        values = low + (high - low) * torch.frac(places * _GOLDEN)
        return values.reshape(shape).to(next(self._given)).requires_grad_(grad and self._grad)

    def whole(self, *shape: int, below: int) -> torch.Tensor:
        """Make an int64 tensor that counts 0, 1, ... ``below`` - 1, and then from 0 again."""
        if not self._values:
            return torch.empty(shape, dtype=torch.int64, device=self._device)
        return torch.arange(math.prod(shape), device=self._device).remainder(below).reshape(shape)

    def host(self, *values: int) -> torch.Tensor:
        """Make an int64 tensor on the CPU. It is real even among fake ones, because the operator reads its values."""
        with unset_fake_temporarily():
            return torch.tensor(values, device="cpu")

    def signs(self, *shape: int) -> torch.Tensor:
        """Make a floating tensor of -1 and 1, in which no operator is differentiable."""
        return (self.whole(*shape, below=2) * 2 - 1).to(next(self._given))


Make = Callable[[Maker], tuple[Any, ...]]


def _within(low: float, high: float, *arguments: Any) -> Make:
    """One tensor (3, 4) of values from ``low`` to ``high``, then ``arguments``."""
    return lambda t: (t(3, 4, low=low, high=high), *arguments)


def _convolution(dims: int, *arguments: Any, bias: bool = True, transposed: bool = False) -> Make:
    """Input (2, 4, 8, ...), weight (6, 4, 3, ...), or (4, 6, 3, ...) for the transposed one, and bias (6)."""
    weight, biases = ((4, 6) if transposed else (6, 4)), [6] * bias
    return lambda t: (t(2, 4, *[8] * dims), t(*weight, *[3] * dims), *map(t, biases), *arguments)


def _pair(*arguments: Any) -> Make:
    """Two tensors (4, 3), then ``arguments``."""
    return lambda t: (t(4, 3), t(4, 3), *arguments)


def _image(dims: int, *arguments: Any) -> Make:
    """An image (2, 3, 4, ...) to make twice as large in each of ``dims`` dimensions, then ``arguments``."""
    return lambda t: (t(2, 3, *[4] * dims), [8] * dims, *arguments)


def _cell(gates: int) -> Make:
    """Input (2, 3), hidden state (2, 4), and weights and biases of ``gates`` gates."""
    return lambda t: (t(2, 3), t(2, 4), t(4 * gates, 3), t(4 * gates, 4), t(4 * gates), t(4 * gates))


def _lstm_cell(t: Maker) -> tuple[Any, ...]:
    return (t(2, 3), [t(2, 4), t(2, 4)], t(16, 3), t(16, 4), t(16), t(16))


def _fused_cell(gates: int) -> Make:
    """The results of a cell's matrix products, the state, and the biases that the operator adds."""
    return lambda t: (t(2, 4 * gates), t(2, 4 * gates), t(2, 4), t(4 * gates), t(4 * gates))


def _layer(gates: int, *, bidirectional: bool = False, packed: bool = False) -> Make:
    """The input; a state (directions, 2, 4), or two states if there are 4 gates; the weights.

    The input is (5, 2, 3) of time, batch, features. A packed input has 8 rows: two sequences of five and three steps.
    """
    ways = 2 if bidirectional else 1

    def make(t: Maker) -> tuple[Any, ...]:
        inputs = (t(8, 3), t.host(2, 2, 2, 1, 1)) if packed else (t(5, 2, 3),)
        state = [t(ways, 2, 4) for _ in range(2 if gates == 4 else 1)]
        shapes = [(4 * gates, 3), (4 * gates, 4), (4 * gates,), (4 * gates,)] * ways
        weights = [t(*shape) for shape in shapes]
        settings = (True, 1, 0.0, True, bidirectional, *([] if packed else [False]))
        return (*inputs, state if gates == 4 else state[0], weights, *settings)

    return make


_ONES, _ZEROS = [1, 1], [0, 0]

_CONVOLUTIONS: dict[str, Make] = {
    "_convolution": _convolution(2, _ONES, _ZEROS, _ONES, False, _ZEROS, 1, False, False, True, True),
    "_convolution.deprecated": _convolution(2, _ONES, _ZEROS, _ONES, False, _ZEROS, 1, False, False, True),
    "conv1d": _convolution(1),
    "conv2d": _convolution(2),
    "conv3d": _convolution(3),
    "conv_tbc": lambda t: (t(8, 2, 4), t(3, 4, 6), t(6)),
    "conv_transpose1d": _convolution(1, transposed=True),
    "conv_transpose2d.input": _convolution(2, transposed=True),
    "conv_transpose3d.input": _convolution(3, transposed=True),
    "convolution": _convolution(2, _ONES, _ZEROS, _ONES, False, _ZEROS, 1),
    "cudnn_convolution": _convolution(2, _ZEROS, _ONES, _ONES, 1, False, False, True, bias=False),
    "cudnn_convolution_transpose": _convolution(
        2, _ZEROS, _ZEROS, _ONES, _ONES, 1, False, False, True, bias=False, transposed=True
    ),
}

_PRODUCTS: dict[str, Make] = {
    "_scaled_dot_product_flash_attention": lambda t: (t(2, 2, 8, 8), t(2, 2, 8, 8), t(2, 2, 8, 8)),
    "addbmm": lambda t: (t(3, 5), t(2, 3, 4), t(2, 4, 5)),
    "addmm": lambda t: (t(3, 5), t(3, 4), t(4, 5)),
    "addmv": lambda t: (t(3), t(3, 4), t(4)),
    "addr": lambda t: (t(3, 4), t(3), t(4)),
    "baddbmm": lambda t: (t(2, 3, 5), t(2, 3, 4), t(2, 4, 5)),
    "bmm": lambda t: (t(2, 3, 4), t(2, 4, 5)),
    "chain_matmul": lambda t: ([t(3, 4), t(4, 5), t(5, 2)],),
    "einsum": lambda t: ("bij,bjk->bik", [t(2, 3, 4), t(2, 4, 5)]),
    "linalg_multi_dot": lambda t: ([t(3, 4), t(4, 5), t(5, 2)],),
    "linalg_vecdot": _pair(),
    "linear": lambda t: (t(3, 4), t(5, 4), t(5)),
    "matmul": lambda t: (t(2, 3, 4), t(4, 5)),
    "mm": lambda t: (t(3, 4), t(4, 5)),
    "mv": lambda t: (t(3, 4), t(4)),
    "prelu": lambda t: (t(2, 3, 4), t(3, low=0.1, high=0.5)),
    "scaled_dot_product_attention": lambda t: (t(2, 2, 8, 8), t(2, 2, 8, 8), t(2, 2, 8, 8)),
}

_RECURRENT: dict[str, Make] = {
    "_thnn_fused_gru_cell": _fused_cell(3),
    "_thnn_fused_lstm_cell": _fused_cell(4),
    "gru.data": _layer(3, packed=True),
    "gru.input": _layer(3),
    "gru_cell": _cell(3),
    "lstm.data": _layer(4, packed=True),
    "lstm.input": _layer(4),
    "lstm_cell": _lstm_cell,
    "rnn_relu.data": _layer(1, packed=True),
    "rnn_relu.input": _layer(1),
    "rnn_relu_cell": _cell(1),
    "rnn_tanh.data": _layer(1, packed=True),
    "rnn_tanh.input": _layer(1),
    "rnn_tanh_cell": _cell(1),
}

_ELEMENTWISE: dict[str, Make] = {
    "acos": _within(-0.9, 0.9),
    "asin": _within(-0.9, 0.9),
    "cosh": _within(-1.0, 1.0),
    "erfinv": _within(-0.9, 0.9),
    "exp": _within(-1.0, 1.0),
    "expm1": _within(-1.0, 1.0),
    "log": _within(0.5, 2.0),
    "log10": _within(0.5, 2.0),
    "log1p": _within(-0.5, 1.0),
    "log2": _within(0.5, 2.0),
    "pow.Scalar": lambda t: (2.0, t(3, 4)),
    "pow.Tensor_Scalar": _within(0.5, 2.0, 1.5),
    "pow.Tensor_Tensor": lambda t: (t(3, 4, low=0.5, high=2.0), t(3, 4)),
    "reciprocal": _within(0.5, 2.0),
    "rsqrt": _within(0.5, 2.0),
    "sinh": _within(-1.0, 1.0),
    "softplus": _within(-1.0, 1.0),
    "tan": _within(-1.0, 1.0),
}

_NORMS: dict[str, Make] = {
    "cdist": lambda t: (t(3, 4), t(5, 4)),
    "cosine_similarity": _pair(),
    "dist": _pair(),
    "frobenius_norm.dim": _within(-1.0, 1.0, [0, 1]),
    "group_norm": lambda t: (t(2, 4, 5), 2, t(4), t(4)),
    "layer_norm": lambda t: (t(3, 4), [4], t(4), t(4)),
    "linalg_matrix_norm": _within(-1.0, 1.0, 1.0),  # 2.0 needs singular values: no lower dtype anywhere
    "linalg_matrix_norm.str_ord": _within(-1.0, 1.0),
    "linalg_matrix_sqrth": lambda t: (t(4, 1, 1, low=0.5, high=2.0),),  # of positive definite matrices
    "linalg_vector_norm": _within(-1.0, 1.0),
    "logsumexp": _within(-1.0, 1.0, [1]),
    "native_layer_norm": lambda t: (t(3, 4), [4], t(4), t(4), 1e-5),
    "norm.Scalar": _within(-1.0, 1.0),
    "norm.ScalarOpt_dim": _within(-1.0, 1.0, 2, [1]),
    "nuclear_norm": _within(-1.0, 1.0),
    "nuclear_norm.dim": _within(-1.0, 1.0, [0, 1]),
    "pdist": _within(-1.0, 1.0),
    "renorm": _within(-1.0, 1.0, 2, 0, 0.5),
    "rms_norm": lambda t: (t(3, 4), [4], t(4)),
}

_LOSSES: dict[str, Make] = {
    "binary_cross_entropy": lambda t: (t(3, 4, low=0.1, high=0.9), t(3, 4, low=0.1, high=0.9)),
    "binary_cross_entropy_with_logits": lambda t: (t(3, 4), t(3, 4, low=0.1, high=0.9)),
    "cosine_embedding_loss": lambda t: (t(4, 3), t(4, 3), t.signs(4)),
    "hinge_embedding_loss": lambda t: (t(4, 3), t.signs(4, 3)),
    "huber_loss": _pair(),
    "kl_div": lambda t: (t(4, 3), t(4, 3, low=0.1, high=0.9)),
    "l1_loss": _pair(),
    "margin_ranking_loss": lambda t: (t(4), t(4), t.signs(4)),
    "mse_loss": _pair(),
    "multi_margin_loss": lambda t: (t(4, 3), t.whole(4, below=3)),
    "multilabel_margin_loss": lambda t: (t(4, 3), t.whole(4, 3, below=3)),
    "nll_loss": lambda t: (t(4, 3), t.whole(4, below=3), t(3, low=0.5, high=1.0, grad=False)),
    "nll_loss2d": lambda t: (t(2, 3, 4, 4), t.whole(2, 4, 4, below=3)),
    "poisson_nll_loss": lambda t: (t(4, 3), t(4, 3, low=0.1, high=2.0), True, False, 1e-8, _MEAN),
    "smooth_l1_loss": _pair(),
    "soft_margin_loss": lambda t: (t(4, 3), t.signs(4, 3)),
    "triplet_margin_loss": lambda t: (t(4, 3), t(4, 3), t(4, 3)),
}

_IMAGES: dict[str, Make] = {
    "_upsample_bicubic2d_aa": _image(2, False),
    "_upsample_bilinear2d_aa": _image(2, False),
    "_upsample_nearest_exact1d": _image(1),
    "_upsample_nearest_exact2d": _image(2),
    "_upsample_nearest_exact3d": _image(3),
    "grid_sampler": lambda t: (t(2, 3, 4, 4), t(2, 5, 5, 2), 0, 0, False),
    "upsample_bicubic2d": _image(2, False),
    "upsample_bilinear2d": _image(2, False),
    "upsample_linear1d": _image(1, False),
    "upsample_nearest1d": _image(1),
    "upsample_nearest2d": _image(2),
    "upsample_nearest3d": _image(3),
    "upsample_trilinear3d": _image(3, False),
}

_REDUCTIONS: dict[str, Make] = {
    "cumprod": _within(0.5, 1.5, 1),
    "cumsum": _within(-1.0, 1.0, 1),
    "log_softmax.int": _within(-1.0, 1.0, -1),
    "prod": _within(0.5, 1.5),
    "prod.dim_int": _within(0.5, 1.5, 1),
    "softmax.int": _within(-1.0, 1.0, -1),
    "sum": _within(-1.0, 1.0),
    "sum.dim_IntList": _within(-1.0, 1.0, [1]),
}

_PROMOTING: dict[str, Make] = {
    "addcdiv": lambda t: (t(3, 4), t(3, 4), t(3, 4, low=0.5, high=2.0)),
    "addcmul": lambda t: (t(3, 4), t(3, 4), t(3, 4)),
    "atan2": lambda t: (t(3, 4), t(3, 4, low=0.5, high=2.0)),
    "bilinear": lambda t: (t(2, 3), t(2, 4), t(5, 3, 4), t(5)),
    "cross": _pair(1),
    "dot": lambda t: (t(4), t(4)),
    "index_put": lambda t: (t(3, 4), [t.whole(2, below=3)], t(2, 4)),
    "scatter_add": lambda t: (t(3, 4), 0, t.whole(2, 4, below=3), t(2, 4)),
    "tensordot": lambda t: (t(3, 4), t(4, 5), [1], [0]),
    "vdot": lambda t: (t(4), t(4)),
}

_FAMILIES = (
    _CONVOLUTIONS,
    _PRODUCTS,
    _RECURRENT,
    _ELEMENTWISE,
    _NORMS,
    _LOSSES,
    _IMAGES,
    _REDUCTIONS,
    _PROMOTING,
)

_MORE: dict[str, tuple[Make, ...]] = {
    "addcdiv": (lambda t: (t(3, 4), t(), t(3, 4, low=0.5, high=2.0)),),
    "addcmul": (lambda t: (t(3, 4), t(), t(3, 4)),),
    "atan2": (lambda t: (t(3, 4), t(low=0.5, high=2.0)),),
    "chain_matmul": (lambda t: ([t(3, 4)],),),
    "einsum": (lambda t: ("i,j->ij", [t(3), t(4)]), lambda t: ("ij->ji", [t(3, 4)])),
    "grid_sampler": (lambda t: (t(2, 3, 4, 4, 4), t(2, 5, 5, 5, 3), 0, 0, False),),
    "linalg_multi_dot": (lambda t: ([t(4), t(4, 3), t(3)],),),
    "lstm.data": (_layer(4, bidirectional=True, packed=True),),
    "lstm.input": (_layer(4, bidirectional=True),),
    "matmul": (lambda t: (t(4), t(4)),),
    "scaled_dot_product_attention": (lambda t: (t(2, 2, 8, 8), t(2, 2, 8, 8), t(2, 2, 8, 8), t(8, 8)),),
}
"""Further calls: they take another path inside the operator, or type promotion alone changes their result dtype."""

CALLS: Mapping[str, tuple[Make, ...]] = {
    name: (make, *_MORE.get(name, ())) for family in _FAMILIES for name, make in family.items()
}
"""Overload, as the table names it -> the functions that make the arguments of its sample calls."""
