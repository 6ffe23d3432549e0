"""``FusedLAMB``: LAMB with Apex's arguments, defaults and states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from xamp.apex import amp_C
from xamp.apex._multi_tensor import grad_norm
from xamp.apex.multi_tensor_apply import multi_tensor_applier
from xamp.apex.optimizers._fused import FusedOptimizer
from xamp.torch_compat.closures import loss_of

__all__ = ["FusedLAMB"]


class FusedLAMB(FusedOptimizer):
    """LAMB (https://arxiv.org/abs/1904.00962). The count of steps is ``group["step"]``.

    Args:
        params: parameters, or groups of them.
        lr: the learning rate.
        bias_correction: divide the moments by ``1 - beta**step``.
        betas: factors of the first and of the second moment.
        eps: added to the root of the second moment.
        weight_decay: where it is 0, the update is not scaled by norms, unless ``use_nvlamb``.
        amsgrad: not supported.
        adam_w_mode: add the decay to the update; False: to the gradients.
        grad_averaging: weigh a new gradient by ``1 - beta1`` in the first moment; False: by 1.
        set_grad_none: ``zero_grad()`` sets gradients to None; False: to zero.
        max_grad_norm: all gradients together are scaled down to this norm. One value for all groups.
        use_nvlamb: scale updates by norms also where ``weight_decay`` is 0.

    Raises:
        RuntimeError: ``amsgrad``.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedLAMB does not support the AMSGrad variant.")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
        }
        super().__init__(params, defaults)
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.set_grad_none = set_grad_none
        self.use_nvlamb = use_nvlamb

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step. ``closure`` computes the loss again; what it returns is returned."""
        loss = loss_of(closure)
        sorted_groups = [self._with_gradients(group) for group in self.param_groups]
        stepped = [param for lists in sorted_groups for params in lists for param in params]
        if not stepped:
            return loss
        norm = grad_norm(self, stepped)
        for group, lists in zip(self.param_groups, sorted_groups, strict=True):
            if group["params"]:
                self._step_group(group, lists, norm)
        return loss

    def _step_group(self, group: dict[str, Any], lists: list[list[torch.Tensor]], norm: torch.Tensor) -> None:
        group["step"] = int(group.get("step", 0)) + 1
        for params in lists:
            moments = [self._state_list(params, name) for name in ("exp_avg", "exp_avg_sq")]
            given: list[list[Any]] = [self._grads(params), params, *moments]
            limits = (norm.to(params[0].device), self.defaults["max_grad_norm"], self.use_nvlamb)
            options = (*self._numbers(group, group["lr"]), self.adam_w_mode, *limits)
            multi_tensor_applier(amp_C.multi_tensor_lamb, None, given, *options)
