"""``FusedAdagrad``: Adagrad with Apex's arguments, defaults and states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from xamp.apex import amp_C
from xamp.apex.multi_tensor_apply import multi_tensor_applier
from xamp.apex.optimizers._fused import FusedOptimizer
from xamp.torch_compat.closures import loss_of

__all__ = ["FusedAdagrad"]


class FusedAdagrad(FusedOptimizer):
    """Adagrad.

    Args:
        params: parameters, or groups of them.
        lr: the learning rate.
        eps: added to the root of the sum of squares.
        weight_decay: the factor of the decay.
        set_grad_none: ``zero_grad()`` sets gradients to None; False: to zero.
        adagrad_w_mode: decay the parameters themselves, as AdamW does; False adds the decay to the gradients.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay})
        self.adagrad_w_mode = 1 if adagrad_w_mode else 0
        self.set_grad_none = set_grad_none

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step. ``closure`` computes the loss again; what it returns is returned."""
        loss = loss_of(closure)
        for group in self.param_groups:
            for params in self._with_gradients(group):
                lists = [self._grads(params), params, self._state_list(params, "sum")]
                options = (group["lr"], group["eps"], self.adagrad_w_mode, group["weight_decay"])
                multi_tensor_applier(amp_C.multi_tensor_adagrad, None, lists, *options)
        return loss
