"""The rest of Apex: what ``xamp.apex`` has under the same names, and what it does not have."""

from __future__ import annotations

from collections.abc import Mapping

from xamp.apex._modules import LEFT_OUT, MODULES
from xamp.port.rule import Example, Grade, Rule, Target

__all__ = ["RULES"]

_NORMS = (
    *("FusedLayerNorm", "MixedFusedLayerNorm", "FusedRMSNorm", "MixedFusedRMSNorm", "manual_rms_norm"),
    *("fused_layer_norm", "fused_layer_norm_affine", "mixed_dtype_fused_layer_norm_affine"),
    *("fused_rms_norm", "fused_rms_norm_affine", "mixed_dtype_fused_rms_norm_affine"),
)
_HALVES = (
    *("BN_convert_float", "network_to_half", "prep_param_lists", "model_grads_to_master_grads", "tofp16"),
    *("master_params_to_model_params", "to_python_float", "clip_grad_norm", "convert_module", "convert_network"),
    "FP16Model",
)
_DENSE = ("FusedDense", "FusedDenseGeluDense", "fused_dense_function", "fused_dense_gelu_dense_function")
_FLAT = (
    *("apply_flat_dist_call", "extract_tensors", "flat_dist_call", "flatten", "split_by_type"),
    *("split_half_float_double", "unflatten"),
)
_FUSED = ("FusedAdam", "FusedSGD", "FusedLAMB", "FusedNovoGrad", "FusedAdagrad", "FusedMixedPrecisionLamb")
_ASCEND = (
    *("NpuFusedAdadelta", "NpuFusedAdam", "NpuFusedAdamP", "NpuFusedAdamW", "NpuFusedBertAdam", "NpuFusedLamb"),
    *("NpuFusedRMSprop", "NpuFusedRMSpropTF", "NpuFusedSGD"),
)
# By module of Apex: the names in the module of xamp.apex that has the same name.
_PARTS: Mapping[str, tuple[str, ...]] = {
    "parallel": (
        *("DistributedDataParallel", "Reducer", "ReduceOp", "SyncBatchNorm", "LARC"),
        *("convert_syncbn_model", "create_syncbn_process_group"),
    ),
    "optimizers": (*_FUSED, *_ASCEND, "Lamb", "FP16_Optimizer"),
    "normalization": _NORMS,
    "multi_tensor_apply": ("MultiTensorApply", "multi_tensor_applier"),
    "fp16_utils": (*_HALVES, "FP16_Optimizer", "LossScaler", "DynamicLossScaler"),
    "mlp": ("MLP", "mlp_function"),
    "fused_dense": _DENSE,
    "pyprof": ("init", "nvtx", "wrap"),
    "contrib.clip_grad": ("clip_grad_norm_",),
    "contrib.xentropy": ("SoftmaxCrossEntropyLoss",),
    "contrib.optimizers": ("FP16_Optimizer", "FusedAdam", "FusedLAMB", "FusedSGD"),
}
# Files of a module from which scripts import its names.
_FILES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "parallel": {
        "distributed": ("DistributedDataParallel", "Reducer", *_FLAT),
        "multiproc": ("main",),
        "LARC": ("LARC",),
        "sync_batchnorm": ("SyncBatchNorm",),
        "optimized_sync_batchnorm": ("SyncBatchNorm",),
    },
    "optimizers": {
        "fused_adam": ("FusedAdam",),
        "fused_sgd": ("FusedSGD",),
        "fused_lamb": ("FusedLAMB",),
        "fused_novograd": ("FusedNovoGrad",),
        "fused_adagrad": ("FusedAdagrad",),
        "fused_mixed_precision_lamb": ("FusedMixedPrecisionLamb",),
        "lamb": ("Lamb",),
        "npu_fused_adadelta": ("NpuFusedAdadelta",),
        "npu_fused_adam": ("NpuFusedAdam",),
        "npu_fused_adamp": ("NpuFusedAdamP",),
        "npu_fused_adamw": ("NpuFusedAdamW",),
        "npu_fused_bert_adam": ("NpuFusedBertAdam", "SCHEDULES"),
        "npu_fused_lamb": ("NpuFusedLamb",),
        "npu_fused_rmsprop": ("NpuFusedRMSprop",),
        "npu_fused_rmsprop_tf": ("NpuFusedRMSpropTF",),
        "npu_fused_sgd": ("NpuFusedSGD",),
    },
    "normalization": {"fused_layer_norm": _NORMS},
    "multi_tensor_apply": {"multi_tensor_apply": ("MultiTensorApply",)},
    "fp16_utils": {
        "fp16_optimizer": ("FP16_Optimizer",),
        "fp16util": _HALVES,
        "loss_scaler": ("LossScaler", "DynamicLossScaler", "to_python_float"),
    },
    "mlp": {"mlp": ("MLP", "mlp_function")},
    "fused_dense": {"fused_dense": _DENSE},
    "contrib.clip_grad": {"clip_grad": ("clip_grad_norm_",)},
    "contrib.xentropy": {"softmax_xentropy": ("SoftmaxCrossEntropyLoss",)},
    "contrib.optimizers": {
        "fp16_optimizer": ("FP16_Optimizer",),
        "fused_adam": ("FusedAdam",),
        "fused_lamb": ("FusedLAMB",),
        "fused_sgd": ("FusedSGD",),
    },
}


def _table() -> dict[str, Target]:
    table: dict[str, Target] = {"apex.contrib": Target("xamp.apex.contrib", is_module=True)}
    for part, names in _PARTS.items():
        missing = f"xamp.apex.{part} does not have this name of apex.{part}"
        table[f"apex.{part}"] = Target(f"xamp.apex.{part}", is_module=True, text=missing)
        table.update({f"apex.{part}.{name}": Target(f"xamp.apex.{part}.{name}") for name in names})
        for file, inside in _FILES.get(part, {}).items():
            here = MODULES[f"apex.{part}.{file}"]
            if file not in names:
                table[f"apex.{part}.{file}"] = Target(here, is_module=True, text=missing)
            for name in inside:
                home = f"xamp.apex.{part}" if name in names else here
                table[f"apex.{part}.{file}.{name}"] = Target(f"{home}.{name}")
    missing = "xamp.apex.optimizers does not have this name of torch_npu.optim"
    table["torch_npu.optim"] = Target("xamp.apex.optimizers", is_module=True, text=missing)
    for name in _ASCEND:
        table[f"torch_npu.optim.{name}"] = Target(f"xamp.apex.optimizers.{name}")
    for file, inside in _FILES["optimizers"].items():
        if file.startswith("npu_"):
            table[f"torch_npu.optim.{file}"] = Target(MODULES[f"apex.optimizers.{file}"], is_module=True, text=missing)
            table[f"torch_npu.optim.{file}.{inside[0]}"] = Target(f"xamp.apex.optimizers.{inside[0]}")
    for part, instead in LEFT_OUT.items():
        table[part] = Target(None, Grade.UNSUPPORTED, f"xamp does not have {part}: {instead}", is_module=True)
    return table | {name: Target(f"xamp.apex.{name}") for name in ("amp_C", "apex_C")}


class Parts(Rule):
    """The rest of Apex is `xamp.apex`: `parallel`, `optimizers`, `normalization`, `fp16_utils` and others.

    Names stay; only the import changes. The same for the fused optimizers of Ascend's Apex and `torch_npu.optim`. What
    xamp leaves out is reported, with what to use in its place.
    """

    name = "apex-parts"
    met = 137
    names = _table()
    examples = (
        Example(
            "from apex.parallel import DistributedDataParallel as DDP\nmodel = DDP(model, delay_allreduce=True)\n",
            "from xamp.apex.parallel import DistributedDataParallel as DDP\nmodel = DDP(model, delay_allreduce=True)\n",
        ),
        Example(
            "import apex\nmodel = apex.parallel.convert_syncbn_model(model)\n",
            "import xamp.apex.parallel\nmodel = xamp.apex.parallel.convert_syncbn_model(model)\n",
        ),
        Example(
            "from apex.parallel.distributed import flat_dist_call, Reducer\nfrom apex.parallel import distributed\n",
            "from xamp.apex.parallel.distributed import flat_dist_call\nfrom xamp.apex.parallel import Reducer\n"
            "from xamp.apex.parallel import distributed\n",
        ),
        Example("from apex.optimizers import NpuFusedSGD\n", "from xamp.apex.optimizers import NpuFusedSGD\n"),
        Example(
            "from apex.optimizers.npu_fused_adam import NpuFusedAdam\nfrom apex.optimizers.lamb import Lamb\n",
            "from xamp.apex.optimizers import NpuFusedAdam\nfrom xamp.apex.optimizers import Lamb\n",
        ),
        Example(
            "from apex.optimizers import npu_fused_bert_adam as b\nrate = b.SCHEDULES['warmup_poly'](0.5)\n",
            "from xamp.apex.optimizers import npu_fused_others as b\nrate = b.SCHEDULES['warmup_poly'](0.5)\n",
        ),
        Example(
            "import torch_npu\nopt = torch_npu.optim.NpuFusedSGD(params, lr=0.1)\n",
            "import xamp.apex.optimizers\nopt = xamp.apex.optimizers.NpuFusedSGD(params, lr=0.1)\n",
        ),
        Example(
            "import amp_C\nf = amp_C.multi_tensor_l2norm\n",
            "from xamp.apex import amp_C\nf = amp_C.multi_tensor_l2norm\n",
        ),
        Example("from apex.fp16_utils import *\n", "from xamp.apex.fp16_utils import *\n"),
        Example(
            "from apex.normalization.fused_layer_norm import FusedLayerNorm as LayerNorm\n",
            "from xamp.apex.normalization import FusedLayerNorm as LayerNorm\n",
        ),
        Example(
            "from apex import amp, optimizers\nopt = optimizers.FusedAdam(params)\n"
            "model = amp.initialize(model, opt_level='O2')\n",
            "from xamp.apex import optimizers\nimport xamp\nopt = optimizers.FusedAdam(params)\n"
            "model = xamp.initialize(model, level='O2')\n",
        ),
        Example(
            "import apex.reparameterization\napex.reparameterization.apply_weight_norm(model)\n",
            "# TODO(xamp): some names of apex have no counterpart in xamp; see the notes below\n"
            "import apex.reparameterization\n"
            "# TODO(xamp): xamp does not have apex.reparameterization: use "
            "torch.nn.utils.parametrizations.weight_norm\n"
            "apex.reparameterization.apply_weight_norm(model)\n",
        ),
    )
    unchanged = (
        "from mylib.apex import parallel\nparallel.DistributedDataParallel(model)\n",
        "from mylib.optimizers.npu_fused_adam import NpuFusedAdam\nfrom .npu_fused_sgd import NpuFusedSGD\n",
        "import mine as torch_npu\nopt = torch_npu.optim.NpuFusedSGD(params, lr=0.1)\n",
    )


RULES = (Parts(),)
