"""``apex.contrib.optimizers``: the optimizers of Apex's first interface, which took gradients as arguments."""

from __future__ import annotations

from xamp.apex.optimizers._older import FP16_Optimizer, FusedAdam, FusedSGD
from xamp.apex.optimizers.fused_lamb import FusedLAMB

__all__ = ["FP16_Optimizer", "FusedAdam", "FusedLAMB", "FusedSGD"]
