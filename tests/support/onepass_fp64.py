"""Steps of one tensor in fp64, by the definitions of torch's and Apex's optimizers, without code of the kernels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

Tensors = list[torch.Tensor]


def stepped(
    rule: Any, param: torch.Tensor, states: Tensors, grad: torch.Tensor, group: Mapping[str, Any], count: int
) -> Tensors:
    """Return the parameter and its states after step ``count`` (from 1) with an unscaled gradient, all fp64."""
    p, g, held = param.double(), grad.double(), [state.double() for state in states]
    g = -g if group.get("maximize") else g
    found: Tensors = _RULES[rule.name](rule, p, held, g, group, count)
    return found


def _sgd(rule: Any, p: Any, held: Tensors, g: Any, o: Any, count: int) -> Tensors:
    wd, lr = o.get("weight_decay", 0.0), float(o["lr"])
    g = g if rule.wd_after_momentum else g + wd * p
    if o.get("momentum"):
        moving = g if count == 1 else o["momentum"] * held[0] + (1 - o.get("dampening", 0.0)) * g
        g = g + o["momentum"] * moving if o.get("nesterov") else moving
        held = [moving]
    g = g + wd * p if rule.wd_after_momentum else g
    return [p - lr * g, *held]


def _moments(rule: Any, p: Any, held: Tensors, g: Any, o: Any, count: int) -> tuple[Any, Any, Any, Any]:
    beta1, beta2 = o["betas"]
    beta3 = 1 - beta1 if o.get("grad_averaging", True) else 1.0
    g = g if rule.decoupled else g + o.get("weight_decay", 0.0) * p
    corrects = o.get("bias_correction", True)
    hats = (1 - beta1**count, 1 - beta2**count) if corrects else (1.0, 1.0)
    return beta1 * held[0] + beta3 * g, beta2 * held[1] + (1 - beta2) * g * g, *hats


def _adam(rule: Any, p: Any, held: Tensors, g: Any, o: Any, count: int) -> Tensors:
    m, v, hat1, hat2 = _moments(rule, p, held, g, {**o, "grad_averaging": True}, count)
    largest = [torch.maximum(held[2], v)] if o.get("amsgrad") else []
    p = p * (1 - float(o["lr"]) * o.get("weight_decay", 0.0)) if rule.decoupled else p
    size = ((largest or [v])[0] / hat2).sqrt() + o["eps"]
    return [p - float(o["lr"]) * (m / hat1) / size, m, v, *largest]


def _adagrad(rule: Any, p: Any, held: Tensors, g: Any, o: Any, count: int) -> Tensors:
    wd, lr = o.get("weight_decay", 0.0), float(o["lr"]) / (1 + (count - 1) * o.get("lr_decay", 0.0))
    g = g if rule.decoupled else g + wd * p
    total = held[0] + g * g
    update = g / (total.sqrt() + o["eps"]) + (wd * p if rule.decoupled else 0.0)
    return [p - lr * update, total]


def _lamb(rule: Any, p: Any, held: Tensors, g: Any, o: Any, count: int) -> Tensors:
    m, v, hat1, hat2 = _moments(rule, p, held, g, o, count)
    m, v = m.float().double(), v.float().double()  # the second pass reads what the first has written
    wd, lr = o.get("weight_decay", 0.0), float(o["lr"])
    update = m / hat1 / ((v / hat2).sqrt() + o["eps"]) + (wd * p if rule.decoupled else 0.0)
    weight, size = p.norm(), update.norm()
    scaled = bool(weight) and bool(size) and (rule.use_nvlamb or wd != 0.0)
    return [p - (lr * weight / size if scaled else lr) * update, m, v]


def _novograd(rule: Any, p: Any, held: Tensors, g: Any, o: Any, count: int) -> Tensors:
    (beta1, beta2), wd = o["betas"], o.get("weight_decay", 0.0)
    largest = o.get("norm_type", 2) in (0, math.inf)
    norm = (g.abs().max() if largest else g.norm()) if g.numel() else torch.zeros((), dtype=torch.float64)
    if count == 1 and not o.get("init_zero"):
        moving = norm
    elif largest:
        moving = beta2 * held[1] + (1 - beta2) * norm
    else:
        moving = (beta2 * held[1] ** 2 + (1 - beta2) * norm**2).sqrt()
    moving = moving.float().double()
    hat1, hat2 = (1 - beta1**count, math.sqrt(1 - beta2**count)) if o.get("bias_correction", True) else (1.0, 1.0)
    size, beta3 = moving / hat2 + o["eps"], 1 - beta1 if o.get("grad_averaging", True) else 1.0
    m = beta1 * held[0] + beta3 * (g if rule.decoupled else g / size + wd * p)
    update = m / hat1 / size + wd * p if rule.decoupled else m / hat1
    return [p - float(o["lr"]) * update, m, moving.reshape(held[1].shape)]


_RULES: Mapping[str, Any] = {"sgd": _sgd, "adam": _adam, "adagrad": _adagrad, "lamb": _lamb, "novograd": _novograd}
