"""``FusedNovoGrad``: NovoGrad with Apex's arguments, defaults and states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from xamp.apex import amp_C
from xamp.apex._multi_tensor import norms
from xamp.apex.multi_tensor_apply import multi_tensor_applier
from xamp.apex.optimizers._fused import FusedOptimizer
from xamp.errors import CheckpointError
from xamp.torch_compat.closures import loss_of

__all__ = ["FusedNovoGrad"]

_LOWER = (torch.float16, torch.bfloat16)


class FusedNovoGrad(FusedOptimizer):
    """NovoGrad (https://arxiv.org/abs/1905.11286): one moving norm for each parameter in place of second moments.

    As in Apex the norms of a group are ``group["exp_avg_sq"]``, a list of two fp32 tensors: of the group's 16-bit
    parameters and of its others, each in the order of the group.

    Args:
        params: parameters, or groups of them.
        lr: the learning rate.
        bias_correction: divide the moments by ``1 - beta**step``.
        betas: factors of the first moment and of the norm.
        eps: added to the norm.
        weight_decay: the factor of the decay.
        amsgrad: not supported.
        reg_inside_moment: put norm and decay into the first moment; False: apply them to the update.
        grad_averaging: weigh a new gradient by ``1 - beta1`` in the first moment; False: by 1.
        norm_type: 2 for the L2 norm, 0 for the largest magnitude.
        init_zero: start the norms from 0; False: from those of the first gradients.
        set_grad_none: ``zero_grad()`` sets gradients to None; False: to zero.

    Raises:
        RuntimeError: ``amsgrad``, or another ``norm_type``.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedNovoGrad does not support the AMSGrad variant.")
        if norm_type not in (0, 2):
            raise RuntimeError("FusedNovoGrad only support l2/inf norm now.")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "norm_type": norm_type,
            "init_zero": init_zero,
        }
        super().__init__(params, defaults)
        self.moment_mode = 0 if reg_inside_moment else 1
        self.set_grad_none = set_grad_none

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that this class or Apex's saved.

        Raises:
            CheckpointError: the state is of another optimizer, or has norms of another number of parameters.
        """
        for group, saved in zip(self.param_groups, state_dict.get("param_groups", ()), strict=False):
            if "exp_avg_sq" in saved:
                counts = [tensor.numel() for tensor in saved["exp_avg_sq"]]
                if sum(counts) != len(group["params"]):
                    raise CheckpointError(
                        f"FusedNovoGrad.load_state_dict: exp_avg_sq of a group holds {sum(counts)} norms for "
                        f"{len(group['params'])} parameters. It must have one for each, also for those without a "
                        "gradient; start the optimizer anew."
                    )
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            if "exp_avg_sq" in group and group["params"]:
                device = group["params"][0].device
                group["exp_avg_sq"] = [tensor.to(device, copy=True) for tensor in group["exp_avg_sq"]]
                self._sort_norms(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step. ``closure`` computes the loss again; what it returns is returned."""
        loss = loss_of(closure)
        for group in self.param_groups:
            if group["params"]:
                self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        lists = self._with_gradients(group)
        group["step"] = int(group.get("step", 0)) + 1
        self._sort_norms(group)
        places = self._places(group)
        for params in lists:
            kept = group["exp_avg_sq"][0 if params[0].dtype in _LOWER else 1]
            own = [places[id(param)] for param in params]
            if not group["init_zero"] and (fresh := [p for p in params if "exp_avg" not in self.state[p]]):
                order = 2.0 if group["norm_type"] == 2 else float("inf")
                kept[[places[id(param)] for param in fresh]] = norms(self._grads(fresh), order).to(kept)
            # In place where they lie side by side, as mostly: a plan of the kernels is kept while nothing moves.
            side_by_side = own == list(range(own[0], own[0] + len(own)))
            used = kept[own[0] : own[0] + len(own)] if side_by_side else kept[own]
            self._step_params(group, params, used)
            if not side_by_side:
                kept[own] = used

    def _step_params(self, group: dict[str, Any], params: list[torch.Tensor], used: torch.Tensor) -> None:
        lists = [self._grads(params), params, self._state_list(params, "exp_avg")]
        options = (*self._numbers(group, group["lr"]), self.moment_mode, group["norm_type"])
        multi_tensor_applier(amp_C.multi_tensor_novograd, None, lists, used, *options)

    @staticmethod
    def _places(group: dict[str, Any]) -> dict[int, int]:
        """Return where the norm of each parameter stands, by its id."""
        halves = [param for param in group["params"] if param.dtype in _LOWER]
        others = [param for param in group["params"] if param.dtype not in _LOWER]
        return {id(param): place for params in (halves, others) for place, param in enumerate(params)}

    @staticmethod
    def _sort_norms(group: dict[str, Any]) -> None:
        """Make the norms, or swap the two lists where all parameters changed their dtype: another level resumes."""
        params = group["params"]
        halves = sum(param.dtype in _LOWER for param in params)
        found = group.get("exp_avg_sq")
        if found is None:
            found = [torch.zeros(count, device=params[0].device) for count in (halves, len(params) - halves)]
        elif found[0].numel() != halves and 0 in (found[0].numel(), found[1].numel()) and halves in (0, len(params)):
            found = [found[1], found[0]]
        group["exp_avg_sq"] = found
