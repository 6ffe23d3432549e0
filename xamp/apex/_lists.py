"""Apex's lists of functions, as data: the names in ``torch.nn.functional``, ``torch`` and Tensor that O1 and O4 cast.

The names are those of NVIDIA's ``apex/amp/lists`` (and of ROCm's fork for bfloat16), in their order; see LICENSE for
the notice. Two things differ. First, ``addbmm``, ``baddbmm`` and ``bmm`` run in low precision on every device. Apex
checked the version of CUDA, so ``nn.MultiheadAttention`` raised where torch was built without CUDA. Second, this module
filters
nothing: :mod:`xamp.apex._patches` skips names that this torch lacks. It reads the lists anew each time that it replaces
functions, so a script may add names or remove them before ``init``.
"""

from __future__ import annotations

import dataclasses

__all__ = ["CELLS", "FUNCTIONAL", "LISTS", "RNNS", "TENSOR", "TORCH", "Lists", "in_place"]

_CONVOLUTIONS = (
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "conv_tbc",
)
_PRODUCTS = ("addmm", "addmv", "addr", "matmul", "mm", "mv", "addbmm", "baddbmm", "bmm")


@dataclasses.dataclass(frozen=True)
class Lists:
    """The lists of one namespace.

    Attributes:
        module: the namespace.
        FP16_FUNCS: functions that run in fp16 where that is the lower dtype. fp32 arguments are cast; casts of
            Parameters are cached.
        BFLOAT16_FUNCS: the same for bfloat16.
        FP32_FUNCS: functions that run in fp32.
        CASTS: functions whose arguments are cast to the widest of their dtypes.
        SEQUENCE_CASTS: functions that do the same with the tensors in their first argument, a sequence.
        BANNED_FUNCS: functions that refuse fp16 arguments, each with its message.
    """

    module: str
    FP16_FUNCS: list[str]
    BFLOAT16_FUNCS: list[str]
    FP32_FUNCS: list[str]
    CASTS: list[str]
    SEQUENCE_CASTS: list[str]
    BANNED_FUNCS: list[tuple[str, str]]


_BCE = (
    "\namp does not work out-of-the-box with `F.binary_cross_entropy` or `torch.nn.BCELoss.` "
    "It requires that the output of the previous function be already a FloatTensor. \n\n"
    "Most models have a Sigmoid right before BCELoss. In that case, you can use\n"
    "    torch.nn.BCEWithLogitsLoss\nto combine Sigmoid+BCELoss into a single layer "
    "that is compatible with amp.\nAnother option is to add\n"
    "    amp.register_float_function(torch, 'sigmoid')\nbefore calling `amp.init()`.\n"
    "If you _really_ know what you are doing, you can disable this warning by passing "
    "allow_banned=True to `amp.init()`."
)

FUNCTIONAL = Lists(
    module="torch.nn.functional",
    FP16_FUNCS=[*_CONVOLUTIONS, "linear"],
    BFLOAT16_FUNCS=[*_CONVOLUTIONS, "linear"],
    FP32_FUNCS=[
        "interpolate",
        "grid_sample",
        "softplus",
        "softmin",
        "log_softmax",
        "softmax",
        "gelu",
        "layer_norm",
        "group_norm",
        "local_response_norm",
        "normalize",
        "cosine_similarity",
        "poisson_nll_loss",
        "cosine_embedding_loss",
        "cross_entropy",
        "hinge_embedding_loss",
        "kl_div",
        "l1_loss",
        "mse_loss",
        "margin_ranking_loss",
        "multilabel_margin_loss",
        "multilabel_soft_margin_loss",
        "multi_margin_loss",
        "nll_loss",
        "binary_cross_entropy_with_logits",
        "smooth_l1_loss",
        "soft_margin_loss",
        "triplet_margin_loss",
        "ctc_loss",
    ],
    CASTS=[],
    SEQUENCE_CASTS=[],
    BANNED_FUNCS=[("binary_cross_entropy", _BCE)],
)

TORCH = Lists(
    module="torch",
    FP16_FUNCS=[*_CONVOLUTIONS, "prelu", *_PRODUCTS],
    BFLOAT16_FUNCS=[*_CONVOLUTIONS, *_PRODUCTS],
    FP32_FUNCS=[
        "acos",
        "asin",
        "cosh",
        "erfinv",
        "exp",
        "expm1",
        "log",
        "log10",
        "log2",
        "reciprocal",
        "rsqrt",
        "sinh",
        "tan",
        "pow",
        "cumprod",
        "cumsum",
        "dist",
        "norm",
        "prod",
        "std",
        "sum",
        "var",
        "renorm",
    ],
    CASTS=[
        "addcdiv",
        "addcmul",
        "atan2",
        "cross",
        "bilinear",
        "dot",
        "add",
        "div",
        "mul",
        "eq",
        "equal",
        "ge",
        "gt",
        "le",
        "lt",
        "ne",
    ],
    SEQUENCE_CASTS=["cat", "stack"],
    BANNED_FUNCS=[],
)

_ARITHMETIC = ("add", "div", "mul", "sub", "truediv")

TENSOR = Lists(
    module="torch.Tensor",
    FP16_FUNCS=["__matmul__", *TORCH.FP16_FUNCS],
    BFLOAT16_FUNCS=["__matmul__", *TORCH.BFLOAT16_FUNCS],
    FP32_FUNCS=["__ipow__", "__pow__", "__rpow__", "cpu", *TORCH.FP32_FUNCS],
    CASTS=[
        *(f"__{how}{name}__" for name in _ARITHMETIC for how in ("", "i", "r")),
        *(f"__{name}__" for name in ("eq", "ge", "gt", "le", "lt", "ne")),
        *TORCH.CASTS,
    ],
    SEQUENCE_CASTS=[],
    BANNED_FUNCS=[],
)

LISTS = (FUNCTIONAL, TORCH, TENSOR)

RNNS = ("rnn_relu", "rnn_tanh", "gru", "lstm")
"""The functions in ``torch._VF`` that the recurrent modules call; they run in low precision."""

CELLS = tuple(f"{name}_cell" for name in RNNS)
"""The functions in ``torch._VF`` that the recurrent cells call; they run in low precision."""


def in_place(names: list[str]) -> list[str]:
    """The names of the in-place forms of ``names``, such as ``add_`` for ``add``."""
    return [f"{name}_" for name in names]
