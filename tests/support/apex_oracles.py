"""Apex's optimizers as loops over single parameters in fp64, written from their papers and Apex's documentation.

Each function takes parameters, a list of gradients for each step and the arguments of the optimizer's constructor, and
returns the parameters after all steps. Nothing of xamp is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

__all__ = ["ORACLES", "SHORT_CASES", "Steps", "lamb_steps", "make_case", "trained"]

Tensors = list[torch.Tensor]
Steps = Sequence[Tensors]
SHAPES = ((4, 3), (7,), (2, 3, 2), ())


def make_case(count: int = 100, seed: int = 0) -> tuple[Tensors, Steps]:
    """Return fp32 parameters below 1 in magnitude, and gradients of ``count`` steps, of which some are large."""
    generator = torch.Generator().manual_seed(seed)
    params = [torch.rand(shape, generator=generator) - 0.5 for shape in SHAPES]
    sizes = [(0.1, 1.0, 20.0)[step % 3] for step in range(count)]
    return params, [[torch.randn(shape, generator=generator) * size for shape in SHAPES] for size in sizes]


def trained(
    make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer], params: Tensors, steps: Steps
) -> Tensors:
    """Return the parameters after the steps of an optimizer, in fp64."""
    own = [torch.nn.Parameter(param.clone()) for param in params]
    optimizer = make(own)
    for grads in steps:
        for param, grad in zip(own, grads, strict=True):
            param.grad = grad.to(param.dtype)
        optimizer.step()
    return [param.detach().double() for param in own]


def adam(
    params: Tensors,
    steps: Steps,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    adam_w_mode: bool = True,
    weight_decay: float = 0.0,
    **_: Any,
) -> Tensors:
    values, first, second = _start(params, 2)
    for number, grads in enumerate(steps, 1):
        for i, grad in enumerate(grads):
            g = grad.double() + (0.0 if adam_w_mode else weight_decay * values[i])
            first[i] = betas[0] * first[i] + (1 - betas[0]) * g
            second[i] = betas[1] * second[i] + (1 - betas[1]) * g * g
            c1, c2 = (1 - betas[0] ** number, 1 - betas[1] ** number) if bias_correction else (1.0, 1.0)
            update = first[i] / c1 / ((second[i] / c2).sqrt() + eps)
            values[i] = values[i] - lr * (update + (weight_decay * values[i] if adam_w_mode else 0.0))
    return values


def lamb(params: Tensors, steps: Steps, **options: Any) -> Tensors:
    *_, last = lamb_steps(params, steps, **options)
    return last


def lamb_steps(
    params: Tensors,
    steps: Iterable[Tensors],
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.01,
    adam_w_mode: bool = True,
    grad_averaging: bool = True,
    max_grad_norm: float = 1.0,
    use_nvlamb: bool = False,
    **_: Any,
) -> Iterator[Tensors]:
    """Yield the parameters after each step; ``steps`` is asked for one after another."""
    values, first, second = _start(params, 2)
    for number, grads in enumerate(steps, 1):
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads))
        clip = norm / max_grad_norm if norm > max_grad_norm else 1.0
        for i, grad in enumerate(grads):
            g = grad.double() / clip + (0.0 if adam_w_mode else weight_decay * values[i])
            first[i] = betas[0] * first[i] + ((1 - betas[0]) if grad_averaging else 1.0) * g
            second[i] = betas[1] * second[i] + (1 - betas[1]) * g * g
            c1, c2 = (1 - betas[0] ** number, 1 - betas[1] ** number) if bias_correction else (1.0, 1.0)
            update = first[i] / c1 / ((second[i] / c2).sqrt() + eps)
            if adam_w_mode:
                update = update + weight_decay * values[i]
            ratio = 1.0
            sizes = float(values[i].norm()), float(update.norm())
            if (use_nvlamb or weight_decay != 0) and 0.0 not in sizes:
                ratio = sizes[0] / sizes[1]
            values[i] = values[i] - lr * ratio * update
        yield [*values]


def novograd(
    params: Tensors,
    steps: Steps,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    reg_inside_moment: bool = False,
    grad_averaging: bool = True,
    norm_type: int = 2,
    init_zero: bool = False,
    **_: Any,
) -> Tensors:
    values, first = _start(params, 1)
    norms = [0.0] * len(values)
    for number, grads in enumerate(steps, 1):
        for i, grad in enumerate(grads):
            g = grad.double()
            size = float(g.norm() if norm_type == 2 else g.abs().max())
            if number == 1 and not init_zero:
                norms[i] = size
            if norm_type == 2:
                norms[i] = math.sqrt(betas[1] * norms[i] ** 2 + (1 - betas[1]) * size**2)
            else:
                norms[i] = betas[1] * norms[i] + (1 - betas[1]) * size
            c1, c2 = (1 - betas[0] ** number, math.sqrt(1 - betas[1] ** number)) if bias_correction else (1.0, 1.0)
            beta3 = 1 - betas[0] if grad_averaging else 1.0
            divisor = norms[i] / c2 + eps
            if reg_inside_moment:
                first[i] = betas[0] * first[i] + beta3 * (g / divisor + weight_decay * values[i])
                update = first[i] / c1
            else:
                first[i] = betas[0] * first[i] + beta3 * g
                update = first[i] / c1 / divisor + weight_decay * values[i]
            values[i] = values[i] - lr * update
    return values


def sgd(
    params: Tensors,
    steps: Steps,
    lr: float = 1e-3,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    wd_after_momentum: bool = False,
    **_: Any,
) -> Tensors:
    values, moving = _start(params, 1)
    for number, grads in enumerate(steps, 1):
        for i, grad in enumerate(grads):
            g = grad.double() + (0.0 if wd_after_momentum else weight_decay * values[i])
            if momentum:
                moving[i] = g if number == 1 else momentum * moving[i] + (1 - dampening) * g
                g = g + momentum * moving[i] if nesterov else moving[i]
            if wd_after_momentum:
                g = g + weight_decay * values[i]
            values[i] = values[i] - lr * g
    return values


def adagrad(
    params: Tensors,
    steps: Steps,
    lr: float = 1e-2,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    adagrad_w_mode: bool = False,
    **_: Any,
) -> Tensors:
    values, sums = _start(params, 1)
    for grads in steps:
        for i, grad in enumerate(grads):
            g = grad.double() + (0.0 if adagrad_w_mode else weight_decay * values[i])
            sums[i] = sums[i] + g * g
            update = g / (sums[i].sqrt() + eps) + (weight_decay * values[i] if adagrad_w_mode else 0.0)
            values[i] = values[i] - lr * update
    return values


def _start(params: Tensors, moments: int) -> tuple[Tensors, ...]:
    wide = [param.double() for param in params]
    return (wide, *([torch.zeros_like(param) for param in wide] for _ in range(moments)))


ORACLES: dict[str, Callable[..., Tensors]] = {
    "FusedAdam": adam,
    "FusedAdagrad": adagrad,
    "FusedLAMB": lamb,
    "FusedMixedPrecisionLamb": lamb,
    "FusedNovoGrad": novograd,
    "FusedSGD": sgd,
}

SHORT_CASES: list[tuple[str, dict[str, Any]]] = [
    ("FusedAdam", {"lr": 3e-3, "weight_decay": 0.1}),
    ("FusedAdam", {"adam_w_mode": False, "weight_decay": 0.1, "betas": (0.5, 0.9), "eps": 1e-3}),
    ("FusedAdam", {"capturable": True, "weight_decay": 0.1, "bias_correction": False}),
    ("FusedAdam", {"capturable": True, "master_weights": True}),
    ("FusedSGD", {"lr": 2e-3}),
    ("FusedSGD", {"lr": 2e-3, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    ("FusedSGD", {"lr": 2e-3, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("FusedSGD", {"lr": 2e-3, "momentum": 0.9, "weight_decay": 0.1, "wd_after_momentum": True}),
    ("FusedLAMB", {"lr": 3e-3}),
    ("FusedLAMB", {"weight_decay": 0.0, "use_nvlamb": True, "bias_correction": False, "grad_averaging": False}),
    ("FusedLAMB", {"adam_w_mode": False, "weight_decay": 0.1, "max_grad_norm": 5.0}),
    ("FusedMixedPrecisionLamb", {"lr": 3e-3, "max_grad_norm": 5.0}),
    ("FusedAdagrad", {"lr": 3e-2, "weight_decay": 0.1}),
    ("FusedAdagrad", {"adagrad_w_mode": True, "weight_decay": 0.1}),
    ("FusedNovoGrad", {"lr": 3e-3, "weight_decay": 0.1}),
    ("FusedNovoGrad", {"reg_inside_moment": True, "weight_decay": 0.1}),
    ("FusedNovoGrad", {"grad_averaging": False, "bias_correction": False}),
    ("FusedNovoGrad", {"norm_type": 0, "betas": (0.95, 0.98), "eps": 1e-3}),
    ("FusedNovoGrad", {"init_zero": True, "set_grad_none": False}),
]
"""Classes with their arguments, for runs of a few steps."""
