"""``apex.optimizers``: Apex's fused optimizers and Ascend's, in torch's foreach operators, for any device."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from xamp.registry.registry import require_torch

if TYPE_CHECKING:
    from xamp.apex.optimizers._older import FP16_Optimizer
    from xamp.apex.optimizers.fused_adagrad import FusedAdagrad
    from xamp.apex.optimizers.fused_adam import FusedAdam
    from xamp.apex.optimizers.fused_lamb import FusedLAMB
    from xamp.apex.optimizers.fused_mixed_precision_lamb import FusedMixedPrecisionLamb
    from xamp.apex.optimizers.fused_novograd import FusedNovoGrad
    from xamp.apex.optimizers.fused_sgd import FusedSGD
    from xamp.apex.optimizers.npu_fused import (
        NpuFusedAdadelta,
        NpuFusedAdam,
        NpuFusedAdamW,
        NpuFusedRMSprop,
        NpuFusedSGD,
    )
    from xamp.apex.optimizers.npu_fused_others import (
        Lamb,
        NpuFusedAdamP,
        NpuFusedBertAdam,
        NpuFusedLamb,
        NpuFusedRMSpropTF,
    )

require_torch(__name__)

_HOMES = {
    "optimizers._older": ("FP16_Optimizer",),
    "optimizers.fused_adagrad": ("FusedAdagrad",),
    "optimizers.fused_adam": ("FusedAdam",),
    "optimizers.fused_lamb": ("FusedLAMB",),
    "optimizers.fused_mixed_precision_lamb": ("FusedMixedPrecisionLamb",),
    "optimizers.fused_novograd": ("FusedNovoGrad",),
    "optimizers.fused_sgd": ("FusedSGD",),
    "optimizers.npu_fused": ("NpuFusedAdadelta", "NpuFusedAdam", "NpuFusedAdamW", "NpuFusedRMSprop", "NpuFusedSGD"),
    "optimizers.npu_fused_others": (
        *("Lamb", "NpuFusedAdamP", "NpuFusedBertAdam", "NpuFusedLamb", "NpuFusedRMSpropTF"),
    ),
}

__all__ = [
    "FP16_Optimizer",
    "FusedAdagrad",
    "FusedAdam",
    "FusedLAMB",
    "FusedMixedPrecisionLamb",
    "FusedNovoGrad",
    "FusedSGD",
    "Lamb",
    "NpuFusedAdadelta",
    "NpuFusedAdam",
    "NpuFusedAdamP",
    "NpuFusedAdamW",
    "NpuFusedBertAdam",
    "NpuFusedLamb",
    "NpuFusedRMSprop",
    "NpuFusedRMSpropTF",
    "NpuFusedSGD",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"xamp.apex.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
