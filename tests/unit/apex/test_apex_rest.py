"""The smaller parts of ``xamp.apex``: norms, MLP, cross entropy, clipping, pyprof.

Covers: xamp.apex.normalization, xamp.apex.mlp, xamp.apex.fused_dense, xamp.apex.contrib, xamp.apex.pyprof.
"""

from __future__ import annotations

import copy
import importlib
import subprocess
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from forked_python import python
from torch import nn

import xamp.apex
from xamp.apex import normalization, pyprof
from xamp.apex._modules import MODULES
from xamp.apex.contrib.clip_grad import clip_grad_norm_
from xamp.apex.contrib.xentropy import SoftmaxCrossEntropyLoss
from xamp.apex.fused_dense import FusedDense, FusedDenseGeluDense
from xamp.apex.mlp import MLP

NAMES = {
    "amp_C": (
        "multi_tensor_scale",
        "multi_tensor_axpby",
        "multi_tensor_l2norm",
        "multi_tensor_sgd",
        "multi_tensor_lamb",
    ),
    "apex_C": ("flatten", "unflatten"),
    "apex.amp": ("initialize", "scale_loss", "_amp_state"),
    "apex.amp._amp_state": ("_amp_state", "master_params"),
    "apex.amp.scaler": ("LossScaler",),
    "apex.contrib.clip_grad": ("clip_grad_norm_",),
    "apex.contrib.optimizers": ("FP16_Optimizer", "FusedAdam", "FusedLAMB", "FusedSGD"),
    "apex.contrib.xentropy": ("SoftmaxCrossEntropyLoss",),
    "apex.fp16_utils": ("FP16_Optimizer", "network_to_half", "prep_param_lists", "clip_grad_norm", "to_python_float"),
    "apex.mlp": ("MLP", "mlp_function"),
    "apex.multi_tensor_apply": ("MultiTensorApply", "multi_tensor_applier"),
    "apex.normalization": ("FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm"),
    "apex.optimizers": ("FusedAdam", "FusedLAMB", "FusedSGD", "FusedNovoGrad", "FusedAdagrad", "NpuFusedSGD"),
    "apex.parallel": ("DistributedDataParallel", "Reducer", "SyncBatchNorm", "convert_syncbn_model", "LARC"),
    "apex.parallel.LARC": ("LARC",),
    "apex.parallel.distributed": ("flat_dist_call", "Reducer", "DistributedDataParallel"),
}


def test_every_module_of_the_list_is_there() -> None:
    for name, home in MODULES.items():
        module = importlib.import_module(home)
        for wanted in NAMES.get(name, ()):
            assert hasattr(module, wanted), (name, wanted)
    assert set(NAMES) <= set(MODULES)


def test_an_unknown_name_is_an_attribute_error() -> None:
    for module in (xamp.apex, xamp.apex.optimizers, xamp.apex.contrib):
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            module.nothing  # noqa: B018


def test_nothing_is_imported_before_it_is_used() -> None:
    code = (
        "import sys, xamp.apex; from xamp.apex import amp\n"
        "names = [n for n in sys.modules if n.startswith('xamp.apex.') and '._' not in n]\n"
        "assert names == ['xamp.apex.amp'], names\n"
        "xamp.apex.optimizers.FusedSGD\n"
        "assert 'xamp.apex.optimizers.fused_lamb' not in sys.modules and 'xamp.apex.parallel' not in sys.modules"
    )
    subprocess.run([python(), "-c", code], check=True, timeout=600)


@pytest.mark.parametrize("shape", [5, (5,), (3, 5)])
@pytest.mark.parametrize("affine", [True, False])
def test_norms_are_torchs(shape: Any, affine: bool) -> None:
    dims = (shape,) if isinstance(shape, int) else shape
    x = torch.randn(2, 3, 5, requires_grad=True)
    layer = normalization.FusedLayerNorm(shape, elementwise_affine=affine)
    assert torch.equal(layer(x), F.layer_norm(x, dims, layer.weight, layer.bias, 1e-5))
    rms = normalization.FusedRMSNorm(shape, elementwise_affine=affine)
    wide = x.detach().double()
    over = tuple(range(-len(dims), 0))
    expected = wide / (wide.square().mean(over, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(rms(x).double(), expected, rtol=1e-6, atol=1e-6)
    rms(x).sum().backward()
    assert x.grad is not None
    manual = normalization.manual_rms_norm(x.detach(), dims, rms.weight, 1e-5)
    torch.testing.assert_close(manual.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_the_dtype_of_the_result_is_that_of_the_input_or_of_the_weight(low: torch.dtype) -> None:
    x = torch.randn(4, 8)
    for plain, mixed in (("FusedLayerNorm", "MixedFusedLayerNorm"), ("FusedRMSNorm", "MixedFusedRMSNorm")):
        exact = getattr(normalization, plain)(8)(x.to(low).float())
        for kind, weight, result in (
            (plain, torch.float32, low),
            (mixed, torch.float32, torch.float32),
            (plain, low, low),
            (mixed, low, low),
        ):
            out = getattr(normalization, kind)(8).to(weight)(x.to(low))
            assert out.dtype == result, (kind, weight)
            torch.testing.assert_close(
                out.float(), exact, rtol=torch.finfo(result).eps, atol=2 * torch.finfo(result).eps
            )
    w, b = torch.rand(8), torch.rand(8)
    for name, arguments in (("layer_norm", (w, b)), ("rms_norm", (w,))):
        assert getattr(normalization, f"fused_{name}_affine")(x.to(low), *arguments, (8,)).dtype == low
        assert (
            getattr(normalization, f"mixed_dtype_fused_{name}_affine")(x.to(low), *arguments, (8,)).dtype
            == torch.float32
        )
        assert getattr(normalization, f"fused_{name}")(x, (8,)).dtype == torch.float32


def test_mixed_norms_always_have_weights() -> None:
    for kind in (normalization.MixedFusedLayerNorm, normalization.MixedFusedRMSNorm):
        with pytest.warns(UserWarning, match="does not support `elementwise_affine` argument"):
            kind(4, elementwise_affine=True)
        with pytest.warns(UserWarning, match="affine"), pytest.raises(RuntimeError, match="elementwise_affine = False"):
            kind(4, elementwise_affine=False)
        with pytest.raises(TypeError, match="unknown arguments other"):
            kind(4, other=1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["none", "relu", "sigmoid"])
def test_mlp(bias: bool, activation: str) -> None:
    mlp = MLP([5, 7, 3], bias=bias, activation=activation)
    assert [name for name, _ in mlp.named_parameters()] == (
        ["weight_0", "bias_0", "weight_1", "bias_1"] if bias else ["weight_0", "weight_1"]
    )
    x = expected = torch.randn(4, 5)
    act = {"none": lambda t: t, "relu": torch.relu, "sigmoid": torch.sigmoid}[activation]
    for index in range(2):
        expected = expected @ mlp.weights[index].t() + (mlp.biases[index] if bias else 0.0)
        expected = act(expected)
    torch.testing.assert_close(mlp(x), expected)
    twin = copy.deepcopy(mlp)  # Apex's runs the original's weights
    with torch.no_grad():
        twin.weights[0].zero_()
    assert not torch.equal(mlp(x), twin(x))
    with pytest.raises(TypeError, match="one of none, relu, sigmoid"):
        MLP([2, 2], activation="tanh")


def test_dense_layers() -> None:
    x = torch.randn(4, 5)
    dense = FusedDense(5, 3)
    torch.testing.assert_close(dense(x), x @ dense.weight.t() + dense.bias)
    two = FusedDenseGeluDense(5, 6, 3)
    inner = F.gelu(x @ two.weight1.t() + two.bias1)
    torch.testing.assert_close(two(x), inner @ two.weight2.t() + two.bias2)
    assert len(list(two.parameters())) == 4


_cross_entropy: Any = SoftmaxCrossEntropyLoss.apply


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("padding", [-100, -1, 0, 7])
def test_a_padding_label_need_not_be_a_class(padding: int, smoothing: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 5, generator=generator, dtype=torch.float64).requires_grad_()
    labels = torch.tensor([1, padding, 4, 2, padding, 3])
    losses = _cross_entropy(logits, labels, smoothing, padding)
    weight = torch.arange(1.0, 7.0, dtype=torch.float64)
    (losses * weight).sum().backward()

    twin = logits.detach().clone().requires_grad_()
    wanted = nn.functional.cross_entropy(
        twin, labels, reduction="none", ignore_index=padding, label_smoothing=smoothing
    )
    (wanted * weight).sum().backward()
    assert torch.allclose(losses, wanted, rtol=1e-12, atol=1e-14)
    assert logits.grad is not None
    assert twin.grad is not None
    assert torch.allclose(logits.grad, twin.grad, rtol=1e-12, atol=1e-14)


def test_padded_rows_that_are_not_finite_give_zeros() -> None:
    logits = torch.tensor([[0.5, 1.0], [float("inf"), 0.0]], requires_grad=True)
    losses = _cross_entropy(logits, torch.tensor([1, -1], dtype=torch.int32), 0.0, -1)
    losses.sum().backward()
    assert losses[1] == 0
    assert logits.grad is not None
    assert logits.grad[1].tolist() == [0.0, 0.0]
    assert bool(torch.isfinite(logits.grad).all())


def test_cross_entropy_of_half_logits() -> None:
    logits, labels = torch.randn(8, 5).half().requires_grad_(), torch.arange(8) % 5
    assert _cross_entropy(logits, labels).dtype == torch.float16
    losses = _cross_entropy(logits, labels, 0.1, -1, True)
    assert losses.dtype == torch.float32
    losses.sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.float16
    torch.testing.assert_close(losses, F.cross_entropy(logits.float(), labels, label_smoothing=0.1, reduction="none"))


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping(norm_type: float) -> None:
    params, twins = ([nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2).half())] for _ in range(2))
    for param, twin in zip(params, twins, strict=True):
        param.grad, twin.grad = torch.full_like(param, 5.0), torch.full_like(param, 5.0)
    found = clip_grad_norm_(params, 1.0, norm_type)
    expected = nn.utils.clip_grad_norm_(twins, 1.0, norm_type)
    assert torch.equal(found, expected)
    assert all(
        torch.equal(p.grad, t.grad)
        for p, t in zip(params, twins, strict=True)
        if p.grad is not None and t.grad is not None
    )
    params[0].grad = torch.full((3,), float("nan"))
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(params, 1.0, error_if_nonfinite=True)


def test_pyprof_says_once_that_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyprof, "_told", False)
    with pytest.warns(UserWarning, match="nothing is recorded. Use torch.profiler.profile"):
        pyprof.nvtx.init(enable_function_stack=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pyprof.init()
        pyprof.wrap(torch, "add")
