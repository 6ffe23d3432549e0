"""Ascend's optimizers without a counterpart in torch, each against a loop in fp64 over 100 steps.

Covers: xamp.apex.optimizers.npu_fused.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from apex_oracles import make_case, trained

from xamp.apex import optimizers

Tensors = list[torch.Tensor]


def _compare(name: str, options: dict[str, Any], expected: Tensors, params: Tensors, steps: Any) -> None:
    found = trained(lambda own: getattr(optimizers, name)(own, **options), params, steps)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["Lamb", "NpuFusedLamb"])
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1, "lr": 3e-3}, {"adam": True, "betas": (0.5, 0.9)}])
def test_lamb(name: str, options: dict[str, Any]) -> None:
    params, steps = make_case()
    _compare(name, options, _lamb(params, steps, **options), params, steps)


def test_lamb_with_the_norm_of_all_gradients() -> None:
    params, steps = make_case()
    scaled = []
    for grads in steps:
        norm = float(torch.cat([grad.flatten() for grad in grads]).double().norm())
        scaled.append([grad.double() / max(1.0, norm) for grad in grads])
    _compare("NpuFusedLamb", {"use_global_grad_norm": True}, _lamb(params, scaled), params, steps)


def _lamb(
    params: Tensors,
    steps: Any,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    adam: bool = False,
) -> Tensors:
    values = [param.double() for param in params]
    first, second = [torch.zeros_like(v) for v in values], [torch.zeros_like(v) for v in values]
    for grads in steps:
        for i, grad in enumerate(grads):
            first[i] = betas[0] * first[i] + (1 - betas[0]) * grad.double()
            second[i] = betas[1] * second[i] + (1 - betas[1]) * grad.double() ** 2
            update = first[i] / (second[i].sqrt() + eps) + weight_decay * values[i]
            ratio = 1.0 if adam else float(values[i].norm().clamp(0, 10) / update.norm())
            values[i] = values[i] - lr * ratio * update
    return values


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9, "weight_decay": 0.1},
        {"momentum": 0.9, "lr_in_momentum": False, "centered": True},
        {"decoupled_decay": True, "weight_decay": 1e-3, "alpha": 0.5, "eps": 1e-3},
    ],
)
def test_rmsprop_of_tensorflow(options: dict[str, Any]) -> None:
    params, steps = make_case()
    given = {"alpha": 0.9, "eps": 1e-10, "weight_decay": 0.0, "momentum": 0.0, "lr": 1e-3, **options}
    values = [param.double() for param in params]
    squares, means, moving = ([torch.zeros_like(v) for v in values] for _ in range(3))
    for grads in steps:
        for i, grad in enumerate(grads):
            g = grad.double()
            if given.get("decoupled_decay"):
                values[i] = values[i] * (1 - given["weight_decay"])
            else:
                g = g + given["weight_decay"] * values[i]
            squares[i] = squares[i] + (1 - given["alpha"]) * (g * g - squares[i])
            means[i] = means[i] + (1 - given["alpha"]) * (g - means[i])
            spread = squares[i] - (means[i] ** 2 if given.get("centered") else 0.0)
            update = g / (spread + given["eps"]).sqrt()
            in_momentum = given.get("lr_in_momentum", True)
            if given["momentum"]:
                moving[i] = given["momentum"] * moving[i] + (given["lr"] if in_momentum else 1.0) * update
                values[i] = values[i] - (1.0 if in_momentum else given["lr"]) * moving[i]
            else:
                values[i] = values[i] - given["lr"] * update
    _compare("NpuFusedRMSpropTF", {"lr": 1e-3, **options}, values, params, steps)


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1, "nesterov": True}, {"delta": 1e9, "weight_decay": 0.1}])
def test_adamp(options: dict[str, Any]) -> None:
    params, steps = make_case(50)
    given = {"weight_decay": 0.0, "delta": 0.1, "wd_ratio": 0.1, "nesterov": False, **options}
    values = [param.double() for param in params]
    first, second = [torch.zeros_like(v) for v in values], [torch.zeros_like(v) for v in values]
    for number, grads in enumerate(steps, 1):
        for i, grad in enumerate(grads):
            g = grad.double()
            first[i] = 0.9 * first[i] + 0.1 * g
            second[i] = 0.999 * second[i] + 0.001 * g * g
            root = (second[i] / (1 - 0.999**number)).sqrt() + 1e-8
            update = (0.9 * first[i] + 0.1 * g if given["nesterov"] else first[i]) / root
            ratio = 1.0
            if g.dim() > 1:
                for rows in (g.size(0), 1):
                    w, d = values[i].reshape(rows, -1), g.reshape(rows, -1)
                    cosine = (w * d).sum(1).abs() / (w.norm(dim=1) * d.norm(dim=1))
                    if float(cosine.max()) < given["delta"] / math.sqrt(w.size(1)):
                        unit = w / (w.norm(dim=1, keepdim=True) + 1e-8)
                        flat = update.reshape(rows, -1)
                        update = (flat - unit * (unit * flat).sum(1, keepdim=True)).view_as(update)
                        ratio = given["wd_ratio"]
                        break
            values[i] = values[i] * (1 - 1e-3 * given["weight_decay"] * ratio)
            values[i] = values[i] - 1e-3 / (1 - 0.9**number) * update
    _compare("NpuFusedAdamP", options, values, params, steps)


@pytest.mark.parametrize("schedule", ["warmup_linear", "warmup_constant", "warmup_cosine", "warmup_poly"])
@pytest.mark.parametrize("options", [{}, {"warmup": 0.2, "t_total": 100}, {"max_grad_norm": 1.0, "weight_decay": 0.0}])
def test_bert_adam(schedule: str, options: dict[str, Any]) -> None:
    params, steps = make_case()
    values = [param.double() for param in params]
    first, second = [torch.zeros_like(v) for v in values], [torch.zeros_like(v) for v in values]
    for number, grads in enumerate(steps):
        rate, x, warmup = 1e-3, number / 100, options.get("warmup", -1)
        if "t_total" in options:
            after = {
                "warmup_linear": max((x - 1) / (warmup - 1), 0.0),
                "warmup_constant": 1.0,
                "warmup_cosine": 0.5 * (1 + math.cos(math.pi * x)),
                "warmup_poly": (1 - x) ** 0.5,
            }[schedule]
            rate *= x / warmup if x < warmup else after
        norm = float(torch.cat([grad.flatten() for grad in grads]).double().norm())
        divisor = max(1.0, norm) if "max_grad_norm" in options else 1.0
        for i, grad in enumerate(grads):
            g = grad.double() / divisor
            first[i] = 0.9 * first[i] + 0.1 * g
            second[i] = 0.99 * second[i] + 0.01 * g * g
            update = first[i] / (second[i].sqrt() + 1e-6) + options.get("weight_decay", 0.01) * values[i]
            values[i] = values[i] - rate * update
    _compare("NpuFusedBertAdam", {"lr": 1e-3, "schedule": schedule, **options}, values, params, steps)
