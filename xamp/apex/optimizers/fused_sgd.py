"""``FusedSGD``: SGD with Apex's arguments, defaults and states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import required

from xamp.apex import amp_C
from xamp.apex.multi_tensor_apply import multi_tensor_applier
from xamp.apex.optimizers._fused import FusedOptimizer
from xamp.torch_compat.closures import loss_of

__all__ = ["FusedSGD"]


class FusedSGD(FusedOptimizer):
    """SGD, which may decay weights after the momentum.

    Args:
        params: parameters, or groups of them.
        lr: the learning rate.
        momentum: the factor of the momentum.
        dampening: a new gradient is weighed by ``1 - dampening`` in the momentum.
        weight_decay: the factor of the L2 penalty.
        nesterov: Nesterov's momentum.
        wd_after_momentum: add the decay to the update, not to the gradient.
        materialize_master_grads: False: at O2 of ``amp`` steps take the model's own gradients, scaled as they are, and
            masters have none, which saves 4 bytes a parameter. ``amp.master_params`` makes them at the call.
        set_grad_none: ``zero_grad()`` sets gradients to None; False: to zero.

    Raises:
        ValueError: a negative number, or ``nesterov`` without momentum or with dampening.
    """

    lent: Any = None
    """Gradients on the model, for one step by which ``amp`` updates their masters."""

    def __init__(
        self,
        params: Any,
        lr: Any = required,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        if lr is not required and lr < 0.0:
            raise ValueError(f"Invalid learning rate: {lr}")
        if momentum < 0.0:
            raise ValueError(f"Invalid momentum value: {momentum}")
        if weight_decay < 0.0:
            raise ValueError(f"Invalid weight_decay value: {weight_decay}")
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, defaults)
        self.wd_after_momentum = wd_after_momentum
        self.materialize_master_grads = materialize_master_grads
        self.most_recent_scale = 1.0
        self.scale_set_by_backward = False
        self.set_grad_none = set_grad_none

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("nesterov", False)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step. ``closure`` computes the loss again; what it returns is returned."""
        loss = loss_of(closure)
        low, inverse = {} if self.lent is None else self.lent.by_master(), getattr(self.lent, "inverse", None)
        for group in self.param_groups:
            apart = [param for param in group["params"] if id(param) not in low]
            for params in self._with_gradients({**group, "params": apart}):
                self._step_params(group, params, self._grads(params), 1.0 / self.most_recent_scale)
            masters = [param for param in group["params"] if id(param) in low]
            self._step_params(group, masters, [low[id(m)] for m in masters], 1.0 if inverse is None else inverse)
        self.most_recent_scale = 1.0
        self.scale_set_by_backward = False
        return loss

    def _step_params(
        self, group: dict[str, Any], params: list[torch.Tensor], grads: list[torch.Tensor], scale: Any
    ) -> None:
        """Step parameters: those whose momentum is yet to be made, then the others."""
        fresh = [self.state[param].get("momentum_buffer") is None for param in params]
        for first_run in (True, False):
            some = [(p, grad) for p, grad, first in zip(params, grads, fresh, strict=True) if first == first_run]
            if some:
                self._launch(group, [p for p, _ in some], [grad for _, grad in some], scale, first_run)

    def _launch(
        self, group: dict[str, Any], params: list[torch.Tensor], grads: list[torch.Tensor], scale: Any, first_run: bool
    ) -> None:
        if group["momentum"] != 0:
            for param in params:
                if first_run:
                    self.state[param].pop("momentum_buffer", None)  # torch's own SGD may have saved None
            momenta = self._state_list(params, "momentum_buffer")
        else:
            momenta = params  # not read
        multi_tensor_applier(
            amp_C.multi_tensor_sgd,
            None,
            [grads, params, momenta],
            group["weight_decay"],
            group["momentum"],
            group["dampening"],
            group["lr"],
            group["nesterov"],
            first_run,
            self.wd_after_momentum,
            scale,
        )
