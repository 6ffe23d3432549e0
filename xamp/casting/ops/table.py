"""The portable op policy as data: which operator overload runs in which dtype inside a region, the same on all devices.

The table has the 120 overloads for which CUDA's autocast has a rule, with CUDA's rules. It also has the eight overloads
of recurrent layers (four layers, each for tensors and for packed sequences); CUDA lowers these further inside. A second
table has what a CPU's autocast casts to fp32, because a CPU lacks it in the lower dtypes, and what most cards lack
there too: without it a script that runs on a CPU would end with an error on a card. An operator in neither table runs
in the dtype of its inputs, or by the device's own list. No rule casts float64, fp8, integer or complex tensors.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

__all__ = ["LAYERS", "OWN", "REFERENCE", "RULES", "UNLISTED", "Kind", "Rule"]

Kind = Literal["lower", "fp32", "fp32_dtype", "promote", "banned"]


class Rule(NamedTuple):
    """What a region does to the floating tensors of a call.

    Attributes:
        kind: ``"lower"``: the tensors are cast to the region's dtype. ``"fp32"``: they are cast to fp32.
            ``"fp32_dtype"``: they stay as they are, and the operator's ``dtype`` argument becomes fp32 if the caller
            left it out; for an overload without that argument, the overload that has it is called instead.
            ``"promote"``: they are cast to fp32 if one of them is fp32, else to the region's dtype. ``"banned"``: the
            call raises an error that names an alternative.
        reason: Why, in one sentence without a full stop.
    """

    kind: Kind
    reason: str


_LAYERS = "gru.data gru.input lstm.data lstm.input rnn_relu.data rnn_relu.input rnn_tanh.data rnn_tanh.input"

_GROUPS: tuple[tuple[Kind, str, str], ...] = (
    (
        "lower",
        "a convolution: matrix units multiply in the lower dtype and accumulate in fp32",
        """_convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
        conv_transpose3d.input convolution cudnn_convolution cudnn_convolution_transpose""",
    ),
    (
        "lower",
        "a product of matrices or vectors: matrix units multiply in the lower dtype and accumulate in fp32",
        "addbmm addmm addmv addr baddbmm bmm chain_matmul einsum linalg_multi_dot linalg_vecdot linear matmul mm mv",
    ),
    (
        "lower",
        "attention is two products of matrices; the softmax between them keeps fp32 inside the kernel",
        "_scaled_dot_product_flash_attention scaled_dot_product_attention",
    ),
    (
        "lower",
        "a recurrent cell is products of matrices, and its gates are bounded",
        "_thnn_fused_gru_cell _thnn_fused_lstm_cell gru_cell lstm_cell rnn_relu_cell rnn_tanh_cell",
    ),
    (
        "lower",
        "products of matrices at each time step; lowered as a whole, so that weights are cast once a call",
        _LAYERS,
    ),
    ("lower", "an activation with a weight: one dtype for both, that of the layer before it", "prelu"),
    ("fp32", "grows past fp16's largest number, 65504, at moderate inputs", "cosh exp expm1 sinh"),
    ("fp32", "a power leaves fp16's range in both directions", "pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor"),
    (
        "fp32",
        "steep near its poles: inputs that the lower dtype cannot tell apart have results far apart",
        "acos asin erfinv log log10 log1p log2 reciprocal rsqrt tan",
    ),
    ("fp32", "exponentiates and takes the logarithm", "logsumexp softplus"),
    (
        "fp32",
        "statistics over many elements: squares overflow fp16, and variances lose their digits",
        "group_norm layer_norm native_layer_norm rms_norm",
    ),
    (
        "fp32",
        "a norm: sums of squares overflow fp16 and lose digits",
        "cosine_similarity frobenius_norm.dim renorm",
    ),
    (
        "fp32",
        "a norm of singular values, for whose decomposition few devices have a lower kernel",
        "nuclear_norm nuclear_norm.dim",
    ),
    (
        "fp32",
        "by eigenvalues, for which no device has a lower kernel; torch 2.15 brought it",
        "linalg_matrix_sqrth",
    ),
    ("fp32", "a distance: small differences are squared and summed", "cdist dist pdist"),
    (
        "fp32",
        "a loss: sums many small terms, and its gradient starts the backward",
        """binary_cross_entropy_with_logits cosine_embedding_loss hinge_embedding_loss huber_loss kl_div l1_loss
        margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss nll_loss nll_loss2d poisson_nll_loss
        smooth_l1_loss soft_margin_loss triplet_margin_loss""",
    ),
    (
        "fp32",
        "interpolation: weights are differences of coordinates, and its backward adds up many elements into one",
        """_upsample_bicubic2d_aa _upsample_bilinear2d_aa upsample_bicubic2d upsample_bilinear2d upsample_linear1d
        upsample_trilinear3d""",
    ),
    (
        "fp32",
        "copies elements forward, but its backward adds up many into one",
        """_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d upsample_nearest1d
        upsample_nearest2d upsample_nearest3d""",
    ),
    ("fp32_dtype", "adds up many terms", "cumsum sum sum.dim_IntList"),
    (
        "fp32_dtype",
        "multiplies many factors, which leaves fp16's range in both directions",
        "cumprod prod prod.dim_int",
    ),
    ("fp32_dtype", "exponentiates, and divides by the sum of many terms", "log_softmax.int softmax.int"),
    (
        "fp32_dtype",
        "a norm: sums of squares overflow fp16 and lose digits",
        "linalg_matrix_norm linalg_matrix_norm.str_ord linalg_vector_norm norm.Scalar norm.ScalarOpt_dim",
    ),
    (
        "promote",
        "computes element by element on several tensors: in the widest of their dtypes",
        "addcdiv addcmul atan2 cross",
    ),
    ("promote", "a product that must find one dtype in all its tensors", "bilinear dot tensordot vdot"),
    ("promote", "writes one tensor into another, which must have its dtype", "index_put scatter_add"),
    ("promote", "the image and the coordinates into it must agree in dtype", "grid_sampler"),
    (
        "banned",
        "its gradient, about 1/p, does not fit fp16: use binary_cross_entropy_with_logits on what the sigmoid is given",
        "binary_cross_entropy",
    ),
)


# What a CPU's autocast casts, and no card's: most of it has no kernel in the lower dtypes on any card.
_MADE_OF_OTHERS = "fft_hfft2 fft_hfftn fft_ihfft2 fft_ihfftn"  # a CPU's autocast leaves these out
_UNLISTED: tuple[tuple[Kind, str, str], ...] = (
    (
        "fp32",
        "a Fourier transform: no card has one in bf16, nor one in fp16 but of sizes that are powers of two",
        """fft_fft fft_fft2 fft_fftn fft_hfft fft_hfft2 fft_hfftn fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_ihfft2
        fft_ihfftn fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn stft stft.center""",
    ),
    (
        "fp32",
        "a decomposition of matrices or what solves by one: no device has a lower kernel",
        """_lu_with_info cholesky cholesky_inverse cholesky_solve geqrf inverse linalg_cholesky linalg_cholesky_ex
        linalg_cond linalg_cond.p_str linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh
        linalg_householder_product linalg_inv linalg_inv_ex linalg_lstsq linalg_matrix_rank
        linalg_matrix_rank.atol_rtol_float linalg_matrix_rank.atol_rtol_tensor linalg_matrix_rank.tol_tensor
        linalg_qr linalg_solve linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve lu_solve orgqr
        ormqr pinverse qr svd triangular_solve""",
    ),
    (
        "fp32",
        "a quantile: sorts, and interpolates between neighbours; no device has a lower kernel",
        "nanquantile nanquantile.scalar quantile quantile.scalar",
    ),
    ("fp32", "makes complex numbers, and no device has any of bf16", "polar view_as_complex"),
    (
        "fp32",
        "a loss: adds up probabilities along many paths; no card has a lower kernel",
        "ctc_loss.IntList ctc_loss.Tensor",
    ),
)


def _rules(groups: Iterable[tuple[Kind, str, str]]) -> dict[str, Rule]:
    """Return the rule of each overload in the groups, in alphabetical order."""
    rules = {name: Rule(kind, reason) for kind, reason, names in groups for name in names.split()}
    return {name: rules[name] for name in sorted(rules)}


RULES: Mapping[str, Rule] = types.MappingProxyType(_rules(_GROUPS))
"""Overload without its namespace (``"softmax.int"``; ``"mm"`` for the default one) -> rule, in alphabetical order."""

LAYERS = frozenset(_LAYERS.split())
"""The rows that no device lists: CUDA lowers these inside."""

UNLISTED: Mapping[str, Rule] = types.MappingProxyType(_rules(_UNLISTED))
"""The same of what no card's list has, as :data:`RULES` has it of what one has."""

_CPU = """
    _addmm_activation _grid_sampler_2d_cpu_fallback _native_multi_head_attention adaptive_avg_pool3d
    adaptive_max_pool3d avg_pool3d cat conv1d.padding conv2d.padding conv3d.padding cross_entropy_loss
    fake_quantize_per_tensor_affine fractional_max_pool2d fractional_max_pool3d grid_sampler_2d grid_sampler_3d
    index_copy max_pool3d max_unpool2d max_unpool3d mkldnn_rnn_layer multilabel_margin_loss_forward
    reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d replication_pad3d stack trace
"""

# Of named tensors, which torch has dropped; then what recurrent layers run on a card, in builds with cuDNN.
_CUDA = """
    cumprod.dimname cumsum.dimname log_softmax.Dimname norm.names_ScalarOpt_dim prod.dim_Dimname softmax.Dimname
    sum.dim_DimnameList _cudnn_rnn
"""

REFERENCE = "cuda"
"""The device type whose autocast list the table was made from."""

OWN: Mapping[str, frozenset[str]] = types.MappingProxyType(
    {
        "cpu": frozenset([*_CPU.split(), *UNLISTED, "index_copy.dimname", "prod.dim_Dimname"])
        - frozenset(_MADE_OF_OTHERS.split()),
        REFERENCE: frozenset(_CUDA.split()),
    }
)
"""Device type -> what its own list has in one or another torch, and the table leaves to it."""
