"""``FusedMixedPrecisionLamb``: LAMB on 16-bit parameters with fp32 copies of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from xamp.apex import amp_C
from xamp.apex._multi_tensor import grad_norm
from xamp.apex.multi_tensor_apply import multi_tensor_applier
from xamp.apex.optimizers._fused import FusedOptimizer
from xamp.torch_compat.closures import loss_of

__all__ = ["FusedMixedPrecisionLamb"]


class FusedMixedPrecisionLamb(FusedOptimizer):
    """LAMB without a wait for the device: learning rate and step are tensors, and a GradScaler's check is used there.

    Args:
        params: parameters, or groups of them; those of a group have one dtype.
        lr: the learning rate.
        step: the steps taken so far.
        bias_correction: divide the moments by ``1 - beta**step``.
        betas: factors of the first and of the second moment.
        eps: added to the root of the second moment.
        weight_decay: where it is 0, the update is not scaled by norms, unless ``use_nvlamb``.
        amsgrad: not supported.
        adam_w_mode: add the decay to the update; False: to the gradients.
        grad_averaging: weigh a new gradient by ``1 - beta1`` in the first moment; False: by 1.
        max_grad_norm: all gradients together are scaled down to this norm.
        use_nvlamb: scale updates by norms also where ``weight_decay`` is 0.
        reduced_precision_dtype: parameters of this dtype get fp32 copies, which are stepped.

    Raises:
        RuntimeError: ``amsgrad``.
    """

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        step: int = 0,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
        reduced_precision_dtype: torch.dtype | None = None,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedLAMB does not support the AMSGrad variant.")
        defaults = {
            "lr": torch.as_tensor(lr, dtype=torch.float32),
            "step": torch.tensor([step], dtype=torch.int32),
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
        }
        self.param_groups_full_precision: list[dict[str, Any]] = []
        super().__init__(params, defaults)
        self.reduced_precision_dtype = reduced_precision_dtype
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.use_nvlamb = use_nvlamb
        self._step_supports_amp_scaling = True

    def add_param_group(self, param_group: Any) -> None:
        """Add the group, with a learning rate and a step of its own on the device of its parameters."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for key in ("lr", "step"):
            dtype = torch.float32 if key == "lr" else torch.int32
            value = torch.as_tensor(group[key], dtype=dtype)
            group[key] = value.to(group["params"][0].device if group["params"] else value.device, copy=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, grad_scaler: Any = None) -> Any:
        """Take one step. ``closure`` computes the loss again; what it returns is returned.

        ``grad_scaler``: a ``torch.amp.GradScaler``, whose scale and check are used on the device.
        """
        loss = loss_of(closure)
        # Not in the constructor: DDP and load_state_dict of the model may still write the parameters.
        for group in self.param_groups[len(self.param_groups_full_precision) :]:
            self.param_groups_full_precision.append({"params": [self._wide(param) for param in group["params"]]})
        sorted_groups = [self._with_gradients(group) for group in self.param_groups]
        stepped = [param for lists in sorted_groups for params in lists for param in params]
        if not stepped:
            return loss
        found_inf, scale = None, None
        if grad_scaler is not None:
            found_inf = grad_scaler._check_inf_per_device(self)[stepped[0].device].reshape(1)
            scale = grad_scaler._get_scale_async().reshape(1)
        norm = grad_norm(self, stepped)
        for group, full, lists in zip(self.param_groups, self.param_groups_full_precision, sorted_groups, strict=True):
            if group["params"]:
                self._step_group(group, full["params"], lists, norm, found_inf, scale)
        return loss

    def _wide(self, param: torch.Tensor) -> torch.Tensor | None:
        return param.detach().clone().float() if param.dtype == self.reduced_precision_dtype else None

    def _step_group(
        self,
        group: dict[str, Any],
        masters: list[Any],
        lists: list[list[torch.Tensor]],
        norm: torch.Tensor,
        found_inf: torch.Tensor | None,
        scale: torch.Tensor | None,
    ) -> None:
        skip = None if found_inf is None else (found_inf != 0).to(torch.int32)
        count = group["step"] = torch.as_tensor(group["step"], dtype=torch.int32, device=norm.device).reshape(1)
        count += 1 if skip is None else 1 - skip  # in place, since a replay of a graph reads it where it was
        master_of = dict(zip(map(id, group["params"]), masters, strict=True))
        for params in lists:
            has_masters = params[0].dtype == self.reduced_precision_dtype
            stepped = [master_of[id(param)] for param in params] if has_masters else params
            wide = torch.float32 if has_masters else params[0].dtype
            moments = [self._state_list(params, name, wide) for name in ("exp_avg", "exp_avg_sq")]
            given: list[list[Any]] = [
                [param.grad for param in params],
                stepped,
                *moments,
                *([params] if has_masters else []),
            ]
            rate = torch.as_tensor(group["lr"], dtype=torch.float32, device=norm.device)
            limits = (norm, self.defaults["max_grad_norm"] * (1.0 if scale is None else scale), self.use_nvlamb)
            scaled = (skip, None if scale is None else scale.double().reciprocal().float())
            options = (*self._numbers(group, rate), self.adam_w_mode, *limits, *scaled)
            multi_tensor_applier(amp_C.multi_tensor_lamb_mp, skip, given, *options)
