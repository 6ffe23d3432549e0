"""The dtypes that Ascend's documents say an operator takes on a card, as data.

Source: the support lists of PyTorch 2.11.0's own APIs on Atlas A2 and A3 in Ascend/pytorch,
docs/zh/api/native_api/pytorch_2-11-0, at commit 9e73e708. An operator has the dtypes of all pages of its function, its
method and its in-place form together. An operator that takes float16 takes bfloat16 too, on chips that have it: newer
kernels do, and the lists were not brought up to date everywhere.

Where CANN's page of the kernel that torch_npu calls names more than those lists, the operator has these dtypes too.
"""

from __future__ import annotations

import torch

__all__ = ["DOCUMENTED", "LETTERS"]

LETTERS = {
    "b": torch.bfloat16,
    "h": torch.float16,
    "f": torch.float32,
    "d": torch.float64,
    "B": torch.uint8,
    "c": torch.int8,
    "s": torch.int16,
    "i": torch.int32,
    "l": torch.int64,
    "?": torch.bool,
    "F": torch.complex64,
    "D": torch.complex128,
}
# By dtypes, the operators that take them: names of aten without the overload and a final underscore.
_OPERATORS = {
    "Bcsil": "bitwise_left_shift",
    "Bcsil?": "bitwise_and bitwise_not bitwise_or bitwise_xor",
    "bhf": (
        "_log_softmax adaptive_avg_pool2d adaptive_avg_pool3d addbmm addmm avg_pool2d baddbmm "
        "binary_cross_entropy binary_cross_entropy_with_logits bmm ceil celu frac hardshrink hardsigmoid histc "
        "lerp logaddexp2 mish mm mse_loss multinomial mv nanmean native_layer_norm silu smooth_l1_loss softplus "
        "softshrink trunc var vdot"
    ),
    "bhfBci": "dot",
    "bhfBcil": "fmod relu",
    "bhfBcsil": "addmv argmin bucketize clamp floor_divide median",
    "bhfBcsil?": (
        "_foreach_asin acos addr amin aminmax atan2 erfinv exp2 eye gt index_add isclose isneginf isposinf le "
        "log1p logical_not logsumexp lt maximum minimum nansum nonzero tanh tril triu unfold xlogy"
    ),
    "bhfBcsil?F": "angle",
    "bhfBcsil?FD": (
        "asinh atanh count_nonzero eq flip index_copy logical_and logical_or logical_xor mul ne prod reciprocal "
        "repeat rsqrt sin"
    ),
    "bhfBcsilFD": "put",
    "bhfF": "convolution",
    "bhfFD": "mean soft_margin_loss",
    "bhfcil": "_foreach_neg",
    "bhfcil?": "masked_fill",
    "bhfcilFD": "neg",
    "bhfd": "_softmax bernoulli elu exponential glu leaky_relu sinh softmax",
    "bhfdBcsil": "argmax cumprod floor hardtanh searchsorted",
    "bhfdBcsil?": (
        "_foreach_sqrt abs add all amax any asin atan cat div equal fill_diagonal ge isfinite masked_scatter ones stack"
    ),
    "bhfdBcsil?FD": (
        "as_strided clone cos cosh empty_like fill full isnan log log10 log2 nan_to_num native_dropout ones_like "
        "sigmoid sqrt squeeze tan unsqueeze view where zero"
    ),
    "bhfdBcsilFD": "sub",
    "bhfdFD": "acosh",
    "bhfdil": "arange round",
    "bhfdil?FD": "sgn",
    "bhfdl?": "erf expm1",
    "bhfdl?FD": "exp",
    "bhfdsl": "pow",
    "bhfi": "kthvalue sum",
    "bhfil?": "index_fill roll sign",
    "bhfl": "l1_loss",
    "bhfl?": "cumsum erfc max min",
    "bhfsil": "remainder",
    "bhfsil?": "index_select logaddexp masked_select take",
    "il": "one_hot",
}

# From CANN's pages: aclnnReduceSum (CANN 8.0 to 8.5) and aclnnMax (cann/ops-math).
_OF_KERNELS = {"sum": "bhfdBcsil?FD", "max": "bhfdBcsil?"}

DOCUMENTED: dict[str, frozenset[torch.dtype]] = {
    name: frozenset(LETTERS[letter] for letter in letters + _OF_KERNELS.get(name, ""))
    for letters, names in _OPERATORS.items()
    for name in names.split()
}
"""By operator, the dtypes of its first tensor."""
