"""Ascend's names for optimizers that torch has: ``NpuFusedSGD`` and its like, with Ascend's arguments and defaults.

Ascend's classes step one flat buffer for each dtype. These step the parameters as they are, in torch's foreach form or,
where Triton compiles for the device, by xamp's kernels of SGD, Adam and AdamW, and take the same steps. Unlike
Ascend's, they work without ``amp`` and at every level.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import required

from xamp.plans.derived import StepsInOnePass

__all__ = ["NpuFusedAdadelta", "NpuFusedAdam", "NpuFusedAdamW", "NpuFusedRMSprop", "NpuFusedSGD"]


class NpuFusedSGD(StepsInOnePass, torch.optim.SGD):
    """SGD. Arguments as Ascend's: the learning rate has no default."""

    is_npu_fused_optimizer = True
    torchs = torch.optim.SGD

    def __init__(
        self,
        params: Any,
        lr: Any = required,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        if lr is required:
            raise ValueError(
                "NpuFusedSGD: parameter group didn't specify a value of required optimization parameter lr"
            )
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov)


class NpuFusedAdam(StepsInOnePass, torch.optim.Adam):
    """Adam, with the decay added to the gradients."""

    is_npu_fused_optimizer = True
    torchs = torch.optim.Adam

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad)


class NpuFusedAdamW(StepsInOnePass, torch.optim.AdamW):
    """AdamW."""

    is_npu_fused_optimizer = True
    torchs = torch.optim.AdamW

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad)


class NpuFusedAdadelta(torch.optim.Adadelta):
    """Adadelta."""

    is_npu_fused_optimizer = True

    def __init__(
        self, params: Any, lr: float = 1.0, rho: float = 0.9, eps: float = 1e-6, weight_decay: float = 0
    ) -> None:
        super().__init__(params, lr, rho, eps, weight_decay)


class NpuFusedRMSprop(torch.optim.RMSprop):
    """RMSprop, with ``eps`` outside of the root."""

    is_npu_fused_optimizer = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum: float = 0,
        centered: bool = False,
    ) -> None:
        super().__init__(params, lr, alpha, eps, weight_decay, momentum, centered)
