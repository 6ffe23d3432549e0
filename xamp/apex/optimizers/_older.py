"""The optimizers of Apex's first interface: ``step`` takes gradients, a scale, and 16-bit parameters to write.

``FP16_Optimizer`` calls them so. They are ``apex.contrib.optimizers`` today, and were ``apex.optimizers`` before 2019.
"""

from __future__ import annotations

import logging
import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from xamp.apex import amp_C
from xamp.apex._multi_tensor import norms, split, whole_norm
from xamp.apex.fp16_utils.fp16_optimizer import ShowsInner
from xamp.apex.multi_tensor_apply import multi_tensor_applier
from xamp.apex.optimizers._fused import FusedOptimizer
from xamp.apex.optimizers.fused_sgd import FusedSGD as _FusedSGD
from xamp.errors import CheckpointError
from xamp.torch_compat.closures import loss_of
from xamp.torch_compat.pieces import floats
from xamp.torch_compat.torch_private import operators
from xamp.values.log import say

__all__ = ["FP16_Optimizer", "FusedAdam", "FusedSGD"]


def _by_group(given: Any, count: int) -> list[Any]:
    """Return a list for each group. A generator or a flat list stands for a single group."""
    if given is None:
        return [None] * count
    found = list(given)
    if isinstance(given, types.GeneratorType) or (found and not isinstance(found[0], list)):
        return [found]
    return found


class FusedAdam(FusedOptimizer):
    """Adam with decoupled decay. Steps are counted for each parameter.

    Args:
        params: parameters, or groups of them.
        lr: the learning rate.
        bias_correction: correct the step size; it multiplies the decay too.
        betas: factors of the first and of the second moment.
        eps: added to the root of the second moment.
        eps_inside_sqrt: add ``eps`` to the second moment itself.
        weight_decay: the factor of the decay.
        max_grad_norm: above 0, gradients are scaled down by the ``grad_norms`` that ``step`` is given.
        amsgrad: not supported.
        use_mt: accepted.
        amp_scale_adjustment: accepted.

    Raises:
        RuntimeError: ``amsgrad``.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        amsgrad: bool = False,
        use_mt: bool = False,
        amp_scale_adjustment: float = 1.0,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedAdam does not support the AMSGrad variant.")
        del use_mt, amp_scale_adjustment
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "max_grad_norm": max_grad_norm,
        }
        super().__init__(params, defaults)
        self.eps_mode = 0 if eps_inside_sqrt else 1

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: Any = None,
        output_params: Any = None,
        scale: float = 1.0,
        grad_norms: Any = None,
    ) -> Any:
        """Take one step.

        Args:
            closure: computes the loss again and returns it.
            grads: used in place of the parameters' own gradients; a list, or a list for each group.
            output_params: as many, of any dtype: the new parameters are written into them too.
            scale: the gradients are divided by this.
            grad_norms: the norm of the gradients, scaled, of each group.
        """
        loss = loss_of(closure)
        count = len(self.param_groups)
        lists = zip(self.param_groups, _by_group(grads, count), _by_group(output_params, count), strict=True)
        for index, (group, given, outputs) in enumerate(lists):
            used = [param.grad for param in group["params"]] if given is None else given
            chosen = [place for place, grad in enumerate(used) if grad is not None]
            if not chosen:
                continue
            norm = None if grad_norms is None else grad_norms[index]
            self._step_params(
                group,
                [group["params"][place] for place in chosen],
                [used[place] for place in chosen],
                None if outputs is None else [outputs[place] for place in chosen],
                _combined_scale(group, [used[place] for place in chosen], scale, norm),
            )
        return loss

    def _step_params(
        self,
        group: dict[str, Any],
        params: list[torch.Tensor],
        grads: list[torch.Tensor],
        outputs: list[torch.Tensor] | None,
        scale: Any,
    ) -> None:
        moments = [self._state_list(params, name) for name in ("exp_avg", "exp_avg_sq")]
        rates = [-self._rate(group, param) for param in params]
        for places, piece in split([grads, *moments, params, *([] if outputs is None else [outputs])]):
            new = self._new_params(group, piece, scale, rates[places])
            for targets in piece[3:]:
                operators.foreach_copy_(targets, new)

    def _new_params(
        self, group: dict[str, Any], lists: list[list[torch.Tensor]], scale: Any, rates: list[float]
    ) -> list[torch.Tensor]:
        """Update both moments and return the new parameters in fp32."""
        beta1, beta2 = group["betas"]
        grads, first, second, params = lists[:4]
        old = floats(params)
        scaled = list(operators.foreach_div(floats(grads), scale))
        operators.foreach_mul_(first, beta1)
        operators.foreach_add_(first, scaled, alpha=1.0 - beta1)
        operators.foreach_mul_(second, beta2)
        operators.foreach_addcmul_(second, scaled, scaled, value=1.0 - beta2)
        if self.eps_mode == 0:
            denominators = list(operators.foreach_sqrt(operators.foreach_add(second, group["eps"])))
        else:
            denominators = list(operators.foreach_add(operators.foreach_sqrt(second), group["eps"]))
        update = list(operators.foreach_div(first, denominators))
        operators.foreach_add_(update, old, alpha=group["weight_decay"])
        operators.foreach_mul_(update, rates)
        operators.foreach_add_(update, old)
        return list(update)

    def _rate(self, group: dict[str, Any], param: torch.Tensor) -> float:
        """Count the step of a parameter and return its step size."""
        state = self.state[param]
        state["step"] = int(state.get("step", 0)) + 1
        rate = float(group["lr"])
        if not group["bias_correction"]:
            return rate
        beta1, beta2 = group["betas"]
        return rate * math.sqrt(1.0 - beta2 ** state["step"]) / float(1.0 - beta1 ** state["step"])


def _combined_scale(group: dict[str, Any], grads: Sequence[torch.Tensor], scale: float, norm: Any) -> Any:
    """Return what the gradients are divided by: the scale, and what clips them to ``max_grad_norm``."""
    limit = group.get("max_grad_norm", 0.0)
    if limit <= 0:
        return scale
    found = whole_norm(norms(grads)) if norm is None else torch.as_tensor(norm)
    clip = float((found / scale + 1e-6) / limit)
    return clip * scale if clip > 1 else scale


class FusedSGD(_FusedSGD):
    """SGD of fp32 masters. ``step`` must be given gradients and the parameters to write, as FP16_Optimizer does.

    Args:
        params: as :class:`xamp.apex.optimizers.FusedSGD`, like all others.
        lr: the learning rate.
        momentum: the factor of the momentum.
        dampening: see there.
        weight_decay: the factor of the L2 penalty.
        nesterov: Nesterov's momentum.
        wd_after_momentum: add the decay to the update.
        materialize_master_grads: accepted.
    """

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: Any = None,
        output_params: Any = None,
        scale: float = 1.0,
        grad_norms: Any = None,
    ) -> Any:
        """Take one step. The arguments are those of :meth:`FusedAdam.step`; ``grad_norms`` is not used."""
        del grad_norms
        if grads is None or output_params is None:
            raise RuntimeError(
                "apex.contrib.optimizers.FusedSGD must be wrapped with apex.contrib.optimizers.FP16_Optimizer which "
                "provides grads and output_params."
            )
        count = len(self.param_groups)
        pairs = zip(_by_group(grads, count), _by_group(output_params, count), strict=True)
        own = [param.grad for group in self.param_groups for param in group["params"]]
        for group, (given, _) in zip(self.param_groups, list(pairs), strict=True):
            for param, grad in zip(group["params"], given, strict=True):
                param.grad = None if grad is None else grad.detach().to(param.dtype)
        self.most_recent_scale = scale
        try:
            loss = super().step(closure)
        finally:
            everything = [param for group in self.param_groups for param in group["params"]]
            for param, grad in zip(everything, own, strict=True):
                param.grad = grad
        for group, outputs in zip(self.param_groups, _by_group(output_params, count), strict=True):
            operators.foreach_copy_([o.detach() for o in outputs], [p.detach() for p in group["params"]])
        return loss


class FP16_Optimizer(ShowsInner):
    """Wraps an optimizer of an fp16 model: it steps fp32 masters. ``loss.backward()`` becomes ``backward(loss)``.

    Args:
        init_optimizer: an optimizer of this module, or any other.
        static_loss_scale: the loss scale.
        dynamic_loss_scale: have a dynamic scale in its place, which starts at 2**16.
        dynamic_loss_args: not supported, as in Apex.
        verbose: tell of each overflow in the log.

    Raises:
        SystemError: ``dynamic_loss_args``.
    """

    refused_by_amp = "apex.optimizers.FP16_Optimizer"

    def __init__(
        self,
        init_optimizer: Any,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        if dynamic_loss_scale and dynamic_loss_args is not None:
            raise SystemError("Do not support dynamic loss scale args for now.")
        self.optimizer = init_optimizer
        self.fp16_groups: list[list[torch.Tensor]] = []
        self.fp32_groups: list[list[torch.Tensor]] = []
        for group in self.optimizer.param_groups:
            self.fp16_groups.append(list(group["params"]))
            self.fp32_groups.append([param.clone().float().detach() for param in group["params"]])
            group["params"] = self.fp32_groups[-1]
        self.dynamic_loss_scale = bool(dynamic_loss_scale)
        self.cur_scale: float = 2**16 if dynamic_loss_scale else static_loss_scale
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = 2
        self.scale_window = 1000
        self.verbose = verbose

    def zero_grad(self, set_grads_to_None: bool = True) -> None:
        """Set the model's gradients to None, or to zero."""
        for group in self.fp16_groups:
            for param in group:
                if set_grads_to_None:
                    param.grad = None
                elif param.grad is not None:
                    param.grad.detach_().zero_()

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward from the loss, in fp32, times the scale."""
        (loss.float() * self.cur_scale).backward()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Step the masters and write them into the model; nothing after an overflow. Waits for the device."""
        del closure
        grads = [[param.grad for param in group] for group in self.fp16_groups]
        found: list[torch.Tensor] = []
        for group in grads:
            there = [grad for grad in group if grad is not None]
            found.append(whole_norm(norms(there)) if there else torch.zeros(1))
        if not all(bool(torch.isfinite(norm).all()) for norm in found):
            self._update_scale(True)
            return
        if isinstance(self.optimizer, FusedAdam | FusedSGD):
            self.optimizer.step(grads=grads, output_params=self.fp16_groups, scale=self.cur_scale, grad_norms=found)
        else:
            self._step_any(grads)
        self._update_scale(False)

    def _step_any(self, grads: list[list[Any]]) -> None:
        """Step an optimizer that reads its parameters' gradients. One with ``max_grad_norm`` clips by itself."""
        for group, given in zip(self.optimizer.param_groups, grads, strict=True):
            for master, grad in zip(group["params"], given, strict=True):
                master.grad = None if grad is None else grad.detach().float() / self.cur_scale
        self.optimizer.step()
        for params, masters in zip(self.fp16_groups, self.fp32_groups, strict=True):
            flag = torch.zeros(1, dtype=torch.int32, device=params[0].device)
            multi_tensor_applier(amp_C.multi_tensor_scale, flag, [masters, params], 1.0)

    def _update_scale(self, skip: bool) -> None:
        if skip and self.verbose:
            say("Grad overflow on iteration %s, loss scale %s", self.cur_iter, self.cur_scale, level=logging.WARNING)
        if self.dynamic_loss_scale:
            if skip:
                self.cur_scale = max(self.cur_scale / self.scale_factor, 1)
                self.last_overflow_iter = self.cur_iter
            elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
                self.cur_scale *= self.scale_factor
        self.cur_iter += 1

    def state_dict(self) -> dict[str, Any]:
        """Return scale, masters and the state of the optimizer."""
        state = {key: getattr(self, key) for key in ("dynamic_loss_scale", "cur_scale", "cur_iter")}
        if self.dynamic_loss_scale:
            for key in ("last_overflow_iter", "scale_factor", "scale_window"):
                state[key] = getattr(self, key)
        return {**state, "optimizer_state_dict": self.optimizer.state_dict(), "fp32_groups": self.fp32_groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what this class or Apex's saved, and write the masters into the model.

        Raises:
            CheckpointError: the state lacks a key, or its masters do not fit. Nothing has changed then.
        """
        keys = ("dynamic_loss_scale", "cur_scale", "cur_iter", "optimizer_state_dict", "fp32_groups")
        if missing := [key for key in keys if key not in state_dict]:
            raise CheckpointError(
                f"FP16_Optimizer.load_state_dict: the state has no {', '.join(missing)}. It must come from "
                "FP16_Optimizer.state_dict()."
            )
        own = [[tuple(p.shape) for p in group] for group in self.fp32_groups]
        if own != (saved := [[tuple(p.shape) for p in group] for group in state_dict["fp32_groups"]]):
            raise CheckpointError(
                f"FP16_Optimizer.load_state_dict: fp32_groups holds masters of the shapes {saved}, and this optimizer "
                f"has {own}. Make it from the same model and groups."
            )
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        for key in (*keys[:3], "last_overflow_iter", "scale_factor", "scale_window"):
            setattr(self, key, state_dict.get(key, getattr(self, key)))
        with torch.no_grad():
            for group, found, params in zip(self.fp32_groups, state_dict["fp32_groups"], self.fp16_groups, strict=True):
                for master, value, param in zip(group, found, params, strict=True):
                    master.copy_(value)
                    param.copy_(value)
