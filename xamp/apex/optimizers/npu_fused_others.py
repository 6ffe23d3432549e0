"""Ascend's fused optimizers that torch has no counterpart of, written for single parameters.

Arguments, defaults, order of operations and states (``step`` and the moments, for each parameter) are Ascend's. They
work without ``amp``, on any device, and at every level.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.optim import Optimizer
from torch.optim.optimizer import required

from xamp.apex._multi_tensor import grad_norm
from xamp.plans.derived import step_as_adamw
from xamp.torch_compat.closures import loss_of

__all__ = ["SCHEDULES", "Lamb", "NpuFusedAdamP", "NpuFusedBertAdam", "NpuFusedLamb", "NpuFusedRMSpropTF"]


class _PerParameter(Optimizer):
    """Calls ``_update`` for each parameter with a gradient."""

    is_npu_fused_optimizer = True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step. ``closure`` computes the loss again; what it returns is returned."""
        loss = loss_of(closure)
        self._prepare()
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if any(param.grad.is_sparse for param in params):
                raise RuntimeError(
                    f"{type(self).__name__} does not support sparse gradients, please consider SparseAdam instead."
                )
            for param in () if self._steps_all(group, params) else params:
                self._update(group, param, param.grad)
        return loss

    def _prepare(self) -> None:
        """Called before the first parameter of a step."""

    def _steps_all(self, group: dict[str, Any], params: list[torch.Tensor]) -> bool:
        """Step all parameters of a group at once, where that can be; return whether it was done."""
        del group, params
        return False

    def _update(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor) -> None:
        """Step one parameter."""

    def _state_of(self, param: torch.Tensor, *names: str) -> list[torch.Tensor]:
        """Count the step, and return the named tensors of the parameter's state, zeros at first."""
        state = self.state[param]
        state["step"] = state.get("step", 0) + 1
        for name in names:
            if name not in state:
                state[name] = torch.zeros_like(param)
        return [state[name] for name in names]

    def _global_norm(self) -> torch.Tensor:
        return grad_norm(self, [param for group in self.param_groups for param in group["params"]]).reshape(())


def _check(**numbers: float) -> None:
    for name, value in numbers.items():
        if value < 0.0:
            raise ValueError(f"Invalid {name}: {value}")


def _check_betas(betas: tuple[float, float]) -> None:
    for index, beta in enumerate(betas):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"Invalid beta parameter at index {index}: {beta}")


class Lamb(_PerParameter):
    """LAMB without bias correction, as in version 3 of its paper. The norm of a parameter counts up to 10.

    Args:
        params: parameters, or groups of them.
        lr: the learning rate.
        betas: factors of the first and of the second moment.
        eps: added to the root of the second moment.
        weight_decay: the factor of the decay, which is added to the update.
        adam: leave the ratio of norms out.
    """

    is_npu_fused_optimizer = False

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0,
        adam: bool = False,
    ) -> None:
        _check(**{"learning rate": lr, "epsilon value": eps})
        _check_betas(betas)
        self.adam = adam
        self._divisor: torch.Tensor | None = None
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _steps_all(self, group: dict[str, Any], params: list[torch.Tensor]) -> bool:
        # The kernel of LAMB lets the norm of a parameter count as far as it goes.
        numbers = {"lr": group["lr"], "eps": group["eps"], "weight_decay": group["weight_decay"]}
        numbers["beta1"], numbers["beta2"] = group["betas"]
        return self.adam and step_as_adamw(self.state, params, numbers, self._divisor)

    def _update(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor) -> None:
        exp_avg, exp_avg_sq = self._state_of(param, "exp_avg", "exp_avg_sq")
        if self._divisor is not None:
            grad = grad / self._divisor.to(grad)
        beta1, beta2 = group["betas"]
        exp_avg.mul_(beta1).add_(grad, alpha=1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        update = exp_avg / exp_avg_sq.sqrt().add(group["eps"])
        if group["weight_decay"] != 0:
            update.add_(param, alpha=group["weight_decay"])
        if not self.adam:
            weight_norm = param.pow(2).sum().sqrt().clamp(0, 10)
            update_norm = update.pow(2).sum().sqrt()
            known = (weight_norm != 0) & (update_norm != 0)
            update.mul_(torch.where(known, weight_norm / update_norm, torch.ones_like(weight_norm)))
        param.add_(update, alpha=-group["lr"])


class NpuFusedLamb(Lamb):
    """:class:`Lamb`, which may divide all gradients by their norm where that is above 1.

    Args:
        params: as :class:`Lamb`, like those up to ``adam``.
        lr: the learning rate.
        betas: factors of the moments.
        eps: added to the root of the second moment.
        weight_decay: the factor of the decay.
        adam: leave the ratio of norms out.
        use_global_grad_norm: divide the gradients by the norm of all of them where it is above 1.
    """

    is_npu_fused_optimizer = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0,
        adam: bool = False,
        use_global_grad_norm: bool = False,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, adam)
        self.use_global_grad_norm = use_global_grad_norm

    def _prepare(self) -> None:
        self._divisor = self._global_norm().clamp(min=1.0) if self.use_global_grad_norm else None


class NpuFusedRMSpropTF(_PerParameter):
    """RMSprop as in TensorFlow: ``eps`` inside the root.

    Args:
        params: parameters, or groups of them.
        lr: the learning rate.
        alpha: the factor of the mean squares.
        eps: added to the mean square inside the root.
        weight_decay: the factor of the decay.
        momentum: the factor of the momentum.
        centered: divide by the standard deviation.
        decoupled_decay: decay the parameters themselves, by ``weight_decay`` without the learning rate.
        lr_in_momentum: the momentum holds updates that the learning rate has scaled already.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        alpha: float = 0.9,
        eps: float = 1e-10,
        weight_decay: float = 0,
        momentum: float = 0.0,
        centered: bool = False,
        decoupled_decay: bool = False,
        lr_in_momentum: bool = True,
    ) -> None:
        _check(**{"learning rate": lr, "epsilon value": eps, "momentum value": momentum})
        _check(**{"weight_decay value": weight_decay, "alpha value": alpha})
        defaults = {"lr": lr, "momentum": momentum, "alpha": alpha, "eps": eps, "centered": centered}
        options = {"decoupled_decay": decoupled_decay, "lr_in_momentum": lr_in_momentum}
        super().__init__(params, {**defaults, "weight_decay": weight_decay, **options})

    def _update(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor) -> None:
        (square_avg,) = self._state_of(param, "square_avg")
        if group["weight_decay"] != 0:
            if group["decoupled_decay"]:
                param.mul_(1 - group["weight_decay"])
            else:
                grad = grad.add(param, alpha=group["weight_decay"])
        square_avg.lerp_(grad.pow(2), 1.0 - group["alpha"])
        variance = square_avg
        if group["centered"]:
            grad_avg = self.state[param].setdefault("grad_avg", torch.zeros_like(param))
            grad_avg.lerp_(grad, 1.0 - group["alpha"])
            variance = square_avg.addcmul(grad_avg, grad_avg, value=-1)
        root = variance.add(group["eps"]).sqrt_()
        if group["momentum"] > 0:
            momentum = self.state[param].setdefault("momentum_buffer", torch.zeros_like(param))
            rate = group["lr"] if group["lr_in_momentum"] else 1.0
            momentum.mul_(group["momentum"]).addcdiv_(grad, root, value=rate)
            param.add_(momentum, alpha=-1.0 if group["lr_in_momentum"] else -group["lr"])
        else:
            param.addcdiv_(grad, root, value=-group["lr"])


class NpuFusedAdamP(_PerParameter):
    """AdamP (https://arxiv.org/abs/2006.08217): Adam whose update is orthogonal to scale-invariant weights.

    Args:
        params: parameters, or groups of them.
        lr: the learning rate.
        betas: factors of the first and of the second moment.
        eps: added to the root of the second moment.
        weight_decay: the factor of the decay of the parameters themselves.
        delta: a weight counts as scale-invariant where the cosine with its gradient is below ``delta / sqrt(size)``.
        wd_ratio: the decay of scale-invariant weights is multiplied by this.
        nesterov: Nesterov's momentum.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        delta: float = 0.1,
        wd_ratio: float = 0.1,
        nesterov: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "delta": delta, "wd_ratio": wd_ratio, "nesterov": nesterov})

    def _update(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor) -> None:
        exp_avg, exp_avg_sq = self._state_of(param, "exp_avg", "exp_avg_sq")
        beta1, beta2 = group["betas"]
        count = self.state[param]["step"]
        exp_avg.mul_(beta1).add_(grad, alpha=1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        denominator = (exp_avg_sq.sqrt() / math.sqrt(1 - beta2**count)).add_(group["eps"])
        moving = beta1 * exp_avg + (1 - beta1) * grad if group["nesterov"] else exp_avg
        update, ratio = moving / denominator, 1.0
        if param.dim() > 1:
            update, ratio = _projected(param, grad, update, group["delta"], group["wd_ratio"], group["eps"])
        if group["weight_decay"] > 0:
            param.mul_(1 - group["lr"] * group["weight_decay"] * ratio)
        param.add_(update, alpha=-group["lr"] / (1 - beta1**count))


def _projected(
    param: torch.Tensor, grad: torch.Tensor, update: torch.Tensor, delta: float, wd_ratio: float, eps: float
) -> tuple[torch.Tensor, float]:
    """Return the update without its part along the weights, by channel or over all, and the factor of the decay."""
    for rows in (param.size(0), 1):
        weights = param.reshape(rows, -1)
        cosine = F.cosine_similarity(grad.reshape(rows, -1), weights, dim=1, eps=eps).abs()
        if bool(cosine.max() < delta / math.sqrt(weights.size(1))):
            unit = weights / weights.norm(dim=1, keepdim=True).add(eps)
            flat = update.reshape(rows, -1)
            along = (unit * flat).sum(dim=1, keepdim=True)
            return (flat - unit * along).view_as(update), wd_ratio
    return update, 1.0


def _cosine(x: float, warmup: float = 0.002) -> float:
    return x / warmup if x < warmup else 0.5 * (1.0 + math.cos(math.pi * x))


def _constant(x: float, warmup: float = 0.002) -> float:
    return x / warmup if x < warmup else 1.0


def _linear(x: float, warmup: float = 0.002) -> float:
    return x / warmup if x < warmup else max((x - 1.0) / (warmup - 1.0), 0.0)


def _poly(x: float, warmup: float = 0.002) -> float:
    return x / warmup if x < warmup else math.sqrt(1.0 - x)


SCHEDULES: dict[str, Callable[[float, float], float]] = {
    "warmup_cosine": _cosine,
    "warmup_constant": _constant,
    "warmup_linear": _linear,
    "warmup_poly": _poly,
}


class NpuFusedBertAdam(_PerParameter):
    """Adam as BERT's authors had it: no bias correction, decay added to the update, a schedule of its own.

    Args:
        params: parameters, or groups of them.
        lr: the learning rate.
        warmup: the part of ``t_total`` in which the rate rises; -1: none.
        t_total: the steps of the whole training; -1: the rate is constant.
        schedule: ``"warmup_cosine"``, ``"warmup_constant"``, ``"warmup_linear"`` or ``"warmup_poly"``.
        b1: the factor of the first moment.
        b2: the factor of the second moment.
        e: added to the root of the second moment.
        weight_decay: the factor of the decay.
        max_grad_norm: above 0, all gradients are divided by their norm where that is above 1.
    """

    def __init__(
        self,
        params: Any,
        lr: Any = required,
        warmup: float = -1,
        t_total: int = -1,
        schedule: str = "warmup_linear",
        b1: float = 0.9,
        b2: float = 0.99,
        e: float = 1e-6,
        weight_decay: float = 0.01,
        max_grad_norm: float = -1,
    ) -> None:
        if lr is not required and lr < 0.0:
            raise ValueError(f"Invalid learning rate: {lr} - should be >= 0.0")
        if schedule not in SCHEDULES:
            raise ValueError(f"Invalid schedule parameter: {schedule}. Choices: {', '.join(SCHEDULES)}")
        if not 0.0 <= warmup < 1.0 and warmup != -1:
            raise ValueError(f"Invalid warmup: {warmup} - should be in [0.0, 1.0[ or -1")
        for name, value in (("b1", b1), ("b2", b2)):
            if not 0.0 <= value < 1.0:
                raise ValueError(f"Invalid {name} parameter: {value} - should be in [0.0, 1.0[")
        if e < 0.0:
            raise ValueError(f"Invalid epsilon value: {e} - should be >= 0.0")
        defaults = {"lr": lr, "schedule": schedule, "warmup": warmup, "t_total": t_total, "b1": b1, "b2": b2, "e": e}
        defaults |= {"weight_decay": weight_decay, "max_grad_norm": max_grad_norm}
        self.max_grad_norm = max_grad_norm
        self._divisor: torch.Tensor | None = None
        super().__init__(params, defaults)

    def _prepare(self) -> None:
        self._divisor = self._global_norm().clamp(min=1.0) if self.max_grad_norm > 0 else None

    def _steps_all(self, group: dict[str, Any], params: list[torch.Tensor]) -> bool:
        numbers = {"beta1": group["b1"], "beta2": group["b2"], "eps": group["e"]}
        numbers["weight_decay"] = max(group["weight_decay"], 0.0)
        if params and "step" in self.state[params[0]]:
            numbers["lr"] = self._rate(group, self.state[params[0]]["step"])
        return step_as_adamw(self.state, params, numbers, self._divisor if group["max_grad_norm"] > 0 else None)

    def _rate(self, group: dict[str, Any], taken: int) -> float:
        """Return the learning rate of the step after ``taken`` steps."""
        rate: float = group["lr"]
        if group["t_total"] != -1:
            rate = rate * SCHEDULES[group["schedule"]](taken / group["t_total"], group["warmup"])
        return rate

    def _update(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor) -> None:
        exp_avg, exp_avg_sq = self._state_of(param, "exp_avg", "exp_avg_sq")
        if group["max_grad_norm"] > 0 and self._divisor is not None:
            grad = grad / self._divisor.to(grad)
        exp_avg.mul_(group["b1"]).add_(grad, alpha=1 - group["b1"])
        exp_avg_sq.mul_(group["b2"]).addcmul_(grad, grad, value=1 - group["b2"])
        update = exp_avg / (exp_avg_sq.sqrt() + group["e"])
        if group["weight_decay"] > 0.0:
            update.add_(param, alpha=group["weight_decay"])
        param.add_(update, alpha=-self._rate(group, self.state[param]["step"] - 1))
