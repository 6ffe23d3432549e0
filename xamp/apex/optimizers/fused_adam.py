"""``FusedAdam``: Adam and AdamW with Apex's arguments, defaults and states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from xamp.apex import amp_C
from xamp.apex._multi_tensor import norms, whole_norm
from xamp.apex.multi_tensor_apply import multi_tensor_applier
from xamp.apex.optimizers._fused import FusedOptimizer
from xamp.torch_compat.closures import loss_of

__all__ = ["FusedAdam"]

_OUTDATED = (
    "FusedAdam has been updated.  Simply initialize it identically to torch.optim.Adam, and call step() with no "
    "arguments."
)


class FusedAdam(FusedOptimizer):
    """AdamW, or Adam with ``adam_w_mode=False``. The moments are fp32 at any dtype of the parameters.

    All parameters of a group count their steps together: the count is ``group["step"]``.

    Args:
        params: parameters, or groups of them.
        lr: the learning rate.
        bias_correction: divide the moments by ``1 - beta**step``.
        betas: factors of the first and of the second moment.
        eps: added to the root of the second moment.
        adam_w_mode: decay the parameters themselves (AdamW); False adds the decay to the gradients.
        weight_decay: 0.0 by default, unlike ``torch.optim.AdamW``.
        amsgrad: not supported.
        set_grad_none: ``zero_grad()`` sets gradients to None; False: to zero.
        capturable: keep learning rate and step as tensors on the device, so that no step waits for it.
        master_weights: step fp32 copies of the parameters; needs ``capturable``.
        max_grad_norm: of Apex before 2019: above 0, the gradients of each group are scaled down to this norm.

    Raises:
        RuntimeError: ``amsgrad``, or ``master_weights`` without ``capturable``.
    """

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        *,
        max_grad_norm: float = 0.0,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedAdam does not support the AMSGrad variant.")
        if master_weights and not capturable:
            raise RuntimeError("Master weights is currently only supported with the capturable version.")
        self.capturable = capturable
        self.master_weights = master_weights
        self.param_groups_master: list[dict[str, Any]] = []
        rate = torch.as_tensor(lr, dtype=torch.float32) if capturable else lr
        defaults = {
            "lr": rate,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        if max_grad_norm > 0:
            defaults["max_grad_norm"] = max_grad_norm
        super().__init__(params, defaults)
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.set_grad_none = set_grad_none
        if capturable:
            self._step_supports_amp_scaling = True

    def add_param_group(self, param_group: Any) -> None:
        """Add the group; with ``capturable`` it gets a learning rate of its own on the device of its parameters."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if self.capturable and group["params"]:
            rate = torch.as_tensor(group["lr"], dtype=torch.float32)
            group["lr"] = rate.to(group["params"][0].device, copy=True)
        self.param_groups_master.append({"params": [None] * len(group["params"])})
        if self.master_weights:
            self.param_groups_master[-1]["params"] = [p.detach().clone().float() for p in group["params"]]

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: Any = None,
        output_params: Any = None,
        scale: Any = None,
        grad_norms: Any = None,
        grad_scaler: Any = None,
    ) -> Any:
        """Take one step.

        Args:
            closure: computes the loss again and returns it.
            grads: of an older interface; must be None, like the next three.
            output_params: see ``grads``.
            scale: see ``grads``.
            grad_norms: see ``grads``.
            grad_scaler: a ``torch.amp.GradScaler``. With ``capturable`` its scale and its check are used on the device.

        Returns:
            What ``closure`` returned.
        """
        if any(given is not None for given in (grads, output_params, scale, grad_norms)):
            raise RuntimeError(_OUTDATED)
        loss = loss_of(closure)
        for group, masters in zip(self.param_groups, self.param_groups_master, strict=True):
            if group["params"]:
                if self.capturable:
                    self._step_capturable(group, masters["params"], grad_scaler)
                else:
                    self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        sorted_params = self._with_gradients(group)
        group["step"] = int(group.get("step", 0)) + 1
        options = (group["lr"], *self._options(group, group["step"]))
        clip = self._clip(group, sorted_params)
        for params in sorted_params:
            multi_tensor_applier(amp_C.multi_tensor_adam, None, self._lists(params), *options, clip)

    def _clip(self, group: dict[str, Any], lists: list[list[torch.Tensor]]) -> torch.Tensor | None:
        """Return what the gradients of a group are divided by, at least 1; None where nothing limits them."""
        limit = group.get("max_grad_norm", 0.0)
        if limit <= 0 or not lists:
            return None
        grads = [grad for params in lists for grad in self._grads(params)]
        found: torch.Tensor = (whole_norm(norms(grads)) + 1e-6) / limit
        return found.clamp(min=1.0).reshape(())

    def _step_capturable(self, group: dict[str, Any], masters: list[Any], grad_scaler: Any) -> None:
        device = group["params"][0].device
        skip, inv_scale, taken = None, None, 1
        if grad_scaler is not None:
            skip = (grad_scaler._check_inf_per_device(self)[device].reshape(1) != 0).to(torch.int32)
            inv_scale = grad_scaler._get_scale_async().double().reciprocal().float().reshape(1)
            taken = 1 - skip
        if "step" not in group:
            group["step"] = torch.zeros(1, dtype=torch.int32, device=device)
        count = group["step"] = torch.as_tensor(group["step"], dtype=torch.int32, device=device).reshape(1)
        count += taken  # in place, since a replay of a graph reads it where it was
        if not torch.is_tensor(group["lr"]):  # a state that was loaded; a capture cannot bring a number to the device
            group["lr"] = torch.full((), group["lr"], dtype=torch.float32, device=device)
        rate = torch.as_tensor(group["lr"], dtype=torch.float32, device=device)
        master_of = dict(zip(map(id, group["params"]), masters, strict=True))
        for params in self._with_gradients(group):
            lists = self._lists(params)
            op: Any = amp_C.multi_tensor_adam_capturable
            if self.master_weights:
                lists.append([master_of[id(param)] for param in params])
                op = amp_C.multi_tensor_adam_capturable_master
            multi_tensor_applier(op, skip, lists, rate, *self._options(group, group["step"]), inv_scale)

    def _lists(self, params: list[torch.Tensor]) -> list[list[Any]]:
        wide = torch.float64 if params[0].dtype == torch.float64 else torch.float32
        moments = [self._state_list(params, name, wide) for name in ("exp_avg", "exp_avg_sq")]
        return [self._grads(params), params, *moments]

    def _options(self, group: dict[str, Any], step: Any) -> tuple[Any, ...]:
        corrects = 1 if group["bias_correction"] else 0
        return (*group["betas"], group["eps"], step, self.adam_w_mode, corrects, group["weight_decay"])
