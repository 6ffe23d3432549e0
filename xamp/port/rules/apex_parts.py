"""The rest of Apex: what ``xamp.apex`` has under the same names, and what it does not have."""

from __future__ import annotations

from collections.abc import Mapping

from xamp.port.rule import Example, Grade, Rule, Target

__all__ = ["RULES"]

_PARTS: Mapping[str, tuple[str, ...]] = {
    "parallel": (
        "DistributedDataParallel",
        "Reducer",
        "SyncBatchNorm",
        "convert_syncbn_model",
        "create_syncbn_process_group",
        "LARC",
    ),
    "optimizers": (
        "FusedAdam",
        "FusedSGD",
        "FusedLAMB",
        "FusedNovoGrad",
        "FusedAdagrad",
        "FusedMixedPrecisionLamb",
    ),
    "normalization": ("FusedLayerNorm", "MixedFusedLayerNorm", "FusedRMSNorm", "MixedFusedRMSNorm"),
    "multi_tensor_apply": ("MultiTensorApply", "multi_tensor_applier"),
    "fp16_utils": (
        "BN_convert_float",
        "network_to_half",
        "prep_param_lists",
        "model_grads_to_master_grads",
        "master_params_to_model_params",
        "tofp16",
        "to_python_float",
        "clip_grad_norm",
        "convert_module",
        "convert_network",
        "FP16Model",
        "FP16_Optimizer",
        "LossScaler",
        "DynamicLossScaler",
    ),
    "mlp": ("MLP", "mlp"),
}
_FILES = {
    "parallel": {"distributed": ("DistributedDataParallel", "Reducer"), "LARC": ("LARC",)},
    "optimizers": {
        "fused_adam": ("FusedAdam",),
        "fused_sgd": ("FusedSGD",),
        "fused_lamb": ("FusedLAMB",),
        "fused_novograd": ("FusedNovoGrad",),
        "fused_adagrad": ("FusedAdagrad",),
    },
    "normalization": {"fused_layer_norm": _PARTS["normalization"]},
    "fp16_utils": {
        "fp16_optimizer": ("FP16_Optimizer",),
        "fp16util": _PARTS["fp16_utils"][:11],
        "loss_scaler": ("LossScaler", "DynamicLossScaler"),
    },
}
_OPTIMIZERS = {
    "NpuFusedAdam": "torch.optim.Adam",
    "NpuFusedAdamW": "torch.optim.AdamW",
    "NpuFusedSGD": "torch.optim.SGD",
    "NpuFusedAdadelta": "torch.optim.Adadelta",
    "NpuFusedRMSprop": "torch.optim.RMSprop",
}


def _table() -> dict[str, Target]:
    table: dict[str, Target] = {}
    for part, names in _PARTS.items():
        missing = f"xamp.apex.{part} does not have this name of apex.{part}"
        table[f"apex.{part}"] = Target(f"xamp.apex.{part}", is_module=True, text=missing)
        table.update({f"apex.{part}.{name}": Target(f"xamp.apex.{part}.{name}") for name in names})
        for file, inside in _FILES.get(part, {}).items():
            if file not in names:
                table[f"apex.{part}.{file}"] = Target(None, Grade.UNSUPPORTED, missing, is_module=True)
            table.update({f"apex.{part}.{file}.{name}": Target(f"xamp.apex.{part}.{name}") for name in inside})
    return table


class Parts(Rule):
    """`apex.parallel`, `optimizers`, `normalization`, `multi_tensor_apply`, `fp16_utils` and `mlp` are in `xamp.apex`.

    Names stay, so that only the import changes.
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
        Example("from apex.fp16_utils import *\n", "from xamp.apex.fp16_utils import *\n"),
        Example(
            "from apex.normalization.fused_layer_norm import FusedLayerNorm as LayerNorm\n",
            "from xamp.apex.normalization import FusedLayerNorm as LayerNorm\n",
        ),
        Example(
            "from apex import amp, optimizers\nopt = optimizers.FusedAdam(params)\nmodel = amp.initialize(model, opt_level='O2')\n",
            "from xamp.apex import optimizers\nimport xamp\nopt = optimizers.FusedAdam(params)\n"
            "model = xamp.initialize(model, level='O2')\n",
        ),
        Example(
            "import apex.reparameterization\napex.reparameterization.apply_weight_norm(model)\n",
            "# TODO(xamp): some names of apex have no counterpart in xamp; see the notes below\n"
            "import apex.reparameterization\n"
            "# TODO(xamp): xamp has no counterpart of this part of Apex\n"
            "apex.reparameterization.apply_weight_norm(model)\n",
        ),
    )
    unchanged = ("from mylib.apex import parallel\nparallel.DistributedDataParallel(model)\n",)


class NpuOptimizers(Rule):
    """Ascend's fused optimizers are torch's: `xamp.initialize` switches to the fused form where the device has one."""

    name = "npu-optimizers"
    grade = Grade.NOTED
    met = 0
    names = {
        f"apex.optimizers.{old}": Target(
            new,
            Grade.NOTED,
            f"{old} only exists on Ascend; {new} is the same rule, fused by xamp.initialize where that works",
        )
        for old, new in _OPTIMIZERS.items()
    }
    examples = (
        Example(
            "from apex.optimizers import NpuFusedSGD\nopt = NpuFusedSGD(model.parameters(), lr=0.1)\n",
            "# TODO(xamp): NpuFusedSGD only exists on Ascend; torch.optim.SGD is the same rule, fused by xamp.initialize "
            "where that works\n"
            "from torch.optim import SGD as NpuFusedSGD\nopt = NpuFusedSGD(model.parameters(), lr=0.1)\n",
        ),
    )
    unchanged = ("from mine import NpuFusedSGD\n",)


RULES = (NpuOptimizers(), Parts())
