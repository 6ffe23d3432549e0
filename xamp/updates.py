"""Update rules of optimizers: functions of lists of tensors, gradients first, in fp32, that write into the others.

Numbers have the names that torch's fused kernels give them. The order of operations is that of torch.optim where torch
has the rule, so fp32 steps equal those bit for bit. torch's fused kernels step in one pass and without temporaries, and
round differently.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from xamp.plans.lists import are_alike, found_inf, is_one
from xamp.registry.causes import NotNow
from xamp.registry.fused_classes import is_right
from xamp.registry.registry import HOST
from xamp.torch_compat import kernels
from xamp.torch_compat.pieces import Lists, Piece
from xamp.torch_compat.torch_private import operators

__all__ = ["adagrad_", "adam_", "fused_adam_", "fused_sgd_", "has_fused", "moments_", "novograd_", "number", "sgd_"]

Numbers = Mapping[str, Any]


def number(value: Any) -> Any:
    """Return ``value`` as what a foreach operator takes: a Python number, or a tensor without dimensions."""
    return value.detach().reshape(()) if isinstance(value, torch.Tensor) else value


def has_fused(cls: Any, lists: Lists) -> bool:
    """Return whether torch's fused kernel for ``cls``, a class of torch.optim, can step ``lists``.

    That takes tensors whose elements are in one order, without gaps. A CPU has such kernels too; there the steps stay
    those of torch's plain optimizers, bit for bit.
    """
    if not len(lists[0]) or (device := lists[0][0].device).type == HOST or not are_alike(lists):
        return False
    try:
        return is_right(cls, device, torch.float32)
    except NotNow:
        return False


def sgd_(lists: Piece, scale: Any, decay_last: bool, numbers: Numbers) -> None:
    """Step parameters and, where there are any, momenta.

    ``scale``: a number or a tensor; the gradients are multiplied by it first.
    ``decay_last``: add the decay to the update, not to the gradient.
    """
    step, params, *momenta = lists
    decay = numbers["weight_decay"]
    if not is_one(scale):
        step = list(operators.foreach_mul(step, number(scale)))
    if decay != 0.0 and not decay_last:
        step = list(operators.foreach_add(step, params, alpha=decay))
    for moving in momenta:
        if numbers["is_first_step"]:
            kernels.copy_(moving, step)
        else:
            operators.foreach_mul_(moving, numbers["momentum"])
            operators.foreach_add_(moving, step, alpha=1.0 - numbers["dampening"])
        step = list(operators.foreach_add(step, moving, alpha=numbers["momentum"])) if numbers["nesterov"] else moving
    if decay != 0.0 and decay_last:
        step = list(operators.foreach_add(step, params, alpha=decay))
    operators.foreach_add_(params, step, alpha=-numbers["lr"])


def fused_sgd_(lists: Piece, skip: torch.Tensor | None, numbers: Numbers) -> None:
    """Do as :func:`sgd_`, at the scale 1; nothing where ``skip`` is not zero."""
    grads, params, *momenta = lists
    kernel: Any = operators.fused_sgd_
    kernel(params, grads, *(momenta or [[]]), **numbers, maximize=False, found_inf=found_inf(skip))


def adam_(lists: Piece, step: Any, mode: int, corrects: int, numbers: Numbers) -> None:
    """Step parameters, first and second moments. The learning rate and ``step`` may be tensors.

    ``mode`` 0 adds the weight decay to the gradient; 1 decays the parameter itself. ``corrects``: the moments' bias.
    """
    grads, params, exp_avgs, exp_avg_sqs = lists
    beta1, beta2, decay, rate = (numbers[name] for name in ("beta1", "beta2", "weight_decay", "lr"))
    if mode == 0 and decay != 0.0:
        grads = list(operators.foreach_add(grads, params, alpha=decay))
    if mode != 0 and decay != 0.0:
        operators.foreach_mul_(params, 1.0 - rate * decay)
    operators.foreach_lerp_(exp_avgs, grads, 1.0 - beta1)
    operators.foreach_mul_(exp_avg_sqs, beta2)
    operators.foreach_addcmul_(exp_avg_sqs, grads, grads, value=1.0 - beta2)
    del grads  # may be a temporary
    denominators = operators.foreach_sqrt(exp_avg_sqs)
    if corrects:
        rate = rate / _correction(beta1, step)
        operators.foreach_div_(denominators, _correction(beta2, step) ** 0.5)
    operators.foreach_add_(denominators, numbers["eps"])
    if isinstance(rate, torch.Tensor):
        update = operators.foreach_div(exp_avgs, denominators)
        operators.foreach_mul_(update, rate)
        operators.foreach_add_(params, update, alpha=-1.0)
    else:
        operators.foreach_addcdiv_(params, exp_avgs, denominators, value=-rate)


def fused_adam_(lists: Piece, step: Any, mode: int, corrects: int, skip: torch.Tensor | None, numbers: Numbers) -> None:
    """Do as :func:`adam_`; nothing where ``skip`` is not zero."""
    grads, params, *moments = lists
    taken = number(step) if corrects else math.inf  # a beta to the power of inf is 0
    counts = [torch.as_tensor(taken, dtype=torch.float32, device=params[0].device)] * len(params)
    kernel: Any = operators.fused_adam_ if mode == 0 else operators.fused_adamw_
    plain = {"amsgrad": False, "maximize": False}
    kernel(params, grads, *moments, [], counts, **numbers, **plain, found_inf=found_inf(skip))


def moments_(lists: Piece, step: Any, corrects: int, numbers: Numbers) -> list[torch.Tensor]:
    """Step first and second moments, and return ``m / (sqrt(v) + eps)``, where asked for with the bias corrected.

    ``numbers["beta3"]`` is what a gradient is weighed by in the first moment.
    """
    grads, exp_avgs, exp_avg_sqs = lists
    operators.foreach_mul_(exp_avgs, numbers["beta1"])
    operators.foreach_add_(exp_avgs, grads, alpha=numbers["beta3"])
    operators.foreach_mul_(exp_avg_sqs, numbers["beta2"])
    operators.foreach_addcmul_(exp_avg_sqs, grads, grads, value=1.0 - numbers["beta2"])
    if corrects:
        exp_avgs = list(operators.foreach_div(exp_avgs, _correction(numbers["beta1"], step)))
        exp_avg_sqs = list(operators.foreach_div(exp_avg_sqs, _correction(numbers["beta2"], step)))
    denominators = operators.foreach_sqrt(exp_avg_sqs)
    operators.foreach_add_(denominators, numbers["eps"])
    return list(operators.foreach_div(exp_avgs, denominators))


def _correction(beta: float, step: Any) -> Any:
    """Return ``1 - beta**step``; as a tensor where ``step`` is one."""
    if isinstance(step, torch.Tensor):
        return (1.0 - torch.pow(beta, number(step).double())).float()
    return 1.0 - beta**step


def adagrad_(lists: Piece, mode: int, numbers: Numbers) -> None:
    """Step parameters and sums of squares. ``mode``: see :func:`adam_`."""
    grads, params, sums = lists
    rate, decay = numbers["lr"], numbers["weight_decay"]
    if mode == 0 and decay != 0.0:
        grads = list(operators.foreach_add(grads, params, alpha=decay))
    operators.foreach_addcmul_(sums, grads, grads)
    denominators = operators.foreach_sqrt(sums)
    operators.foreach_add_(denominators, numbers["eps"])
    if mode != 0 and decay != 0.0:
        operators.foreach_mul_(params, 1.0 - rate * decay)
    operators.foreach_addcdiv_(params, grads, denominators, value=-rate)


def novograd_(lists: Piece, divisors: list[torch.Tensor], correction: float, mode: int, numbers: Numbers) -> None:
    """Step parameters and first moments.

    ``divisors``: for each tensor, of its gradient in ``mode`` 0, and of its update in mode 1; the decay is added then.
    """
    grads, params, exp_avgs = lists
    decay = numbers["weight_decay"]
    if mode == 0:
        grads = list(operators.foreach_div(grads, divisors))
        operators.foreach_add_(grads, params, alpha=decay)
    operators.foreach_mul_(exp_avgs, numbers["beta1"])
    operators.foreach_add_(exp_avgs, grads, alpha=numbers["beta3"])
    update = operators.foreach_div(exp_avgs, correction)
    if mode != 0:
        operators.foreach_div_(update, divisors)
        operators.foreach_add_(update, params, alpha=decay)
    operators.foreach_add_(params, update, alpha=-numbers["lr"])
